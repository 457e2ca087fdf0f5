"""QLoRA's base, read and packed a matrix at a time: no process has it dense, not even meanwhile.

What a packed matrix is, is `quantize.py`'s; models without storage are `unloaded.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.models.quantize import quantize_linears
from engine.storage.weight_files import WeightFiles


@torch.no_grad()
def load_packed(
    module: PreTrainedModel, files: WeightFiles, names: Mapping[str, str], kind: str
) -> PreTrainedModel:
    """Fill `module`, which is on the meta device, in place; linears but the head are packed.

    `names` are the files' for its parameters and persistent buffers. The numbers are those of
    `quantize_linears` on a model that was loaded whole. Raises ConfigError as that does.
    """

    def read(name: str, tensor: Tensor) -> Tensor:
        value = torch.empty_like(tensor, device="cpu")
        files.read(names[name], (0,) * value.dim(), value)
        return value

    def fill(name: str, linear: nn.Linear) -> None:
        linear.weight = nn.Parameter(read(f"{name}.weight", linear.weight), requires_grad=False)

    quantize_linears(module, kind, fill)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # what is tied stays so
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            continue
        if id(tensor) not in made:
            value = read(name, tensor)
            weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = tensor, nn.Parameter(value, requires_grad=False) if weight else value
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, made[id(tensor)][1])
    return module
