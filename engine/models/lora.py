"""LoRA (Hu et al., arXiv:2106.09685) by peft: adapters in a policy, their base, and both merged.

A policy with adapters keeps its class, and its own weights are frozen: the same storage is the
trained policy with the adapters on, and the model that training began with when they are off.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.errors import ConfigError
from engine.models.quantize import QuantizedLinear
from engine.storage.filesystem import split_revision
from engine.storage.weight_files import MIXTURES

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers.integrations.peft import PeftConfigLike

ADAPTER = "default"  # peft's name of the only one
ALL_LINEAR = "all-linear"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def add_adapters(
    model: PreTrainedModel, config: LoRAConfig, seed: int, setting: str = "model.lora"
) -> None:
    """Put new adapters into `model`, in place, and freeze all else; `setting` asked for them.

    They add nothing at first (B = 0; A is drawn from `seed`), and are float32. Raises ConfigError
    for target modules that the model lacks, or whose weights it ties.
    """
    from peft import LoraConfig

    names = _targets(model, config)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=config.dropout,
        target_modules=names if isinstance(names, str) else list(names),
        fan_in_fan_out=model.config.model_type == "gpt2",  # its Conv1D keeps weights transposed
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(settings, ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"{setting}.target_modules={names!r} can't be adapted in a "
                f"{type(model).__name__}: {error}; name linear modules of it, or {ALL_LINEAR!r}"
            ) from error
    _refuse_tied(model, settings)
    finalize_adapters(model, settings)


def _targets(model: PreTrainedModel, config: LoRAConfig) -> str | tuple[str, ...]:
    """Return the modules to adapt; of a mixture of experts attention's: experts aren't linears."""
    names = config.target_modules
    if model.config.model_type not in MIXTURES:
        return names
    if names == ALL_LINEAR:
        return _ATTENTION
    if isinstance(names, str) or set(names) - set(_ATTENTION):
        raise ConfigError(
            f"model.lora.target_modules={names!r} with a mixture of experts "
            f"({model.config.model_type}): adapters are for attention alone; name some of "
            f"{', '.join(_ATTENTION)}, or {ALL_LINEAR!r} for these"
        )
    return names


def finalize_adapters(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Make new adapters float32, and note in peft's `settings` what they belong to."""
    adapters = adapter_parameters(model)
    if any(".mlp." in name for name in adapters) and model.config.model_type in MIXTURES:
        raise ConfigError(
            f"model.lora.from_folder: the adapters for this {model.config.model_type} model are on "
            "its experts or routers, and attention's alone are trained; leave from_folder out to "
            "start from them merged"
        )
    for parameter in adapters.values():
        parameter.data = parameter.data.float()
    base = Path(model.name_or_path or "")
    name, revision = split_revision(base)
    settings.base_model_name_or_path = str(base.absolute()) if base.is_dir() else name
    settings.revision = revision
    targets = settings.target_modules or ()
    settings.target_modules = targets if isinstance(targets, str) else sorted(targets)  # or a regex


def _refuse_tied(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Raise ConfigError when an adapter is on one of two modules that share a matrix."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = any(isinstance(end, BaseTunerLayer) for end in ends)
    if adapted and ends[0].weight is getattr(ends[1], "weight", None):
        targets = settings.target_modules or ()
        raise ConfigError(
            f"model.lora.target_modules={targets if isinstance(targets, str) else sorted(targets)} "
            "names the embedding or the head, which are one matrix in this model; leave it out"
        )


def has_adapters(model: nn.Module) -> bool:
    """Tell whether `add_adapters` was called on `model`."""
    return bool(getattr(model, "peft_config", None))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is trained of a model with adapters, by name: A `[r, in]`, B `[out, r]`."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


class BaseModelView:
    """The model that a policy with adapters started from: its own weights, the adapters off."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy

    @contextmanager
    def weights(self) -> Iterator[PreTrainedModel]:
        """Lend the policy, which computes as its base until the block ends, however it ends."""
        self._policy.disable_adapters()
        try:
            yield self._policy
        finally:
            self._policy.enable_adapters()


@torch.no_grad()
def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Make a plain model of the same class that computes what `model` does with its adapters.

    What no adapter changes is `model`'s storage: read it, save it or copy it, and don't train it.
    """
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    plain.load_state_dict(_merged_weights(model), assign=True)
    plain.tie_weights()
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:  # in no state dict, such as rotary tables
            owner, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(owner), attribute, model.get_buffer(name))
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain.train(model.training)


def save_adapter(
    model: PreTrainedModel, folder: Path, values: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters, or `values` by parameter name, as peft's `from_pretrained` reads them."""
    write_adapter(adapter_tensors(model, values), model.peft_config[ADAPTER], folder)


def adapter_tensors(
    model: PreTrainedModel, values: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the adapters' tensors by peft's names; `values` as in `save_adapter`."""
    from peft import get_peft_model_state_dict

    state = None if values is None else dict(values)
    # Without save_embedding_layers=False, peft would look the base up on the hub.
    return get_peft_model_state_dict(model, state, save_embedding_layers=False)


def write_adapter(tensors: Mapping[str, Tensor], settings: PeftConfigLike, folder: Path) -> None:
    """Write tensors by their names in the base, and peft's settings."""
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings.save_pretrained(str(folder))


def _merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict of `model` without adapters: W + α/r · B·A where it had one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules: dict[str, nn.Module] = dict(model.named_modules())
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        path, _, rest = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        linear, adapted = modules[path], modules[owner]
        if isinstance(linear, QuantizedLinear):
            if rest not in ("weight", "bias"):
                continue  # its scales
            # Adapters were trained on these numbers, not on the original's.
            tensor = linear.dense() if rest == "weight" else tensor
        if rest == "weight" and isinstance(adapted, BaseTunerLayer):
            delta = adapted.get_delta_weight(ADAPTER)  # type: ignore[operator]  # of its layers
            tensor = (tensor + delta).to(tensor.dtype)
        weights[f"{owner}.{rest}"] = tensor
    return weights
