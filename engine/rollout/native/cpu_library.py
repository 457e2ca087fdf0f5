"""The compiled library of `cpu/`: loops of decoding for CPUs that multiply bfloat16 (AVX512-BF16).

It is compiled on first use, in one or two seconds, and kept in the user's cache folder. Without a C
compiler and on other processors there is none, and PyTorch's operations do the same work; a
compiler that fails is named in the log.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("cpu")
_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-mfma"]
_FLAGS += [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")]
_COMPILER_S = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """`cpu/step.c`, compiled; None where that can't be done or used."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx512_bf16_supported():
        return None
    compiler = shutil.which(os.environ.get("CC") or "cc")
    sources = [path.read_bytes() for path in sorted(_SOURCES.glob("*.[ch]"))]
    digest = hashlib.sha256(b"\0".join([" ".join(_FLAGS).encode(), *sources])).hexdigest()
    name = f"decode-{digest[:20]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hybridflyte")
    try:
        if (folder / name).is_file():
            return _loaded(folder / name)
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory() as own:
            built = Path(own) / name
            command = [compiler, *_FLAGS, "-o", str(built), str(_SOURCES / "step.c"), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_S)
            found = _loaded(built)  # stays usable once the file is gone
            _keep(built, folder)
            return found
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the decode step can't be compiled, and runs slower without: %s", error)
        return None


def _keep(built: Path, folder: Path) -> None:
    """Copy the library to `folder`, whole or not at all; a folder that can't be written is left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{built.name}.{os.getpid()}"
        shutil.copyfile(built, draft)
        draft.rename(folder / built.name)
    except OSError:
        return


def _loaded(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    found.decode_step.argtypes = [c_void_p, c_void_p, c_int64]
    found.decode_step.restype = None
    found.scratch_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    found.scratch_bytes.restype = c_int64
    found.sample_rows.argtypes = [
        *(c_void_p, c_int64, c_int64, c_double),  # logits, rows, size, temperature
        *(c_void_p, c_void_p, c_int64),  # keys, columns, threads
        *(c_void_p, c_void_p, c_void_p),  # sums, tokens, log-probs
    ]
    found.sample_rows.restype = None
    return found
