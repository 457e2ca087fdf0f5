"""Gradients of a preference loss on pairs of completions.

A pair is two consecutive rows, chosen then rejected, of one micro-batch. Where neither has response
tokens the pair is padding: it gets no pass and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.algorithms.metrics import MeanAccumulator
from engine.algorithms.preference import Pairs, PreferenceOutput, sequence_log_probs
from engine.batch import Batch
from engine.data.bucketing import token_budget_batches
from engine.runtime.micro_batches import trim
from engine.runtime.sharded_model import ShardedModel
from engine.runtime.token_outputs import OutputReader, Outputs


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
    real = batch["response_mask"].bool().any(1).view(-1, 2).any(1).nonzero().squeeze(1)
    lengths = batch["attention_mask"].sum(1).view(-1, 2).max(1).values[real]
    pairs = sharded.global_count(len(real))
    micros = []
    # A micro-batch of N pairs has 2N rows, as wide as the longest.
    for index in token_budget_batches(lengths.tolist(), max(1, max_tokens // 2)):
        first = 2 * real[index]
        micros.append(trim(batch.rows(torch.stack([first, first + 1], 1).flatten())))

    def loss(got: Outputs, micro: Batch) -> tuple[Tensor, dict[str, MeanAccumulator]]:
        out = pair_loss(_pairs(got["log_probs"], micro))
        return out.loss.sum() / pairs, dict(out.metrics)

    return sharded.accumulate(batch, micros, reader, loss)


def _pairs(log_probs: Tensor, micro: Batch) -> Pairs:
    mask = micro["response_mask"]
    policy, length = sequence_log_probs(log_probs, mask)
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
