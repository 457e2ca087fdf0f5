"""What makes a checkpoint's tensors shards to `torch.distributed.checkpoint` (DCP).

DCP's safetensors reader takes all files of a folder as one checkpoint: it needs names that are
unique there, and in each file's header the offset of each shard in its whole tensor. So names begin
with role and part, and the header has the offsets. Then DCP loads them, under any sharding:

    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state = {"actor": {"model": dict(model.named_parameters())}}  # plain tensors, or DTensors
    torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader("step_500"))

Not here: which boxes a rank saves (`engine.runtime.sharded_train_state`), files and checksums
(`format`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from engine.checkpoint.state_dict import StateDict, Tensors

BOXES = "boxes"  # the part of a rank's state that says where its tensors lie in the whole
_RANK_PREFIX = re.compile(r"(?P<role>.+)-(?P<rank>\d{5})-of-\d{5}")


def name_prefix(rank_prefix: str, part: str, *, shared: bool) -> str:
    """What tensor names in a file begin with; `shared` tensors are shards of several ranks'.

    >>> name_prefix("actor-00001-of-00004", "model", shared=True)
    'actor.model.'
    >>> name_prefix("actor-00001-of-00004", "rng", shared=False)
    'actor.rank1.rng.'
    """
    match = _RANK_PREFIX.fullmatch(rank_prefix)
    if match is None:
        return f"{rank_prefix}.{part}."
    return f"{match['role']}." + ("" if shared else f"rank{int(match['rank'])}.") + f"{part}."


def shard_offsets(values: StateDict, tensors: Tensors) -> dict[str, list[int]] | None:
    """Where each shard begins in its whole tensor; None where these are not shards.

    `values[BOXES]` has `{"offset", "size"}` by parameter; a tensor belongs to the parameter of its
    name, or of its name without the last word, as moments do (`lm_head.weight.exp_avg`).
    """
    boxes: Mapping[str, Mapping[str, list[int]]] = values.get(BOXES, {})
    found = {}
    for name, tensor in tensors.items():
        box = boxes.get(name) or boxes.get(name.rpartition(".")[0])
        if box is None:
            return None
        is_box = list(tensor.shape) == box["size"]
        found[name] = list(box["offset"]) if is_box else [0] * tensor.dim()
    return found


def file_metadata(offsets: Mapping[str, list[int]]) -> dict[str, str]:
    """The metadata of a safetensors file as DCP reads it, from offsets by the names in the file."""
    info = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    sharding = json.dumps(info, separators=(",", ":"))
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding}
