"""C sources for CPUs that multiply bfloat16 (AMX, AVX512-BF16), compiled on first use.

Compilation takes one or two seconds, and the result is kept in the user's cache folder. Without
a C compiler and on other processors there is none, and PyTorch's operations do the same work; a
compiler that fails is named in the log. Sources are in `cpu/`; `training_ops`, `attention` and
`decoder_layer` call those of training, `decoding_ops` those of decoding. `choices` says for which
shapes they run.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from engine.storage.filesystem import write_atomically

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("cpu")
_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-mfma"]
_FLAGS += [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")]
_INSTRUCTION_FLAGS = {  # that multiply bfloat16; FMA those of float32, widened in the cache
    "AVX512-BF16": [],
    "FMA": ["-DMULTIPLY_ADD"],
    "AMX": ["-DTILES", "-mamx-tile", "-mamx-bf16"],
}
_COMPILER_S = 120.0


@cache
def has_tiles() -> bool:
    """Whether this process may use AMX's bfloat16 tiles; it asks the kernel for them."""
    return (
        platform.machine() == "x86_64"
        and torch.cpu._is_amx_tile_supported()
        and bool(torch.cpu._init_amx())
    )


def cache_folder() -> Path:
    """Return the user's folder of compiled kernels, and of what was measured of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hybridflyte")


def sources_digest(flags: Sequence[str] = ()) -> str:
    """Return the digest of all sources and flags, of 20 characters."""
    contents = [path.read_bytes() for path in sorted(_SOURCES.glob("*.[ch]"))]
    parts = [" ".join([*_FLAGS, *flags]).encode(), *contents]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def compiled(source: str, instructions: str = "AVX512-BF16") -> ctypes.CDLL | None:
    """Compile a file of `cpu/`, its products by `instructions`; None where that can't be done.

    OpenMP's threads are those of PyTorch.
    """
    if platform.machine() != "x86_64" or not torch.cpu._is_avx512_bf16_supported():
        return None
    compiler = shutil.which(os.environ.get("CC") or "cc")
    flags = _INSTRUCTION_FLAGS[instructions]
    name = f"{Path(source).stem}-{sources_digest(flags)}.so"
    folder = cache_folder()
    try:
        if (folder / name).is_file():
            return ctypes.CDLL(str(folder / name))
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory() as scratch:
            built = Path(scratch) / name
            command = [compiler, *_FLAGS, *flags, "-o", str(built), str(_SOURCES / source), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_S)
            loaded = ctypes.CDLL(str(built))  # stays usable once the file is gone
            with contextlib.suppress(OSError):  # a folder that can't be written is left
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / name, [built.read_bytes()])
            return loaded
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s can't be compiled, and runs slower without: %s", source, error)
        return None
