"""Which image a task runs in.

`python -m workflows.register` sets the variables below to references by digest before it loads
the tasks, so that cache keys contain the images. Without them (`pyflyte run`, `register` or
`package`) Flyte fills in what its `--image` says.
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
