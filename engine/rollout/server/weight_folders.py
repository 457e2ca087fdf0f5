"""The policy as a folder on a disk that trainer and server share, named by its content.

`policy-v12-1a2b3c4d` holds policy version 12 and weights whose checksum is 1a2b3c4d: two runs, or
one resumed with other weights, never share a tag. The server's workers check the name.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.storage.weight_files import write_weights

_TAG = re.compile(r"policy-v\d+-[0-9a-f]{8}")
_UNFINISHED = re.compile(r"\.writing-[0-9a-z_]{8}")  # what `mkdtemp` makes
_READ_BYTES = 16 << 20
_KEPT = 2  # folders: a server may still be reading the one before
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")
Weights = Iterable[tuple[str, Tensor]]


class WeightFolders:
    """Writes each version to a folder of its own below `root`, and removes the older ones.

    A `root` belongs to one run at a time: folders of these names that an earlier one left there
    count as older versions, and unfinished ones are removed. Without a `root` a temporary one is
    created on this machine, and removed in the end.
    """

    def __init__(self, root: str) -> None:
        try:
            if root:
                Path(root).mkdir(parents=True, exist_ok=True)
            self.root = Path(root or tempfile.mkdtemp(prefix="hybridflyte-weights-")).resolve()
            if not root:
                self.root.chmod(0o755)  # the server may run as another user
        except OSError as error:
            raise RolloutError(
                f"rollout.server.weights_dir={root!r} can't be used: {error}; name a folder that "
                f"trainer and server both can write and read"
            ) from error
        self._written: list[Path] | None = None  # oldest first; None before the first write
        self._remove: Callable[[], object] | None = None
        if not root:  # at the latest when this process ends
            self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def write(self, weights: Weights, model: nn.Module, version: int) -> Path:
        """Write (name, tensor) pairs and `model`'s configuration; return the folder, `…/tag`.

        It gets its name only when it is complete. Raises RolloutError when the disk is full.
        """
        try:
            if self._written is None:  # on the one rank that writes
                self._written = _left_by_an_earlier_run(self.root)
            unfinished = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.root))
            unfinished.chmod(0o755)
            try:
                write_weights(weights, unfinished)
                _save_configuration(model, unfinished)
                for path in unfinished.iterdir():
                    path.chmod(0o644)
                total = checksum(unfinished)
                target = self.root / f"policy-v{version}-{total}"
                if target.exists() and checksum(target) != total:  # torn by a crash
                    shutil.rmtree(target)
                if not target.exists():
                    unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                f"policy version {version} could not be written to {self.root}: {error}; free "
                f"space there, or choose another rollout.server.weights_dir"
            ) from error
        self._written = [path for path in self._written if path != target] + [target]
        while len(self._written) > _KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        return target

    def close(self) -> None:
        """Remove a temporary root; safe to call twice."""
        if self._remove is not None:
            self._remove()


def find_tag(text: str) -> str | None:
    """The one tag in a server's answer; None if it has none, or more than one."""
    found = {match.group() for match in _TAG.finditer(text)}
    return found.pop() if len(found) == 1 else None


def _left_by_an_earlier_run(root: Path) -> list[Path]:
    """The versions in `root`, oldest first; what a crash left unfinished written is removed."""
    versions: list[Path] = []
    for path in root.iterdir():
        if path.is_symlink() or not path.is_dir():
            continue
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _TAG.fullmatch(path.name):
            versions.append(path)
    return sorted(versions, key=lambda path: path.stat().st_mtime_ns)


def checksum(folder: Path) -> str:
    """CRC-32 (8 hex digits) of all weight files in `folder`, in order of their names."""
    value = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                value = zlib.crc32(block, value)
    return f"{value:08x}"


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in `folder`'s weight files, read from their headers."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _save_configuration(model: nn.Module, folder: Path) -> None:
    """The configuration, and the tokenizer of the folder that the model came from, if any."""
    config: Any = model.config
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    source = Path(getattr(model, "name_or_path", "") or "/nonexistent")
    for pattern in _TOKENIZER if source.is_dir() else ():
        for path in source.glob(pattern):
            shutil.copy(path, folder)
