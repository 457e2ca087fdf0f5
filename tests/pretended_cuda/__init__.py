"""A CUDA device that this process pretends to have, so that code for one runs without one.

Tensors on it are real tensors of device `cuda:0`, in memory of their own that is counted, and its
operations are the CPU's. It is as strict as a device where code goes wrong: a tensor of the CPU
among the device's, `numpy()` of a device's tensor, a generator of the other place, a graph that
waits for the host or whose values Python had fixed. It shows neither speed nor kernels' rounding,
has one stream and no NCCL, and vLLM does not run on it.

Import it before torch, in a process of its own: `PRETENDED_CUDA=<library> python -m pytest
-p pretended_cuda …`, with the library that `python -m pretended_cuda <folder>` built.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

NAME = "pretended_cuda_device"  # of the extension module


def _install(library: Path) -> None:
    """Register the device, then import torch: torch asks for its devices once, on import."""
    if "torch" in sys.modules:
        raise RuntimeError("pretended_cuda was imported after torch; import it first")
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    bindings = Path(found.origin).parent / "lib" / "libtorch_python.so"
    for each in (bindings, library):
        ctypes.CDLL(str(each), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(library.parent))

    from pretended_cuda import flash, runtime

    runtime.install()
    flash.install()


if "PRETENDED_CUDA" in os.environ:
    _install(Path(os.environ["PRETENDED_CUDA"]))
