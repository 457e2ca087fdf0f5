"""Flyte tasks around the stages of `engine.stages`: types, machines, caching, retries, decks.

`tasks.stages` has all tasks that make artifacts. What they stand on: `host` (Flyte as a stage sees
it), `variants` (a stage on the machines of a profile), `inputs` (the configuration as an input),
`flytekit_setup` (patches, which hold once any of them is loaded, images, credentials).
"""

import tasks.flytekit_setup  # noqa: F401
