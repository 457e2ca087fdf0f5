"""A tiny random model of each family that tensor and pipeline parallelism know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
# What a family has besides the common sizes, or has otherwise.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "gemma": {},
    "gemma2": _WINDOWS | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "gemma3_text": _WINDOWS | {"query_pre_attn_scalar": 8},
    "glm4": {},
    "gpt_neox": {"hidden_size": 32, "num_key_value_heads": None, "head_dim": None},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "olmo2": {},
    "phi": {},
    "phi3": {"sliding_window": 4},
    "smollm3": {},
    "starcoder2": {"sliding_window": 4},
}


def family_model(kind: str, seed: int = 7, **sizes: Any) -> PreTrainedModel:
    """The same weights for the same arguments; norms and biases are other than 1 and 0."""
    values = sizes | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    values |= CHANGES[kind]
    if "layer_types" in values:
        layers = sizes["num_hidden_layers"]
        values["layer_types"] = (values["layer_types"] * layers)[:layers]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **values)
        )
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.0 if kind.startswith("gemma") else 1.0, 0.2)
    return model.eval()
