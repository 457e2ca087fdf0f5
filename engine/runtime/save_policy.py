"""A policy on many ranks as a Hugging Face folder, which rank 0 writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.data.tokenizer import load_tokenizer
from engine.models import (
    UnloadedModel,
    has_adapters,
    load_policy_model,
    open_policy_model,
    save_model,
    save_tensors,
)
from engine.runtime.load_shards import load_shards
from engine.runtime.merged_shards import merged_tensors
from engine.runtime.policy_runtime import PolicyRuntime


@dataclass(frozen=True, slots=True)
class StartModel:
    """The model that training begins with."""

    path: str  # folder or hub id
    dtype: str  # e.g. "bfloat16"
    lora: LoRAConfig | None = None
    seed: int = 0  # of new adapters
    tokenizer: str = ""  # its folder; empty: the model's

    def open(self) -> PreTrainedModel | UnloadedModel:
        """To be loaded by the ranks that keep it, where that can be."""
        return open_policy_model(self.path, self.dtype, self.lora, self.seed)

    def load(self) -> PreTrainedModel:
        """Whole."""
        return load_policy_model(self.path, self.dtype, self.lora, self.seed)

    def load_on(self, device: torch.device) -> PreTrainedModel:
        """Whole, read straight onto `device`."""
        opened = self.open()
        whole: Any = opened.module if isinstance(opened, UnloadedModel) else opened
        if isinstance(opened, UnloadedModel):
            load_shards(whole, opened, device, device)
        moved: PreTrainedModel = whole.to(device)
        return moved


def save_ranks(policy: PolicyRuntime, start: StartModel, folder: Path) -> None:
    """Write `policy`, its adapters and its tokenizer; all ranks call it together.

    Ranks gather it a tensor at a time, merged with its adapters, which rank 0 writes; what was
    loaded whole on each rank is put together on rank 0. Raises StorageError there.
    """
    ranks = policy.sharded.ranks
    if ranks.layout.world_size == 1 or not policy.loaded_in_shards:
        model = policy.full_model(start.load)
        if ranks.rank == 0:
            save_model(model, load_tokenizer(start.tokenizer or start.path), folder)
        return

    adapters: dict[str, Tensor] = {}
    if has_adapters(policy.module):
        adapters = dict(policy.sharded.full_tensors(lambda name: ".lora_" in name))

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        opened: Any = start.open()
        tokenizer = load_tokenizer(start.tokenizer or start.path)
        save_tensors(opened.module, tensors, tokenizer, folder, adapters)

    policy.write_full(write, merged_tensors(policy.sharded, adapters) if adapters else None)
