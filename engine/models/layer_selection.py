"""A smaller model of some of a model's decoder layers: where a student of distillation starts.

As DistilBERT (arXiv:1910.01108) takes every second layer of its teacher: embeddings, the last norm
and the layers that are kept have the teacher's weights, so that little is left to learn.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence

from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.errors import ModelError
from engine.models.load import with_model_lock


@with_model_lock
def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A new model of `model`'s decoder layers `layers`, in their order, e.g. `(0, 2)` of three.

    Its weights are copies, its dtype is `model`'s. Raises ModelError for layers that `model`
    doesn't have, or that aren't in ascending order, and for a model without a list of layers.
    """
    place, depth = _decoder_layers(model)
    rising = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or not rising or layers[0] < 0 or layers[-1] >= depth:
        raise ModelError(
            f"layers={','.join(map(str, layers))} of a model of {depth}: name some of 0 to "
            f"{depth - 1}, in ascending order"
        )
    config: PretrainedConfig = copy.deepcopy(model.config)
    for name, value in config.to_dict().items():  # e.g. layer_types, an entry a layer
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    pattern = re.compile(re.escape(place) + r"\.(\d+)\.(.*)")
    tensors = {}
    for name, tensor in model.state_dict().items():
        found = pattern.fullmatch(name)
        if found is None:
            tensors[name] = tensor
        elif int(found[1]) in layers:
            tensors[f"{place}.{layers.index(int(found[1]))}.{found[2]}"] = tensor
    smaller: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=model.dtype, trust_remote_code=False
    )
    try:
        smaller.load_state_dict(tensors)
    except RuntimeError as error:  # layers of several shapes, told apart by their numbers
        raise ModelError(f"layers of {config.model_type} can't be left out: {error}") from error
    smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller.eval()


def _decoder_layers(model: PreTrainedModel) -> tuple[str, int]:
    """The name of the list of decoder layers, e.g. `model.layers`, and how many it has."""
    depth = getattr(model.config, "num_hidden_layers", 0)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, depth
    raise ModelError(f"{type(model).__name__} has no list of decoder layers to choose from")
