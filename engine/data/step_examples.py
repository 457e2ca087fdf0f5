"""Completions in steps as tokens, for process rewards: where each step ends, and if it is right.

Rows of files are in `preference_rows`. The reward `process_reward_model` finds the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

import torch

from engine.batch import Batch
from engine.config import RowsConfig
from engine.data.collate import collate_completions
from engine.data.preference_rows import read_preference_rows
from engine.data.templates import encode_conversation, refusals, with_template_variables
from engine.errors import DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class StepExample:
    """A conversation whose last message was written in steps."""

    prompt_ids: list[int]  # up to the first step's last token, which is not among them
    completion_ids: list[int]  # the rest of the conversation
    ends: list[int]  # of each step, the place of its last token in completion_ids, e.g. [0, 7]
    labels: list[bool]  # of each step, whether it is right


def read_steps(
    path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: RowsConfig | None = None,
    separator: str = "\n",
    max_length: int = 0,
    too_long: str = "fail",
) -> list[StepExample]:
    """Read and encode rows `{prompt, completions, labels}` of files, folders, s3://… or hf://….

    `completions` are the steps of a response, which `separator` joins. Rows of more than
    `max_length` tokens (0: any) are an error, or left out with `too_long="drop"`. Raises DataError,
    in a sentence, for bad rows.
    """
    config = config or RowsConfig()
    tokenizer = with_template_variables(tokenizer, config.apply_chat_template_kwargs)
    examples: list[StepExample] = []
    for file in read_preference_rows([path] if isinstance(path, str) else path, config, "steps"):
        for row, number in zip(file.rows, file.numbers, strict=True):
            where = f"{file.bad.name}, row {number}"
            found = _example(tokenizer, row, separator, where)
            length = len(found.prompt_ids) + len(found.completion_ids)
            if not max_length or length <= max_length:
                examples.append(found)
            elif too_long != "drop":
                raise DataError(
                    f"{where}: {length} tokens are more than {max_length}; shorten it, or leave "
                    "such rows out with data.too_long=drop"
                )
    return examples


def _example(
    tokenizer: PreTrainedTokenizerBase, row: Row, separator: str, where: str
) -> StepExample:
    def encode(text: str) -> list[int]:
        turns = [*row["prompt"], {"role": "assistant", "content": text}]
        with refusals(tokenizer, where):
            return encode_conversation(tokenizer, turns)

    steps: list[str] = row["completions"]
    whole, ends = encode(separator.join(steps)), list[int]()
    for i in range(1, len(steps)):
        part = encode(separator.join([*steps[:i], ""]))
        ends.append(_common(whole, part) - 1)
    ends.append(len(whole) - 1)
    if ends[0] < 1 or any(b <= a for a, b in pairwise(ends)):
        raise DataError(
            f"{where}: two of its steps end in one token; join them, or split elsewhere"
        )
    first = ends[0]
    return StepExample(whole[:first], whole[first:], [end - first for end in ends], row["labels"])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def collate_steps(examples: Sequence[StepExample], pad_token_id: int) -> Batch:
    """A row an example, with a token after its last one. `response_mask` is 1 on the tokens after
    steps' ends: values before them are the steps' scores. With `step_labels [B, R]`."""
    prompts = Batch(
        {"group_ids": torch.arange(len(examples))}, {"prompt_ids": [e.prompt_ids for e in examples]}
    )
    rows = [[*example.completion_ids, pad_token_id] for example in examples]
    nothing = [[0.0] * len(ids) for ids in rows]
    batch = collate_completions(
        prompts, range(len(rows)), rows, nothing, pad_token_id=pad_token_id
    ).select(["input_ids", "attention_mask", "responses"])
    mask, labels = (torch.zeros(batch["responses"].shape) for _ in range(2))
    for row, example in enumerate(examples):
        columns = [end + 1 for end in example.ends]
        mask[row, columns] = 1.0
        labels[row, columns] = torch.tensor(example.labels).float()
    return batch | {"response_mask": mask, "step_labels": labels}
