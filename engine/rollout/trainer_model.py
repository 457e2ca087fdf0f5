"""What rollout engines read of a trainer's model, a transformers causal LM.

Its evaluation mode; its weights as whole plain tensors by their names in files, gathered one at a
time, with LoRA adapters merged in (W + α/r · B·A, arXiv:2106.09685); and the kernel for a product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ConfigError, RolloutError
from engine.kernels.training_ops import mkl_is_slow, onednn_linear
from engine.storage.weight_files import MIXTURES, file_tensors


def embedding_weight(model: Any) -> Tensor:
    """Return the input embedding, `[V, hidden]`."""
    embedding: nn.Embedding = model.get_input_embeddings()
    return embedding.weight


def text_config(model: object) -> Any:
    """The model's config, or the part for text of it; None if it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: object) -> int | None:
    """`max_position_embeddings` of the model's (text) config; None if it has none."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    return None if length is None else int(length)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set `model.eval()` for the block (no dropout), then restore each module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of a mixture of experts, by the number of their decoder layer.

    Raises ConfigError for a model without routers that are known here.
    """
    found = {
        int(name.split("layers.")[1].split(".")[0]): module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("TopKRouter")
    }
    if not found:
        raise ConfigError(
            "rollout.enable_rollout_routing_replay with a model without routers that are known "
            "here; it is for Mixtral, Qwen2-MoE and Qwen3-MoE: leave it out"
        )
    return found


def chosen_experts(returned: Any, layers: list[int], tokens: int) -> Tensor | None:
    """Return `layers` of the `[tokens, layers, k]` that vLLM returned, as a `Completion` has them.

    None without any. Raises RolloutError where it returned fewer tokens, or nothing.
    """
    if not layers:
        return None
    if returned is None or len(returned) < tokens:
        raise RolloutError(
            f"vLLM returned experts of {0 if returned is None else len(returned)} tokens for a "
            f"completion that read {tokens}; start its server with --enable-return-routed-experts"
        )
    chosen = returned[:tokens, layers].reshape(tokens, -1)
    return torch.from_numpy(chosen.astype("int16"))


LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear_function(weight: Tensor) -> LinearFunction:
    """Return the faster `(x, weight, bias) → x·weightᵀ + bias` for a weight's device and dtype.

    Both read a weight where the trainer keeps it, without a copy; neither has a gradient.
    """
    slow = weight.device.type == "cpu" and weight.dtype == torch.float32 and mkl_is_slow()
    return onednn_linear if slow else F.linear


_ADAPTER = "default"  # peft's name of the only one


def has_adapters(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


def adapter_rank(model: nn.Module) -> int:
    """Return rank r of the adapters; 0 without any."""
    config = getattr(model, "peft_config", None)
    return int(config[_ADAPTER].r) if config else 0


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that `model` computes in; its embedding's, as matrices may be quantised."""
    return embedding_weight(model).dtype


_DECODER = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def adapts_decoder(model: nn.Module) -> bool:
    """Whether a model's adapters are on projections of a decoder's layers, and nothing else."""
    names = [name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name]
    adapted = {name.rpartition(".")[2] for name in names}
    return adapted <= _DECODER and _model_type(model) not in MIXTURES


def can_be_shared(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all parameters are plain tensors of `dtype` on the device that vLLM would use.

    Adapters, which vLLM has its own copies of, may be any.
    """
    accelerator = torch.accelerator.current_accelerator()
    device_type = accelerator.type if accelerator is not None else "cpu"
    return all(
        type(p.data) is Tensor and p.dtype == dtype and p.device.type == device_type
        for name, p in model.named_parameters()
        if ".lora_" not in name
    )


def merged_weights(model: nn.Module, changed_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield each full weight as the model's files have it, adapters merged; tied ones once.

    `changed_only` leaves out all that no adapter changes (nothing, for a model without adapters).
    """
    return file_tensors(_model_type(model), _parameters(model, True, changed_only))


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each full weight as the model's files have it, without what the adapters add."""
    return file_tensors(_model_type(model), _parameters(model, False, False))


def _parameters(model: nn.Module, merge: bool, changed_only: bool) -> Iterator[tuple[str, Tensor]]:
    modules: dict[str, Any] = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, adapted, suffix = name.partition(".base_layer.")
        changed = adapted and suffix == "weight"
        if ".lora_" in name or (changed_only and not changed):
            continue
        tensor = _dense(modules[name.rpartition(".")[0]], name, parameter)
        if merge and changed:
            with torch.no_grad():
                delta = modules[owner].get_delta_weight(_ADAPTER)
                tensor = (tensor + _full_tensor(delta)).to(tensor.dtype)
        yield (f"{owner}.{suffix}" if adapted else name), tensor


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters' matrices A `[r, in]` and B `[out, r]`, by peft's names in a file."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            file_name = f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"
            yield file_name, _full_tensor(parameter.data)


def adapter_config(model: nn.Module) -> dict[str, object]:
    """Return peft's configuration of the adapters, in plain values."""
    config: Any = model.peft_config
    fields = asdict(config[_ADAPTER]).items()
    return {key: list(value) if isinstance(value, set) else value for key, value in fields}


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _dense(module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
    """Return the tensor that `module` computes with; packed matrices have a method `dense`."""
    unpack = getattr(module, "dense", None)
    if callable(unpack) and name.endswith(".weight"):
        dense: Tensor = unpack()
        return dense
    return _full_tensor(parameter.data)


def _full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (all its ranks must call); others are returned as they are."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor
