"""A process reward model: it says of each step of a completion whether it is right. Any
token-classification folder of Hugging Face with one label.

A reward is one number a completion: the probabilities of its steps become one. `engine.trainers`
makes such folders (`reward_model.head=token`).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from engine.errors import RewardError
from engine.rewards.registry import register_reward
from engine.rewards.reward_model import ScoringModel, load_scoring_model

_lock = threading.Lock()  # one batch at a time: single rows come from several threads
_REDUCED: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "mean": lambda steps: sum(steps) / len(steps),
    "last": lambda steps: steps[-1],
}


def passing(pass_from: float = 0.5) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("process_reward_model", right_from=passing)
def process_reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    reduce: Literal["min", "product", "mean", "last"] = "min",
    separator: str = "",
    batch_size: int = 8,
    dtype: Literal["", "float32", "bfloat16"] = "",
    device: str = "",
    pass_from: float = 0.5,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions from 0 to 1: `reduce` of the probabilities that their steps are right.

    Steps are what `separator` parts (empty: what the model was trained with, or a line break);
    empty ones don't count, and a completion without any scores 0. Raises RewardError for a folder
    that is no such model, and for a conversation that is longer than it reads.
    """
    if not model or batch_size < 1:
        raise RewardError(
            "reward 'process_reward_model' needs reward.options.model, a folder or hub id, and a "
            "batch_size of at least 1"
        )
    loaded = _load(model, dtype, device)
    parted = separator or str(getattr(loaded.model.config, "step_separator", "\n"))
    messages = columns.get("messages") or [[{"role": "user", "content": one}] for one in prompts]
    rows = [
        _tokens(loaded, m, [step for step in c.split(parted) if step.strip()], parted)
        for m, c in zip(messages, completions, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))  # batches of like lengths
    scores = [0.0] * len(rows)
    with _lock:
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            found = _probabilities(loaded, [rows[i] for i in some])
            for i, steps in zip(some, found, strict=True):
                scores[i] = _REDUCED[reduce](steps) if steps else 0.0
    return scores


def _tokens(
    loaded: ScoringModel, messages: Sequence[Mapping[str, object]], steps: list[str], separator: str
) -> tuple[list[int], list[int]]:
    """The conversation's tokens, and the place of each step's last one."""
    if not steps:
        return [], []
    whole = loaded.tokens(messages, separator.join(steps))
    ends = []
    for i in range(1, len(steps)):
        part = loaded.tokens(messages, separator.join([*steps[:i], ""]))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(whole, part, strict=False))
        ends.append(sum(1 for _ in same) - 1)
    longest = getattr(loaded.model.config, "max_position_embeddings", 0) or len(whole)
    if len(whole) > longest:
        raise RewardError(
            f"a conversation of {len(whole)} tokens is longer than the {longest} that the process "
            "reward model reads; lower data.max_response_length"
        )
    return whole, [*ends, len(whole) - 1]


def _probabilities(
    loaded: ScoringModel, rows: Sequence[tuple[list[int], list[int]]]
) -> list[list[float]]:
    """Of each row the probabilities that its steps are right."""
    import torch

    width = max(1, max(len(ids) for ids, _ in rows))
    padding = int(loaded.tokenizer.pad_token_id)
    ids = torch.tensor([[*ids, *[padding] * (width - len(ids))] for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    device = loaded.model.device
    with torch.inference_mode():
        out = loaded.model(input_ids=ids.to(device), attention_mask=mask.to(device))
    said = out.logits[..., 0].float().sigmoid().tolist()
    return [[row[end] for end in ends] for row, (_, ends) in zip(said, rows, strict=True)]


@functools.cache
def _load(folder: str, dtype: str, device: str) -> ScoringModel:
    from transformers import AutoModelForTokenClassification

    loaded = load_scoring_model(
        AutoModelForTokenClassification, "token classification", folder, dtype, device
    )
    labels = loaded.model.config.num_labels
    if labels != 1:
        raise RewardError(
            f"reward.options.model={folder!r} has {labels} labels a token, and a process reward "
            "model has one; train it with reward_model.head=token"
        )
    return loaded
