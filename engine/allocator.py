"""Keeps memory that is freed in the process, so that the next step finds it there, until the end.

glibc hands a large block back to the system as soon as it is freed. A training step frees and
allocates the same activations again, and would fault in each page again: millions of page faults a
run.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = -1
_LARGEST = 2**31 - 1
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, for all threads alike; say whether it does.

    It doesn't where the C library is another than glibc, or where the environment has settings of
    malloc's own (`MALLOC_…_`, `GLIBC_TUNABLES`), which stay.
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
