"""State dicts: nested dicts of tensors and plain values, and their way to files and back.

What lives here: taking the tensors out of a state dict, copies of them in CPU memory, and the bytes
of safetensors files. What does not: names and checksums of files (`format`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError, DivergedError

StateDict = dict[str, Any]  # keys are strings; leaves tensors, str, int, float, bool, None or lists
Tensors = dict[str, Tensor]

WEIGHTS = "model"  # the part of a state that holds a model's weights
_PLAIN = (str, int, float, NoneType)  # a tuple: `isinstance` is faster with it than with a union
_MARK = "$tensor"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CpuStager:
    """Copies a state dict's tensors to CPU buffers that every copy reuses.

    Allocation costs more than the copy; so `stage` overwrites the tensors that the last call
    returned.
    """

    def __init__(self) -> None:
        self._buffers: Tensors = {}

    def stage(self, state: StateDict) -> tuple[StateDict, dict[str, Tensors]]:
        """Extract copies of the tensors of `state`, to be written while the originals change.

        Raises DivergedError for weights that are not finite: they are never saved.
        """
        values, groups = extract_tensors(state)
        weights = groups.get(WEIGHTS, {})
        sums: Tensors = {}
        buffers, moving = {}, False
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                key = f"{group}\0{name}"
                buffer = self._buffers.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    pinned = tensor.is_cuda
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                if group == WEIGHTS:  # here, while the tensor is in the CPU's cache
                    sums[name] = _total(tensor)
                moving = moving or tensor.is_cuda
                buffers[key] = tensors[name] = buffer
        if moving:
            torch.cuda.synchronize()
        self._buffers = buffers
        for name, total in sums.items():
            # A sum of finite values may overflow, so only the values themselves are a proof.
            if not math.isfinite(total) and not bool(weights[name].isfinite().all()):
                raise DivergedError(
                    f"{name} has values that are not finite: training has diverged; lower optim.lr "
                    "or look for bad rewards or data"
                )
        return values, groups


def _total(weight: Tensor) -> Tensor:
    """The sum of a tensor, on its device: finite only if all values are, and cheap to take."""
    flat = weight.detach()
    return flat.sum(dtype=torch.float32 if flat.dtype == torch.float16 else None)


def extract_tensors(state: StateDict) -> tuple[StateDict, dict[str, Tensors]]:
    """Take the tensors out of a state dict: what is left is JSON, with marks where they were.

    Tensors are grouped by the first level of keys. Raises CheckpointError for a value that neither
    JSON nor safetensors can hold.
    """
    groups: dict[str, Tensors] = {}

    def visit(value: object, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            group, key = path[0], ".".join(path[1:]) or path[0]
            tensors = groups.setdefault(group, {})
            if key in tensors or value.dtype not in _DTYPES:
                why = "is there twice" if key in tensors else f"has dtype {value.dtype}"
                raise CheckpointError(f"state {'.'.join(path)} {why}; a checkpoint can't hold it")
            tensors[key] = value
            return {_MARK: [group, key]}
        if isinstance(value, dict) and all(isinstance(k, str) and k != _MARK for k in value):
            return {
                k: v if isinstance(v, _PLAIN) else visit(v, (*path, k)) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                v if isinstance(v, _PLAIN) else visit(v, (*path, str(i)))
                for i, v in enumerate(value)
            ]
        raise CheckpointError(
            f"state {'.'.join(path)} is a {type(value).__name__}, which a checkpoint can't hold; "
            "give tensors, numbers, strings, lists and dicts with string keys"
        )

    return visit(state, ()), groups


def insert_tensors(values: object, groups: dict[str, Tensors]) -> Any:
    """Put the tensors back where `extract_tensors` took them from; tuples have become lists."""
    if isinstance(values, dict):
        if set(values) == {_MARK}:
            group, key = values[_MARK]
            return groups[group][key]
        return {k: insert_tensors(v, groups) for k, v in values.items()}
    return [insert_tensors(item, groups) for item in values] if isinstance(values, list) else values


def safetensors_bytes(
    tensors: Tensors, metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece, without a second copy in memory."""
    # Wide types first keep every tensor aligned to its own width.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + byte_count(tensor)
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            flat = tensors[name].detach().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def byte_count(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
