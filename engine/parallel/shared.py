"""One storage for a rank's training share and the rollout slices that contain it.

HybridFlow's grouping makes a rank's training share a part of its rollout share (arXiv:2409.19256,
section 5.3): lying there, it is not held twice, and an exchange need not copy it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine.parallel.exchange import view
from engine.parallel.module_shards import Rename, named_parameters
from engine.parallel.reshard import Kept, RankPlan


@torch.no_grad()
def share_storage(
    model: nn.Module,
    plan: RankPlan,
    target: Mapping[str, Tensor],
    rename: Rename | None = None,
    *,
    columns: bool = False,
) -> int:
    """Move `model`'s parameters into rollout's tensors, in place; return the bytes now shared.

    `plan` and `target` are an Exchange's; make that one afterwards. Values stay as they are, and
    training goes on as before: optimizers keep their parameters. A parameter whose share is not a
    part of one tensor of the same dtype and device stays where it is; so do all under FSDP, which
    has a storage of its own.

    With `columns`, shares that are columns of a rollout matrix move as well. Their rows are then
    apart in memory: no fused optimizer may have them (torch's AdamW reads `numel` elements from
    the first on, whatever the strides).
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return 0
    kept: dict[str, list[Kept]] = defaultdict(list)
    for one in plan.kept:
        kept[one.parameter].append(one)
    shared = 0
    for name, parameter in named_parameters(model, rename):
        holder: Any = parameter
        local: Tensor = holder._local_tensor if isinstance(parameter, DTensor) else holder.data
        boxes = kept[name]
        if len(boxes) != 1 or boxes[0].size != tuple(local.shape):
            continue
        place = view(target[plan.storages[name]], boxes[0].target, boxes[0].size)
        if (place.dtype, place.device) != (local.dtype, local.device):
            continue
        if not columns and not place.is_contiguous():
            continue
        place.copy_(local)
        if isinstance(parameter, DTensor):
            local.data = place
        else:
            holder.data = place
        shared += place.nbytes
    return shared
