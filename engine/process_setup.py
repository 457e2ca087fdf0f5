"""What importing `engine` sets up in a process: short spins, kept memory, no unused imports."""

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# transformers 5.19 imports scikit-learn and SciPy, and accelerate 1.15 boto3, where they are
# installed: for assisted generation, a loss of object detection, SageMaker's settings. That would
# slow down the start of every Ray worker, rank and command.
# Module → the availability check that it must find false, and the module that it takes it from.
_CHECKS = {
    "transformers.generation.candidate_generator": ("transformers.utils", "is_sklearn_available"),
    "transformers.loss.loss_for_object_detection": ("transformers.utils", "is_scipy_available"),
    "accelerate.commands.config.sagemaker": ("accelerate.utils.imports", "is_boto3_available"),
}


class _AvailabilityHook(MetaPathFinder):
    """Finds no module; acts before one of `_CHECKS` is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _CHECKS:
            source, check = _CHECKS[name]
            setattr(sys.modules[source], check, lambda: False)
        return None


def skip_optional_imports() -> None:
    """Keep transformers and accelerate from importing what is not used here; idempotent."""
    if not any(isinstance(finder, _AvailabilityHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AvailabilityHook())


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon while they wait for each other, which costs an idle machine
    nothing; on a busy one, spinning turns milliseconds into seconds."""
    if "GOMP_SPINCOUNT" in os.environ:
        return
    os.environ["GOMP_SPINCOUNT"] = "2000"  # read when torch is imported, here and in children
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "ones"):
        return
    # It was imported before. libgomp also spins briefly in a process with more threads than cores:
    # this thread has a team of its own, which sleeps.

    def hold_team() -> None:
        torch.ones(1 << 16).add_(1)  # large enough for all threads
        threading.Event().wait()

    threading.Thread(target=hold_team, name="openmp-team", daemon=True).start()


# Options of malloc.h, and values of them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER, _LARGEST = -1, 2**31 - 1
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, for all threads alike; say whether it does.

    glibc hands a large block back to the system as soon as it is freed. A training step frees and
    allocates the same activations again, and would fault in each page again: millions a run.
    Another C library stays as it is, and so do settings of malloc's in the environment.
    """
    tuned = "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    # Arenas of single threads hold blocks of 64 MiB at most: one arena serves all.
    settings = ((_TRIM_THRESHOLD, _NEVER), (_MMAP_THRESHOLD, _LARGEST), (_ARENA_MAX, 1))
    return all(list(map(libc.mallopt, *zip(*settings, strict=True))))


def release_freed_memory() -> None:
    """Hand back to the system what malloc and the accelerator's allocator have kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
