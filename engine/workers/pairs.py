"""Gradients of preference losses on pairs of completions; what a pair's loss is, is `algorithms`'.

A pair is two consecutive rows, chosen then rejected, and never parted by a micro-batch.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.algorithms.metrics import Sum, merge
from engine.algorithms.preference import Pairs, get_pair_loss, sequence_log_probs
from engine.batch import Batch
from engine.config import PreferenceConfig
from engine.data.bucketing import token_budget_batches
from engine.models.forward import response_log_probs
from engine.workers.micro import trim
from engine.workers.options import preference_options


def accumulate_pairs(
    model: PreTrainedModel,
    batch: Batch,
    config: PreferenceConfig,
    temperature: float,
    max_tokens: int,
) -> dict[str, Sum]:
    """Add the gradients of the mean loss over the pairs of `batch` (2N rows); return metrics.

    Log-probs are of softmax(logits / temperature), as the reference's must be.
    """
    loss_function, options = get_pair_loss(config.loss), preference_options(config)
    lengths = batch["attention_mask"].sum(1).view(-1, 2).max(1).values
    parts = []
    # A micro-batch of N pairs has 2N rows, as wide as the longest.
    for index in token_budget_batches(lengths.tolist(), max(1, max_tokens // 2)):
        first = 2 * torch.tensor(index)
        micro = trim(batch.rows(torch.stack([first, first + 1], 1).flatten()))
        out = loss_function(_pairs(model, micro, temperature), **options)
        (out.loss.sum() / len(lengths)).backward()
        parts.append(dict(out.metrics))
    return merge(parts)


def _pairs(model: PreTrainedModel, micro: Batch, temperature: float) -> Pairs:
    mask = micro["response_mask"]
    policy, length = sequence_log_probs(response_log_probs(model, micro, temperature), mask)
    sides = {
        "policy_chosen": policy[0::2],
        "policy_rejected": policy[1::2],
        "chosen_length": length[0::2],
        "rejected_length": length[1::2],
    }
    if "ref_log_probs" in micro:
        reference, _ = sequence_log_probs(micro["ref_log_probs"], mask)
        sides |= {"ref_chosen": reference[0::2], "ref_rejected": reference[1::2]}
    return Pairs(**sides)
