"""A language model's head apart from its body: logits of hidden states computed elsewhere.

What some families do to logits after their head (a scale, a soft cap) is part of it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.storage.expert_weights import MIXTURES

# Families whose logits depend on the body's outputs alone, and are what `vocabulary_head` gives.
_FAMILIES = {
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "olmo2", "smollm3", "starcoder2"),
    *MIXTURES,
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "glm4", "granite", "cohere", "cohere2"),
}

Head = Callable[[Tensor], Tensor]


def vocabulary_head(model: Any) -> Head | None:
    """What makes logits `[…, V]` of the body's outputs `[…, H]`; None for an unknown family.

    `model` is a language model or the last pipeline stage of one. Of a head that tensor parallelism
    has split it makes this rank's part of the logits.
    """
    config = model.config
    if config.model_type not in _FAMILIES:
        return None
    head: Head = model.get_output_embeddings()
    factor = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return head if factor == 1.0 and cap is None else _ChangedLogits(head, factor, cap)


def require_vocabulary_head(model: Any) -> Head:
    """`vocabulary_head`; raises ConfigError for an unknown family."""
    head = vocabulary_head(model)
    if head is None:
        raise ConfigError(
            f"a model of type {model.config.model_type!r} can't have sequences shared by ranks: "
            "what becomes of its head's logits is not known; set sp to 1"
        )
    return head


@dataclass(frozen=True, slots=True)
class _ChangedLogits:
    """A head whose logits are multiplied by `factor`, or kept within ± `cap` by tanh."""

    head: Head
    factor: float
    cap: float | None

    def __call__(self, states: Tensor) -> Tensor:
        logits = self.head(states) * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
