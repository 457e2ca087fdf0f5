"""LoRA adapters as vLLM's own, replaced in memory in the process of vLLM's model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.vllm.weight_load import rename_mapper

ADAPTER_ID = 1


def lora_request() -> object:
    """The argument of a vLLM request that is decoded with the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "held in memory")


def load_adapter(worker: Any, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """Make `tensors` (peft's names in a file) the adapter of a vLLM worker's model.

    Raises RolloutError for features of peft that vLLM lacks, and for modules it can't adapt.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    runner = worker.model_runner
    manager = runner.lora_manager
    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(manager.lora_config)
        lora = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=rename_mapper(manager._adapter_manager.model),
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise RolloutError(
            f"vLLM can't take the adapter: {error}; set the engine's option lora=merged"
        ) from error
    inner = manager._adapter_manager
    unknown = [name for name in lora.loras if not _adaptable(inner, name)]
    if unknown:
        raise RolloutError(
            f"vLLM can't adapt the modules {sorted(unknown)[:3]}; set the engine's option "
            "lora=merged"
        )
    inner.remove_adapter(ADAPTER_ID)
    inner.add_adapter(lora)
    inner.activate_adapter(ADAPTER_ID)


def _adaptable(manager: Any, name: str) -> bool:
    """Whether vLLM's model has an adaptable module for `name`, on its own or in a fused one."""
    owner, _, last = name.rpartition(".")
    fused = [whole for whole, parts in manager.packed_modules_mapping.items() if last in parts]
    return any(f"{owner}.{piece}".lstrip(".") in manager.modules for piece in (last, *fused))
