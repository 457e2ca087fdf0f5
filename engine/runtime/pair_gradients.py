"""Gradients of losses on whole responses: on pairs of completions, or on single ones.

A pair is two consecutive rows, chosen then rejected, of one micro-batch. Where none of its rows has
response tokens it is padding: it gets no pass and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.algorithms.aggregation import MeanAccumulator, accumulate_mean
from engine.algorithms.preference_losses import Pairs, PreferenceOutput, sequence_log_probs
from engine.batch import Batch
from engine.data.collate import token_budget_batches
from engine.models.forward import OutputReader, Outputs
from engine.runtime.sharded_model import ShardedModel, trim


def accumulate_pairs(
    sharded: ShardedModel,
    batch: Batch,
    pair_loss: Callable[[Pairs], PreferenceOutput],
    reader: OutputReader,
    max_tokens: int,
) -> list[dict[str, MeanAccumulator]]:
    """Add the gradients of the mean loss over the real pairs of all ranks; `batch` has 2N rows.

    `reader`'s log-probs must be of the temperature that the reference's are. Returns metrics.
    """

    def loss(got: Outputs, micro: Batch) -> PreferenceOutput:
        return pair_loss(_pairs(got["log_probs"], micro))

    return accumulate_responses(sharded, batch, loss, reader, max_tokens, unit=2)


def accumulate_responses(
    sharded: ShardedModel,
    batch: Batch,
    loss_of: Callable[[Outputs, Batch], PreferenceOutput],
    reader: OutputReader,
    max_tokens: int,
    *,
    unit: int,
) -> list[dict[str, MeanAccumulator]]:
    """Add the gradients of the mean of `loss_of` over the real units of all ranks.

    A unit is `unit` consecutive rows, which get one loss together. Returns metrics, and `loss`.
    """
    real = batch["response_mask"].bool().any(1).view(-1, unit).any(1).nonzero().squeeze(1)
    lengths = batch["attention_mask"].sum(1).view(-1, unit).max(1).values[real]
    units, within = sharded.global_count(len(real)), torch.arange(unit)
    micros = []
    # A micro-batch of N units has unit · N rows, as wide as the longest.
    for index in token_budget_batches(lengths.tolist(), max(1, max_tokens // unit)):
        rows = (unit * real[index])[:, None] + within
        micros.append(trim(batch.rows(rows.flatten())))

    def loss(got: Outputs, micro: Batch) -> tuple[Tensor, dict[str, MeanAccumulator]]:
        out = loss_of(got, micro)
        mean = accumulate_mean(out.loss, torch.ones_like(out.loss))
        return out.loss.sum() / units, dict(out.metrics) | {"loss": mean}

    return sharded.accumulate(batch, micros, reader, loss)


def _pairs(log_probs: Tensor, micro: Batch) -> Pairs:
    policy, length = sequence_log_probs(log_probs, micro["response_mask"])
    reference = micro.get("ref_response_log_probs")
    if "ref_log_probs" in micro:
        reference, _ = sequence_log_probs(micro["ref_log_probs"], micro["response_mask"])
    return as_pairs(policy, length, reference)


def as_pairs(policy: Tensor, length: Tensor, reference: Tensor | None) -> Pairs:
    """Pairs of rows 2i and 2i+1, chosen and rejected: log-probs and lengths of responses `[2N]`."""
    sides = {
        "policy_chosen": policy[0::2],
        "policy_rejected": policy[1::2],
        "chosen_length": length[0::2],
        "rejected_length": length[1::2],
    }
    if reference is not None:
        sides |= {"ref_chosen": reference[0::2], "ref_rejected": reference[1::2]}
    return Pairs(**sides)
