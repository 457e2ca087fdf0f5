"""What a rank keeps of a model, read from files straight into its shards.

The model was laid out over the ranks without storage (`engine.models.unloaded`). A rank's memory
then holds its shards and, while one is read, a bucket; no rank has a whole model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.unloaded import UnloadedModel
from engine.parallel.gather import named_tensors
from engine.parallel.module_shards import local_box, local_tensor
from engine.parallel.tensor_parallel import tied_parameters


@torch.no_grad()
def load_shards(
    module: nn.Module, source: UnloadedModel, device: torch.device, parameters: torch.device
) -> None:
    """Give `module`, this rank's part of `source`'s, storage and values.

    Buffers go to `device`; `parameters` is the same, or the CPU where they are offloaded. Names are
    those of the whole model, or of the embedding that a head in another stage is tied to.
    """
    tied = tied_parameters(module)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # a tied parameter is met more than once

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)
        if id(tensor) not in made:
            where = parameters if isinstance(tensor, nn.Parameter) else device
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=where)
        return made[id(tensor)][1]

    module._apply(allocate)  # FSDP's module takes note of its parameters' new storage here
    for owner, name, first, name_there in tied:
        owner.register_parameter(name, first.get_parameter(name_there))
    for name, tensor in named_tensors(module).items():
        shard, box = local_tensor(tensor), local_box(tensor)
        if name in source.values:
            ends = zip(box.offset, box.size, strict=True)
            shard.copy_(source.values[name][tuple(slice(at, at + size) for at, size in ends)])
        elif name not in source.names:
            shard.zero_()
        elif box.elements:
            source.files.read(source.names[name], box.offset, shard)
