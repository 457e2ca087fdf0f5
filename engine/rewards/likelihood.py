"""A language model as a reward model: how likely it finds a completion.

A policy that was trained on preferences ranks completions by its log-probs: without a reference as
`preference.loss=likelihood` and `simpo` train it, over a reference's as DPO does (its implicit
reward, arXiv 2305.18290, eq. 5).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engine.errors import RewardError
from engine.rewards.registry import register_reward
from engine.rewards.reward_model import ScoringModel, load_scoring_model

_lock = threading.Lock()  # one batch at a time: single rows come from several threads


def passing(pass_from: float = 0.0) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("likelihood", right_from=passing)
def likelihood(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    reference: str = "",
    beta: float = 1.0,
    per_token: bool = False,
    batch_size: int = 8,
    dtype: Literal["", "float32", "bfloat16"] = "",
    device: str = "",
    pass_from: float = 0.0,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions: β · log π(completion | messages), less `reference`'s where one is given.

    The log-prob is the sum over the completion's tokens and its end token, or with `per_token`
    their mean. Raises RewardError for a folder that is no causal language model, or has no chat
    template, and for a conversation that is longer than it reads.
    """
    if not model or batch_size < 1:
        raise RewardError(
            "reward 'likelihood' needs reward.options.model, a folder or hub id, and a batch_size "
            "of at least 1"
        )
    messages = columns.get("messages") or [[{"role": "user", "content": one}] for one in prompts]
    scores = [0.0] * len(completions)
    for folder, sign in ((model, 1.0), (reference, -1.0)):
        if not folder:
            continue
        loaded = _load(folder, dtype, device)
        rows = [_tokens(loaded, m, c) for m, c in zip(messages, completions, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: sum(map(len, rows[i])))  # of like lengths
        with _lock:
            for start in range(0, len(order), batch_size):
                some = order[start : start + batch_size]
                found = _log_probs(loaded, [rows[i] for i in some], per_token)
                for i, value in zip(some, found, strict=True):
                    scores[i] += sign * beta * value
    return scores


def _tokens(
    loaded: ScoringModel, messages: Sequence[Mapping[str, object]], completion: str
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and of the completion to its end token, apart as in training."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        raise RewardError("reward 'likelihood' needs a model with a chat template; give it one")
    whole, opened = loaded.text(messages, completion), loaded.opening(messages)
    if not whole.startswith(opened):
        raise RewardError(
            "reward 'likelihood': the model's chat template doesn't write an answer after what it "
            "writes for one to come, so no completion has a log-prob; give it another template"
        )
    prompt, answer = loaded.encode(opened), loaded.encode(whole.removeprefix(opened))
    if tokenizer.eos_token_id in answer:  # a line break may follow it
        answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
    count = len(prompt) + len(answer)
    longest = getattr(loaded.model.config, "max_position_embeddings", 0) or count
    if count > longest or not prompt or not answer:
        raise RewardError(
            f"a conversation of {len(prompt)} and {len(answer)} tokens has no log-prob: the model "
            f"reads {longest}; lower data.max_response_length"
        )
    return prompt, answer


def _log_probs(
    loaded: ScoringModel, rows: Sequence[tuple[list[int], list[int]]], per_token: bool
) -> list[float]:
    """Of each row the completion's log-prob, or its mean over tokens."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), int(loaded.tokenizer.pad_token_id))
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
    ids = ids.to(loaded.model.device)
    found = []
    with torch.inference_mode():  # padding is on the right, where no token before it looks
        logits = loaded.model(input_ids=ids).logits
        for row, (prompt, answer) in enumerate(rows):
            asked = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            targets = ids[row, len(prompt) : len(prompt) + len(answer)]
            reduction = "mean" if per_token else "sum"
            found.append(
                -torch.nn.functional.cross_entropy(
                    logits[row, asked].float(), targets, reduction=reduction
                )
            )
        return [float(value) for value in torch.stack(found).cpu()]


@functools.cache
def _load(folder: str, dtype: str, device: str) -> ScoringModel:
    from transformers import AutoModelForCausalLM

    return load_scoring_model(
        AutoModelForCausalLM, "causal language modelling", folder, dtype, device
    )
