"""Log-probs of a prompt's tokens by the native server, in the form of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogProbs = dict[str, dict[str, float]]


@torch.inference_mode()
def prompt_log_probs(
    model: PreTrainedModel, ids: Sequence[int], top_k: int
) -> list[LogProbs | None]:
    """For each token: None for the first; then the likeliest tokens' ids, and its own, each with
    `logprob` (at temperature 1) and `rank` (from 1, of equals the highest)."""
    tokens = torch.tensor(ids, device=model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    log_probs = logits.log_softmax(-1)
    own = log_probs.gather(1, tokens[1:, None])
    ranks = (log_probs > own).sum(1) + 1
    values, likeliest = log_probs.topk(min(top_k, log_probs.shape[1]))
    found: list[LogProbs | None] = [None]
    columns = (x.tolist() for x in (tokens[1:], own[:, 0], ranks, likeliest, values))
    for token, log_prob, rank, top, top_values in zip(*columns, strict=True):
        place = {
            str(one): {"logprob": value, "rank": i}
            for i, (one, value) in enumerate(zip(top, top_values, strict=True), 1)
        }
        found.append(place | {str(token): {"logprob": log_prob, "rank": rank}})
    return found
