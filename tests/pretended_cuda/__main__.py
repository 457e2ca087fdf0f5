"""`python -m pretended_cuda FOLDER`: compile the device there, and print the library's path."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.utils.cpp_extension import load

from pretended_cuda import NAME

if __name__ == "__main__":
    folder, here = Path(sys.argv[1]), Path(__file__).parent
    sources = [str(here / "device.cpp"), str(here / "ops.cpp")]
    load(NAME, sources, build_directory=str(folder), extra_cflags=["-O1"])
    print(folder / f"{NAME}.so")
