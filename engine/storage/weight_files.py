"""A model's safetensors files: read slice by slice, written a few tensors at a time.

A file of Mixtral, Qwen2-MoE or Qwen3-MoE has three matrices an expert; a transformers module has
two tensors for all of a layer's experts, `gate_up_proj` [E, 2·I, H], the gate's rows above, and
`down_proj` [E, H, I]. `stack_experts` and `file_tensors` translate.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

BUCKET_BYTES = 64 << 20  # that reading takes besides its target
FILE_BYTES = 4 << 30  # of one file, at most, unless a single tensor is larger
_SAMPLES = 64


class WeightFiles:
    """The tensors of safetensors files, by name. Files are mapped: opening them reads no weight."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """Raises OSError and SafetensorError for files that are missing or damaged."""
        self._slices: dict[str, Any] = {}
        for path in paths:
            opened = safe_open(str(path), framework="pt")
            self._slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(tensor.get_shape()) for name, tensor in self._slices.items()
        }

    def stack(self, name: str, parts: Sequence[Sequence[str]]) -> None:
        """Call `name` the matrices `parts`: each row's one below the other, rows side by side."""
        self._slices[name] = _Stack([[self._slices[part] for part in row] for row in parts])
        self.shapes[name] = tuple(self._slices[name].get_shape())

    def alias(self, name: str, there: str) -> None:
        """Let `name` be another name of the tensor `there`."""
        self._slices[name], self.shapes[name] = self._slices[there], self.shapes[there]

    @torch.no_grad()
    def read(self, name: str, start: Sequence[int], into: Tensor) -> None:
        """Fill `into`, of any dtype and device, with the box of its shape at `start`."""
        source = self._slices[name]
        if not into.dim():
            into.copy_(source[...])
            return
        columns = zip(start[1:], into.shape[1:], strict=True)
        rest = tuple(slice(first, first + count) for first, count in columns)
        row_bytes = 4 * math.prod(into.shape[1:])  # of float32, the widest that weights come in
        first, rows = start[0], max(1, BUCKET_BYTES // max(1, row_bytes))
        for part in into.split(rows):
            part.copy_(source[(slice(first, first + len(part)), *rest)])
            first += len(part)

    def sample(self, name: str) -> Tensor:
        """`spread_sample` of a tensor, in the file's dtype, without reading all of it."""
        tensor: Tensor = self._slices[name][...]
        return spread_sample(tensor)


class _Stack:
    """Matrices [rows, columns] as one tensor [N, all rows, columns], with a slice's interface."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.get_shape()[0] for part in parts[0]))

    def get_shape(self) -> list[int]:
        return [len(self._parts), self._ends[-1], self._parts[0][0].get_shape()[1]]

    def __getitem__(self, index: EllipsisType | tuple[slice, slice, slice]) -> Tensor:
        chosen, rows, columns = (slice(None),) * 3 if index is ... else index
        first, last, _ = rows.indices(self._ends[-1])
        matrices = []
        for parts in self._parts[chosen]:
            pieces = [
                part[max(first - begin, 0) : min(last, end) - begin, columns]
                for part, (begin, end) in zip(parts, pairwise([0, *self._ends]), strict=True)
                if first < end and begin < last
            ]
            matrices.append(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
        return torch.stack(matrices)


def spread_sample(tensor: Tensor) -> Tensor:
    """A few of a tensor's values, evenly spread, in a row."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)]


def write_weights(named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors as transformers and vLLM read them: `model.safetensors`, or parts of it.

    At most FILE_BYTES of them are in memory at a time. Raises OSError and SafetensorError.
    """
    waiting: dict[str, Tensor] = {}
    drafts: dict[Path, list[str]] = {}  # files under their first names, and their tensors
    total = size = 0

    def flush() -> None:
        draft = folder / f"model-{len(drafts) + 1:05d}.safetensors"
        drafts[draft] = list(waiting)
        save_file(waiting, draft, metadata={"format": "pt"})
        waiting.clear()

    for name, tensor in named:
        if waiting and size + tensor.nbytes > FILE_BYTES:
            flush()
            size = 0
        waiting[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for draft, names in drafts.items():
        stem = f"{draft.stem}-of-{len(drafts):05d}" if len(drafts) > 1 else "model"
        draft.rename(folder / f"{stem}.safetensors")
        weight_map |= dict.fromkeys(names, f"{stem}.safetensors")
    if len(drafts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_BLOCKS = {  # by model type: the block's name in files, and matrices that a tensor has
    "mixtral": ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen2_moe": ("mlp", _GATED),
    "qwen3_moe": ("mlp", _GATED),
}
_BLOCK = "mlp"  # its name in modules

MIXTURES = tuple(_BLOCKS)  # model types whose experts and routers are known


def stack_experts(files: WeightFiles, model_type: str, tensors: Mapping[str, Tensor]) -> None:
    """Let `files` have a module's `tensors` by its own names, unless they do; nothing is read."""
    if model_type not in _BLOCKS:
        return
    block, matrices = _BLOCKS[model_type]
    for name, tensor in tensors.items():
        if name in files.shapes:
            continue
        owner, _, parameter = name.rpartition(".")
        there = _in_files(owner, block)
        if parameter in matrices and owner.endswith(".experts"):
            parts = [
                [f"{there}.{expert}.{matrix}.weight" for matrix in matrices[parameter]]
                for expert in range(tensor.shape[0])
            ]
            if all(part in files.shapes for row in parts for part in row):
                files.stack(name, parts)
        elif (alias := f"{there}.{parameter}") != name and alias in files.shapes:
            files.alias(name, alias)


def file_tensors(
    model_type: str, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """A module's whole tensors as its files name and cut them; matrices are views."""
    block, matrices = _BLOCKS.get(model_type, (_BLOCK, {}))
    for name, tensor in named:
        owner, _, parameter = name.rpartition(".")
        there = _in_files(owner, block)
        if parameter not in matrices or not owner.endswith(".experts"):
            yield f"{there}.{parameter}" if owner else name, tensor
            continue
        for expert, matrix_pair in enumerate(tensor):
            parts = matrix_pair.chunk(len(matrices[parameter]))
            for matrix, part in zip(matrices[parameter], parts, strict=True):
                yield f"{there}.{expert}.{matrix}.weight", part


def _in_files(owner: str, block: str) -> str:
    return ".".join(block if piece == _BLOCK else piece for piece in owner.split("."))
