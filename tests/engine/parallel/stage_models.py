"""Tiny models and micro-batches for tests of stages; importable by the ranks' processes too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from family_models import family_model
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.models.lora import adapter_parameters, add_adapters

VOCABULARY = 24


@dataclass(frozen=True, slots=True)
class Spec:
    """Which tiny model; equal ones have equal weights."""

    family: str
    tied: bool
    lora: bool = False
    layers: int = 4

    def __str__(self) -> str:
        return f"{self.family}{'-tied' * self.tied}{'-lora' * self.lora}"


def tiny_model(spec: Spec) -> PreTrainedModel:
    """A model of this family in evaluation mode; its adapters, if any, do something."""
    model = family_model(
        spec.family,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=spec.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=spec.tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if spec.lora:
            add_adapters(model, LoRAConfig(rank=2, alpha=4), 3)
            for parameter in adapter_parameters(model).values():
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def micro_batches(step: int, way: int, count: int) -> list[Tensor]:
    """The ids [b, L] of one data rank at one step; no two micro-batches have the same shape."""
    generator = torch.Generator().manual_seed(100 * step + 10 * way)
    shapes = [(1 + (i + step) % 3, 5 + 2 * i + way) for i in range(count)]
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for shape in shapes]
