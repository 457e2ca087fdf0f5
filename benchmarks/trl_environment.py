"""TRL's own environment: a virtual environment in a cache folder, with everything pinned.

PyTorch, transformers and accelerate are the versions that this project runs on, so that both sides
of a comparison stand on the same kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

TRL = "1.16.0"
SHARED = ("torch", "transformers", "accelerate")  # at our versions
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hybridflyte"


def trl_python(cache: Path = CACHE) -> Path:
    """Return the interpreter of TRL's environment; make that on first use (a minute or two)."""
    pins = [f"trl=={TRL}", *(f"{name}=={version(name)}" for name in SHARED)]
    folder = cache / f"trl-{TRL}"
    python, ready = folder / "bin" / "python", folder / "ready.txt"
    if ready.is_file() and ready.read_text().split() == pins:
        return python
    print(f"making TRL's environment in {folder}: {' '.join(pins)}", flush=True)
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, *pins], check=True)
    ready.write_text("\n".join(pins))
    print(f"environment ready after {time.perf_counter() - begin:.0f} s", flush=True)
    return python


if __name__ == "__main__":
    print(trl_python())
