"""Requests of a rollout to a server, and their answers as whole completions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.errors import DivergedRolloutError, RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.sampling import noise_keys
from engine.rollout.server.api import CompletionRequest, SampledCompletion, check_token_ids


def split_requests(
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    size: int,
    max_model_len: int,
) -> list[tuple[int, int, CompletionRequest]]:
    """Requests of at most `size` completions, each with its prompt's index and its first
    completion's, in order.

    A request's seed depends on its prompt's number (`numbers`) and its place there alone.
    """
    # vLLM refuses several greedy completions in one request.
    size = size if params.temperature > 0 else 1
    places = [(index, first) for index in range(len(prompts)) for first in range(0, params.n, size)]
    prompt = torch.tensor([numbers[index] for index, _ in places])
    firsts = torch.tensor([first for _, first in places])
    keys = noise_keys(params.seed + seed, prompt, firsts).tolist()
    return [
        (
            index,
            first,
            CompletionRequest(
                prompt=prompts[index],
                count=min(size, params.n - first),
                max_new_tokens=min(params.max_new_tokens, max_model_len - len(prompts[index])),
                seed=key & (2**63 - 1),
                params=params,
            ),
        )
        for (index, first), key in zip(places, keys, strict=True)
    ]


def whole_completion(
    index: int, drawn: SampledCompletion, request: CompletionRequest, version: int, vocabulary: int
) -> Completion:
    """Cut at the first stop token, and refuse what is not a whole completion."""
    stops = request.params.stop_token_ids
    length = next((i + 1 for i, t in enumerate(drawn.token_ids) if t in stops), None)
    tokens, log_probs = drawn.token_ids[:length], drawn.log_probs[:length]
    if any(map(math.isnan, log_probs)):
        raise DivergedRolloutError(
            f"the model gave NaN logits for a completion of prompt {index}; its weights have "
            f"diverged: go back to a checkpoint and lower the learning rate"
        )
    check_token_ids(tokens, vocabulary)
    if length is None and len(tokens) != request.max_new_tokens:
        raise RolloutError(
            f"the rollout server ended a completion of prompt {index} after {len(tokens)} of "
            f"{request.max_new_tokens} tokens ({drawn.reason!r}) and on no token of "
            f"stop_token_ids={list(stops)}: it was interrupted or has end tokens of its own; "
            f"start vLLM with --generation-config vllm, or add them to the tokenizer"
        )
    reason = "length" if length is None else "stop"
    return Completion(index, tokens, log_probs, reason, version)
