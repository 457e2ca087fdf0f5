"""The critic: a policy's backbone with one number a position in place of the vocabulary head."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.config import LoRAConfig
from engine.models.classifier_start import score_head
from engine.models.lora import add_adapters, has_adapters, merged_copy


class CriticModel(nn.Module):
    """Backbone and value head.

    `forward(input_ids [B, L], attention_mask [B, L] or None)` returns values `[B, L]` in float32:
    the value at column t is that of the state after reading token t.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # a new critic predicts 0 everywhere
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return self.values(hidden)

    def values(self, hidden: Tensor) -> Tensor:
        """Values `[B, L]` (float32) of the backbone's outputs `[B, L, H]`."""
        return head_values(self.head, hidden)

    @property
    def base_model(self) -> nn.Module:
        """The backbone, as a language model calls its own."""
        return self.backbone

    @property
    def peft_config(self) -> Any:
        """What adapters the backbone has, as a language model says it; None for none."""
        return getattr(self.backbone, "peft_config", None)

    @property
    def config(self) -> PretrainedConfig:
        """The backbone's configuration."""
        return self.backbone.config

    def get_output_embeddings(self) -> nn.Linear:
        """The value head, where a language model has its own."""
        return self.head


def head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """A value head's values `[…]` (float32) of hidden states `[…, H]`."""
    values: Tensor = head(hidden.to(head.weight.dtype))
    return values.squeeze(-1).float()


def output_size(config: PretrainedConfig) -> int:
    """Columns of a backbone's last hidden state: OPT's may be projected to fewer (350M)."""
    projected = getattr(config, "word_embed_proj_dim", None)
    return int(projected if projected is not None else config.hidden_size)


def create_critic_model(
    model: PreTrainedModel,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    setting: str = "critic.lora",
) -> CriticModel:
    """Make a critic that starts from a copy of `model`'s backbone; `model` is not touched.

    A classifier of one label, such as a reward model, gives its head as well; of others the head is
    new, and predicts 0. Adapters are merged into the copy, and a quantised base is made dense: all
    of it is trained, or, with `lora`, new adapters in it, drawn from `seed`, and the value head;
    `setting` asked for them.
    """
    plain = merged_copy(model) if has_adapters(model) else model
    backbone = copy.deepcopy(plain.base_model)
    critic = CriticModel(backbone, output_size(model.config.get_text_config()))
    if (head := score_head(model)) is not None:
        critic.head.weight.data.copy_(head.detach())
    critic.to(next(backbone.parameters()).dtype).requires_grad_(True)
    if lora is not None and lora.rank:
        add_adapters(critic.backbone, lora, seed, setting)
    return critic
