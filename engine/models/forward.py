"""The trainer's forward pass over completions: log-probs, entropy and values of response tokens.

Rows are moved to the left so that each starts at column 0 and padding comes last: causal attention
alone then keeps padding out, without a mask, and only response positions meet the vocabulary head.
Micro-batching (which rows go together) is the workers' matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.errors import DataError
from engine.models.critic import CriticModel

# Families whose logits are exactly head(hidden): no soft-capping, scaling or extra bias.
_PLAIN_HEADS = {"qwen2", "qwen3", "llama", "mistral", "gpt2", "gpt_neox", "phi3", "olmo2"}


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows without their left padding, and where each response token's prediction is read."""

    input_ids: Tensor  # [B, L] long; row = prompt, response, padding
    rows: Tensor  # [N] long; row of each response token
    positions: Tensor  # [N] long; column whose output predicts that token
    targets: Tensor  # [N] long; the token itself
    columns: Tensor  # [N] long; its column in the batch's [B, R] fields


def left_align(batch: Batch) -> Sequences:
    """Drop the left padding of `input_ids` and list the response tokens (N in all).

    A response token is one whose attention_mask is 1, masked out of the loss or not. Raises
    DataError for a row without a prompt: nothing would predict its first token.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    width = batch["responses"].shape[1]
    prompt_lengths = mask[:, : ids.shape[1] - width].sum(1)  # [B]
    if bool((prompt_lengths == 0).any()):
        row = int((prompt_lengths == 0).nonzero()[0, 0])
        raise DataError(f"row {row} of the batch has an empty prompt; give it at least one token")
    length = int(mask.sum(1).max())
    start = ids.shape[1] - width - prompt_lengths  # first real column, [B]
    source = (start[:, None] + torch.arange(length)).clamp(max=ids.shape[1] - 1)
    aligned = ids.gather(1, source)
    present = mask[:, ids.shape[1] - width :]
    rows, columns = present.nonzero(as_tuple=True)
    positions = prompt_lengths[rows] + columns - 1
    return Sequences(aligned, rows, positions, batch["responses"][rows, columns], columns)


def response_log_probs(
    model: PreTrainedModel, batch: Batch, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens under softmax(logits / temperature).

    Returns `[B, R]` float32 log-probs and, on request, `[B, R]` entropies in nats; 0 where there
    is no token.
    """
    seqs = left_align(batch)
    logits = _response_logits(model, seqs).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_softmax = logits.log_softmax(-1)
    picked = log_softmax.gather(1, seqs.targets[:, None]).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None
    like = batch["responses"]
    return _scatter(picked, seqs, like), None if entropy is None else _scatter(entropy, seqs, like)


def response_values(critic: CriticModel | nn.Module, batch: Batch) -> Tensor:
    """Values `[B, R]` of the states before each response token; 0 where there is no token."""
    seqs = left_align(batch)
    values: Any = critic(seqs.input_ids, None)
    return _scatter(values[seqs.rows, seqs.positions].float(), seqs, batch["responses"])


def _response_logits(model: PreTrainedModel, seqs: Sequences) -> Tensor:
    """Logits [N, V] at the positions that predict response tokens."""
    if model.config.model_type not in _PLAIN_HEADS:
        logits = model(input_ids=seqs.input_ids, use_cache=False).logits
        return logits[seqs.rows, seqs.positions]
    hidden = model.base_model(input_ids=seqs.input_ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    return head(hidden[seqs.rows, seqs.positions])


def _scatter(flat: Tensor, seqs: Sequences, like: Tensor) -> Tensor:
    out = torch.zeros(like.shape, dtype=torch.float32)
    return out.index_put((seqs.rows, seqs.columns), flat)
