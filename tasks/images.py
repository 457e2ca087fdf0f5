"""Which image a task runs in.

`python -m workflows.register` puts references by digest into the variables below before it loads
the tasks, so that cache keys hold the images. Without them (`pyflyte run`, `register`, `package`)
Flyte fills in what its `--image` says.
"""

from __future__ import annotations

import os

TEMPLATE = "{{.image.default.fqn}}:{{.image.default.version}}"
VARIABLES = {
    "default": "HYBRIDFLYTE_IMAGE",
    "cuda": "HYBRIDFLYTE_CUDA_IMAGE",
    "rocm": "HYBRIDFLYTE_ROCM_IMAGE",
}


def image(kind: str = "default") -> str:
    """The image of a kind ("default", "cuda" or "rocm"); without one of its own, the default."""
    chosen = os.environ.get(VARIABLES[kind]) or os.environ.get(VARIABLES["default"])
    return chosen or TEMPLATE
