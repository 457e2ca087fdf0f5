"""Batches as steps of RL leave them, from texts; and a tokenizer for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from engine.batch import Batch
from engine.data.collate import collate_completions
from engine.data.tokenizer import train_tokenizer


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE: a character beyond ASCII is several tokens."""
    return train_tokenizer(
        [f"{a}+{b}={a + b} the answer is" for a in range(9) for b in range(9)], 300
    )


def step_batch(
    groups: dict[str, Sequence[str]], rewards: Sequence[float], *, components: bool = True
) -> Batch:
    """Completions by prompt with rewards, advantages (reward − 0.5) and log-probs (−0.1, −0.2, …).

    The trainer's log-probs are 0.01 above those of rollout.
    """
    prompts, answers = list(groups), [answer for group in groups.values() for answer in group]
    index = [i for i, group in enumerate(groups.values()) for _ in group]
    ids: list[list[int]] = [tokenizer().encode(text, add_special_tokens=False) for text in answers]
    source = Batch(
        {"group_ids": torch.arange(len(prompts))},
        {
            "prompt_ids": [tokenizer().encode(p, add_special_tokens=False) for p in prompts],
            "prompt": [[{"role": "user", "content": prompt}] for prompt in prompts],
            "ground_truth": [str(i) for i in range(len(prompts))],
            "data_source": ["sums"] * len(prompts),
        },
    )
    log_probs = [[-0.1 * (i + 1) for i in range(len(one))] for one in ids]
    batch = collate_completions(source, index, ids, log_probs, pad_token_id=0)
    mask, score = batch["response_mask"], torch.tensor(rewards)
    last = torch.zeros_like(mask)
    last[torch.arange(len(ids)), mask.sum(1).long() - 1] = 1.0
    tensors: dict[str, Any] = {
        "old_log_probs": (batch["rollout_log_probs"] + 0.01) * mask,
        "advantages": (score - 0.5)[:, None] * mask,
        "token_level_scores": score[:, None] * last,
        "token_level_rewards": (score - 0.25)[:, None] * last,
        "truncated": torch.zeros(len(ids), dtype=torch.bool),
        "reward_error": torch.zeros(len(ids), dtype=torch.bool),
        "policy_version": torch.full((len(ids),), 3),
    }
    columns: dict[str, Any] = {
        "completion": answers,
        "reward_correct": [value > 0.5 for value in rewards],
        "reward_error_cause": [""] * len(ids),
    }
    if components:
        tensors["reward_components"] = torch.stack([score, 1 - score], 1)
        columns["reward_component_names"] = [("answer", "brevity")] * len(ids)
    return batch | Batch(tensors, columns)
