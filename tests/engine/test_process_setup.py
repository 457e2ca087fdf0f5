"""What importing `engine` sets: freed memory stays in the process, and threads sleep soon."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = 12_000  # of one block, 48 MB
ROUNDS = 10
_C = """
import ctypes, engine

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = libc.free.argtypes = (ctypes.c_size_t,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

def allocate(count, size):
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        libc.memset(block, 1, size)
    return blocks
"""
_ALLOCATE = f"""{_C}
import resource, threading

def use_and_free():
    for _ in range({ROUNDS}):
        for block in allocate(2, {PAGES} * 4096 // 2):
            libc.free(block)

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=use_and_free)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**environment: str) -> int:
    """Minor page faults of a thread that allocates and frees the same memory again and again."""
    done = subprocess.run(
        [sys.executable, "-c", _ALLOCATE],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_pages_are_faulted_in_once() -> None:
    assert page_faults() < 1.5 * PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_settings_of_the_environment_stay() -> None:
    assert page_faults(MALLOC_TRIM_THRESHOLD_="131072") > 0.8 * ROUNDS * PAGES


_RELEASE = f"""{_C}
import psutil
from engine.process_setup import release_freed_memory

def mb():
    return psutil.Process().memory_info().rss >> 20

start = mb()
blocks = allocate(300, 1 << 20)
last = libc.malloc(1 << 20)  # above the blocks
for block in blocks:
    libc.free(block)
kept = mb() - start
release_freed_memory()
print(kept, mb() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_is_kept_can_be_handed_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RELEASE],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    kept, left = map(int, done.stdout.split())
    assert kept > 250
    assert left < 50


_SPIN = """
import time, torch
{}
ones = torch.ones(1 << 16).add_(1)
time.sleep(0.1)
before = time.process_time()
for _ in range(50):
    ones.add_(1)
    time.sleep(0.004)
print(time.process_time() - before)
"""


def test_threads_sleep_soon_though_torch_was_imported_first() -> None:
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))}

    def cpu_seconds(imports: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", _SPIN.format(imports)],
            env=unset | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return float(done.stdout)

    spinning = cpu_seconds("")
    if spinning < 0.1:
        pytest.skip("one core, or another OpenMP than libgomp: its threads don't spin")
    assert cpu_seconds("import engine") < spinning / 4
