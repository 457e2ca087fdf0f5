"""State dicts are nested dicts of tensors and plain values; they go to files and come back.

Names and offsets in the files are those that torch.distributed.checkpoint's safetensors reader
takes for shards: it reads all files of a folder as one checkpoint, under any sharding.

    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state = {"actor": {"model": dict(model.named_parameters())}}  # plain tensors, or DTensors
    torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader("step_500"))
"""

import json
import logging
import math
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from engine.errors import CheckpointError, DivergedError

log = logging.getLogger(__name__)

StateDict = dict[str, Any]  # keys are strings; leaves tensors, str, int, float, bool, None or lists
Tensors = dict[str, Tensor]

WEIGHTS = "model"  # the part of a state that holds a model's weights
_PLAIN = (str, int, float, NoneType)  # a tuple: `isinstance` is faster with it than with a union
_MARK = "$tensor"
_FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
_DTYPES = {**_FLOATS, **_INTEGERS, torch.uint8: "U8", torch.bool: "BOOL"}


class CpuStager:
    """Copies a state dict's tensors to CPU buffers, which every copy reuses and overwrites."""

    def __init__(self) -> None:
        self._buffers: Tensors = {}

    def stage(self, state: StateDict) -> tuple[StateDict, dict[str, Tensors]]:
        """Extract copies of a state's tensors; DivergedError for weights that are not finite."""
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
                if group == WEIGHTS:  # summed here, while the tensor is in the CPU's cache
                    wide = torch.float32 if tensor.dtype == torch.float16 else None
                    sums[name] = tensor.detach().sum(dtype=wide)
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


def extract_tensors(state: StateDict) -> tuple[StateDict, dict[str, Tensors]]:
    """Take the tensors out of a state dict, by the first level of keys: what is left is JSON.

    Raises CheckpointError for a value that neither JSON nor safetensors can hold.
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
        start, end = end, end + tensor.nbytes
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            flat = tensors[name].detach().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def seed_process_rng(text: str) -> None:
    """Seed the global generators of this process, which a new process seeds at random."""
    number = zlib.crc32(text.encode())
    random.seed(text)
    np.random.seed(number)
    torch.manual_seed(number)


def process_rng() -> StateDict:
    """The state of all global generators of this process, as a state dict."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    python = {"version": version, "words": _int64(words), "gauss": gauss}
    numpy: StateDict = {"kind": kind, "keys": _int64(keys), "position": int(position)}
    numpy |= {"has_gauss": int(has_gauss), "cached": float(cached)}
    state: StateDict = {"python": python, "numpy": numpy, "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _int64(words: ArrayLike) -> Tensor:
    return torch.from_numpy(np.array(words, dtype=np.int64))


def set_process_rng(state: StateDict) -> None:
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state:
        torch.cuda.set_rng_state_all(device_states(state["cuda"], torch.cuda.device_count()))


def device_states(states: Sequence[Tensor], devices: int) -> list[Tensor]:
    """Copies of the generators' states for `devices` devices; a warning where more were saved."""
    if len(states) > devices:
        warning = (
            "the checkpoint has generators of %d GPUs and this process sees %d; the others are "
            "left out, and what drew from them will draw other numbers"
        )
        log.warning(warning, len(states), devices)
    return [state.clone() for state in states[:devices]]


BOXES = "boxes"  # the part of a rank's state that says where its tensors lie in the whole
_RANK_PREFIX = re.compile(r"(?P<role>.+)-(?P<rank>\d{5})-of-\d{5}")


def name_prefix(rank_prefix: str, part: str, *, shared: bool) -> str:
    """What tensor names in a file begin with; `shared` tensors are shards of several ranks'.

    >>> name_prefix("actor-00001-of-00004", "model", shared=True)
    'actor.model.'
    >>> name_prefix("actor-00001-of-00004", "rng", shared=False)
    'actor.rank1.rng.'
    """
    if (match := _RANK_PREFIX.fullmatch(rank_prefix)) is None:
        return f"{rank_prefix}.{part}."
    return f"{match['role']}." + ("" if shared else f"rank{int(match['rank'])}.") + f"{part}."


def shard_offsets(values: StateDict, tensors: Tensors) -> dict[str, list[int]] | None:
    """Return each shard's first index in its whole tensor, by `values[BOXES]`, or None."""
    boxes: Mapping[str, Mapping[str, list[int]]] = values.get(BOXES, {})
    offsets = {}
    for name, tensor in tensors.items():
        # Moments are named by their parameter and a word more: `lm_head.weight.exp_avg`.
        box = boxes.get(name) or boxes.get(name.rpartition(".")[0])
        if box is None:
            return None
        is_box = list(tensor.shape) == box["size"]
        offsets[name] = list(box["offset"]) if is_box else [0] * tensor.dim()
    return offsets


def file_metadata(offsets: Mapping[str, list[int]]) -> dict[str, str]:
    """The metadata of a safetensors file as DCP reads it, from offsets by the names in the file."""
    info = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    sharding = json.dumps(info, separators=(",", ":"))
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding}
