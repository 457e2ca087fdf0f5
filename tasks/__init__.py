"""Flyte tasks around the stages of `engine.stages`: types, machines, caching, retries, decks.

`tasks.stages` has all tasks that make artifacts. What they stand on: `host` (Flyte as a stage sees
it), `variants` (a stage on the machines of a profile), `inputs` (the configuration as an input),
`flytekit_setup` (patches, images, credentials). Once one of them is loaded, Ctrl-C gives exit
status 130.
"""

from tasks.flytekit_setup import set_ctrl_c_status

set_ctrl_c_status()
