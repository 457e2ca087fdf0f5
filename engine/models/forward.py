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

from engine.algorithms.kl_full import full_kl
from engine.batch import Batch
from engine.errors import DataError
from engine.models.critic import CriticModel
from engine.models.lora import BaseOfPolicy

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
    source = (start[:, None] + torch.arange(length, device=ids.device)).clamp(max=ids.shape[1] - 1)
    aligned = ids.gather(1, source)
    present = mask[:, ids.shape[1] - width :]
    rows, columns = present.nonzero(as_tuple=True)
    positions = prompt_lengths[rows] + columns - 1
    return Sequences(aligned, rows, positions, batch["responses"][rows, columns], columns)


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What a forward pass says about response tokens: float32 `[B, R]`, 0 where there is none."""

    log_probs: Tensor
    entropy: Tensor | None = None
    """In nats."""
    sum_pi_squared: Tensor | None = None
    """Σ_v π(v)²."""
    full_kl: Tensor | None = None
    """KL(π ‖ π_ref), exact over the vocabulary, in nats."""


def token_outputs(
    model: PreTrainedModel | BaseOfPolicy,
    batch: Batch,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference: PreTrainedModel | BaseOfPolicy | None = None,
) -> TokenOutputs:
    """Run `model` over a batch, its distributions being softmax(logits / temperature).

    The optional outputs are computed on request; the KL to `reference` if one is given. Entropy
    has a gradient only where asked for: without, its graph is not kept.
    """
    seqs = left_align(batch)
    logits = _response_logits(model, seqs).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_softmax = logits.log_softmax(-1)
    picked = log_softmax.gather(1, seqs.targets[:, None]).squeeze(1)
    spread = log_softmax if entropy_gradient else log_softmax.detach()
    flat = {
        "log_probs": picked,
        "entropy": -(spread.exp() * spread).sum(-1) if entropy else None,
        "sum_pi_squared": spread.detach().exp().square().sum(-1) if sum_pi_squared else None,
    }
    if reference is not None:
        with torch.no_grad():
            theirs = _response_logits(reference, seqs).float() / temperature
        flat["full_kl"] = full_kl(logits, theirs)
    like = batch["responses"]
    return TokenOutputs(
        **{k: _scatter(v, seqs, like) for k, v in flat.items() if v is not None},
    )


def response_log_probs(
    model: PreTrainedModel | BaseOfPolicy, batch: Batch, temperature: float
) -> Tensor:
    """Log-probs `[B, R]` (float32) of the response tokens; 0 where there is no token."""
    return token_outputs(model, batch, temperature).log_probs


def response_values(critic: CriticModel | nn.Module, batch: Batch) -> Tensor:
    """Values `[B, R]` of the states before each response token; 0 where there is no token."""
    seqs = left_align(batch)
    values: Any = critic(seqs.input_ids, None)
    return _scatter(values[seqs.rows, seqs.positions].float(), seqs, batch["responses"])


def _response_logits(model: PreTrainedModel | BaseOfPolicy, seqs: Sequences) -> Tensor:
    """Logits [N, V] at the positions that predict response tokens."""
    if isinstance(model, BaseOfPolicy):
        with model.weights() as base:
            return _response_logits(base, seqs)
    if model.config.model_type not in _PLAIN_HEADS:
        logits = model(input_ids=seqs.input_ids, use_cache=False).logits
        return logits[seqs.rows, seqs.positions]
    hidden = model.base_model(input_ids=seqs.input_ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    return head(hidden[seqs.rows, seqs.positions])


def _scatter(flat: Tensor, seqs: Sequences, like: Tensor) -> Tensor:
    out = torch.zeros(like.shape, dtype=torch.float32, device=flat.device)
    return out.index_put((seqs.rows, seqs.columns), flat)
