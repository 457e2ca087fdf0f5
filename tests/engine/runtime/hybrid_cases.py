"""Prompts and a training step that the tests of `HybridActor` share."""

from __future__ import annotations

import torch
from tiny_engine import VOCABULARY
from torch import Tensor

from engine import HybridActor

PAD, EOS = 0, 1


def prompts(rows: int = 4, width: int = 9) -> dict[str, Tensor]:
    """Left-padded ids and their mask."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=draw)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * 2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def step(actor: HybridActor, fused: bool = False) -> None:
    """One real AdamW step that changes what the model says."""
    ids = prompts()["input_ids"]
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.05, fused=fused)
    actor(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
