"""Rows of files as tokens to train on: responses, preferences and labelled steps.

A preference is two rows of a batch with one prompt, which a packed forward pass computes once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, TypeVar

import torch

from engine.batch import Batch
from engine.config import RowsConfig
from engine.data.collate import collate_completions
from engine.data.preference_rows import Kind, read_preference_rows
from engine.data.row_files import BadRows, RowMapper, data_files, mapped_rows
from engine.data.rows import brief, is_messages, user_message
from engine.data.templates import (
    encode_conversation,
    encode_prompts,
    encode_response,
    refusals,
    with_template_variables,
)
from engine.errors import DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Pair = tuple[list[int], list[int]]  # ids of the prompt, and of the response with its end token


def read_sft_pairs(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: RowsConfig | None = None,
    max_length: int = 0,
    too_long: str = "fail",
) -> list[Pair]:
    """Read and encode rows `{prompt, response}` of files, folders, s3://… or hf://….

    `prompt` is text or chat messages, `response` text. Without them, `messages` is a conversation
    whose last message is the response. Rows of more than `max_length` tokens (0: any) are an error,
    or left out with `too_long="drop"`. Raises DataError, in a sentence, for bad rows.
    """
    config = config or RowsConfig()
    tokenizer = with_template_variables(tokenizer, config.apply_chat_template_kwargs)
    mapper = RowMapper(config)
    pairs: list[Pair] = []
    for address in [file for path in paths for file in data_files(path)]:
        bad = BadRows(address, config.bad_rows)
        numbered = list(mapped_rows(address, config, bad, mapper=lambda r, w: _row(mapper, r, w)))
        bad.check()
        numbers = [number for number, _ in numbered]
        prompts = encode_prompts(
            tokenizer, (row["prompt"] for _, row in numbered), address, numbers
        )
        for (number, row), prompt in zip(numbered, prompts, strict=True):
            response = encode_response(tokenizer, row["response"])
            length = len(prompt) + len(response)
            if not max_length or length <= max_length:
                pairs.append((prompt, response))
            elif too_long != "drop":
                raise DataError(
                    f"{address}, row {number}: {length} tokens are more than {max_length}; shorten "
                    "it, or leave such rows out with data.too_long=drop"
                )
    return pairs


def _row(mapper: RowMapper, raw: Row, where: str) -> Row:
    """The prompt as messages, and the response."""
    row = mapper.named(raw, where)
    if "prompt" not in row and is_messages(row.get("messages")):
        *prompt, last = row["messages"]
        if last["role"] != "assistant" or not prompt:
            raise DataError(f"{where}: 'messages' must end with what the assistant says")
        row = {"prompt": prompt, "response": last["content"]}
    missing = [name for name in ("prompt", "response") if name not in row]
    if missing:
        raise DataError(
            f"{where}: there is no column {missing[0]!r}; name one of {sorted(raw)} in "
            f"data.columns, e.g. data.columns.{missing[0]}=answer"
        )
    prompt, response = row["prompt"], row["response"]
    if isinstance(prompt, str):
        prompt = user_message(prompt)
    if not is_messages(prompt):
        raise DataError(f"{where}: column 'prompt' is {brief(prompt)}; give text, or messages")
    if not isinstance(response, str) or not response.strip():
        raise DataError(f"{where}: column 'response' is {brief(response)}; give text")
    return {"prompt": mapper.with_system(prompt), "response": response}


@dataclass(frozen=True, slots=True)
class PairExample:
    """A prompt with two responses, the chosen one and the rejected one."""

    prompt_ids: list[int]  # e.g. [2, 17, 9, 3]
    chosen_ids: list[int]  # ends with the end token, e.g. [21, 30, 1]
    rejected_ids: list[int]
    margin: float = 0.0  # by how much the chosen one is better; reward models read it
    reference: tuple[float, float] | None = None  # log-probs of the responses; None: not yet known

    @property
    def responses(self) -> tuple[list[int], list[int]]:
        """The responses of its two rows."""
        return self.chosen_ids, self.rejected_ids


@dataclass(frozen=True, slots=True)
class LabelledExample:
    """A prompt with a completion that is good or bad."""

    prompt_ids: list[int]
    completion_ids: list[int]  # ends with the end token
    label: bool
    other_ids: list[int] | None = None  # completion of another prompt; see `with_others`
    reference: tuple[float, float] | None = None  # log-probs of the two; None: not yet known

    @property
    def responses(self) -> tuple[list[int], list[int]]:
        """The responses of its two rows."""
        return self.completion_ids, self.other_ids or self.completion_ids


PreferenceExample = PairExample | LabelledExample
E = TypeVar("E", bound=PreferenceExample)


def read_preferences(
    path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind = "pairs",
    *,
    config: RowsConfig | None = None,
    max_length: int = 0,
    too_long: str = "fail",
) -> list[PreferenceExample]:
    """Read and encode the pairs, or labelled completions, of files, folders, s3://… or hf://….

    `config` names columns and templates. Examples of more than `max_length` tokens (0: any) are an
    error, or left out with `too_long="drop"`. Raises DataError, in a sentence, for bad rows.

    Examples:
        >>> pairs = read_preferences("pairs.jsonl", tokenizer)  # doctest: +SKIP
    """
    config = config or RowsConfig()
    tokenizer = with_template_variables(tokenizer, config.apply_chat_template_kwargs)
    examples: list[PreferenceExample] = []
    addresses = [path] if isinstance(path, str) else list(path)
    for file in read_preference_rows(addresses, config, kind):
        found = encode_preferences(tokenizer, file.rows, file.bad.name, file.numbers)
        examples += within(found, max_length, file.bad.name, file.numbers, too_long)
    return examples


def encode_preferences(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], name: str, numbers: Iterable[int]
) -> list[PreferenceExample]:
    """Encode canonical rows of the table `name`; DataError for one that the template refuses."""
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows], name, numbers)

    def example(prompt: list[int], row: Row) -> PreferenceExample:
        if "label" in row:
            completion = encode_response(tokenizer, row["completion"])
            return LabelledExample(prompt, completion, row["label"])
        chosen, rejected = (encode_response(tokenizer, row[s]) for s in ("chosen", "rejected"))
        return PairExample(prompt, chosen, rejected, row["margin"])

    return [example(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


def read_reward_pairs(
    path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: RowsConfig | None = None,
    max_length: int = 0,
    too_long: str = "fail",
) -> list[PairExample]:
    """As `read_preferences`, of pairs: whole conversations, for a reward model.

    What chosen and rejected begin with in common counts as the prompt, which is computed once.
    """
    config = config or RowsConfig()
    tokenizer = with_template_variables(tokenizer, config.apply_chat_template_kwargs)
    examples: list[PairExample] = []
    for file in read_preference_rows([path] if isinstance(path, str) else path, config, "pairs"):
        name, numbers = file.bad.name, file.numbers
        found = [
            _conversations(tokenizer, row, f"{name}, row {i}")
            for row, i in zip(file.rows, numbers, strict=True)
        ]
        examples += within(found, max_length, name, numbers, too_long)
    return examples


def _conversations(tokenizer: PreTrainedTokenizerBase, row: Row, where: str) -> PairExample:
    sides = []
    for side in ("chosen", "rejected"):
        turns = [*row["prompt"], {"role": "assistant", "content": row[side]}]
        with refusals(tokenizer, where):
            sides.append(encode_conversation(tokenizer, turns))
    chosen, rejected = sides
    most = min(len(chosen), len(rejected)) - 1
    if chosen == rejected or most < 1:
        raise DataError(f"{where}: both conversations are the same tokens, or too few; remove it")
    differ = (i for i in range(most) if chosen[i] != rejected[i])
    shared = max(1, next(differ, most))
    return PairExample(chosen[:shared], chosen[shared:], rejected[shared:], row["margin"])


def within(
    examples: Sequence[E], max_length: int, name: str, numbers: Sequence[int], too_long: str
) -> list[E]:
    """The examples of at most `max_length` tokens; DataError for others unless they are dropped."""
    lengths = [len(e.prompt_ids) + max(map(len, e.responses)) for e in examples]
    long = [i for i, length in enumerate(lengths) if max_length and length > max_length]
    if long and too_long != "drop":
        raise DataError(
            f"{name}: {len(long)} of {len(examples)} examples are longer than {max_length} tokens, "
            f"first row {numbers[long[0]]} with {lengths[long[0]]}; shorten them, or leave them "
            "out with data.too_long=drop"
        )
    left_out = set(long)
    return [example for i, example in enumerate(examples) if i not in left_out]


def with_others(examples: Sequence[LabelledExample]) -> list[LabelledExample]:
    """Give each example the completion of the next one with another prompt, for KTO's estimate.

    Raises DataError where all prompts are the same.
    """
    prompts = [tuple(example.prompt_ids) for example in examples]
    if len(set(prompts)) < 2:
        raise DataError("KTO needs rows with two prompts or more; give rows with other prompts")
    found: list[LabelledExample] = []
    other = 0
    for i, example in enumerate(examples):
        other = max(other, i + 1)
        while prompts[other % len(examples)] == prompts[i]:
            other += 1
        found.append(replace(example, other_ids=examples[other % len(examples)].completion_ids))
    return found


def collate_preferences(examples: Sequence[PreferenceExample], pad_token_id: int) -> Batch:
    """Two rows an example, the second one right after the first.

    With `ref_response_log_probs [2N]` where all have them, and of labelled completions `desirable
    [2N]` bool.
    """
    prompts = Batch(
        {"group_ids": torch.arange(len(examples))}, {"prompt_ids": [e.prompt_ids for e in examples]}
    )
    responses = [ids for example in examples for ids in example.responses]
    batch = collate_completions(
        prompts,
        [i for i in range(len(examples)) for _ in range(2)],
        responses,
        [[0.0] * len(ids) for ids in responses],
        pad_token_id=pad_token_id,
    ).select(["input_ids", "attention_mask", "responses", "response_mask"])
    known = [example.reference for example in examples if example.reference is not None]
    if len(known) == len(examples):
        flat = torch.tensor(known, dtype=torch.float32).flatten()
        batch = batch | {"ref_response_log_probs": flat}
    labels = [e.label for e in examples if isinstance(e, LabelledExample)]
    if labels:
        batch = batch | {"desirable": torch.tensor(labels).repeat_interleave(2)}
    return batch


def collate_scored(examples: Sequence[PairExample], pad_token_id: int) -> Batch:
    """Two conversations an example, each with a token after its last one, which alone is masked in:
    a value before it is the conversation's score. With `margin [2N]`."""
    longer = [
        replace(
            e,
            chosen_ids=[*e.chosen_ids, pad_token_id],
            rejected_ids=[*e.rejected_ids, pad_token_id],
        )
        for e in examples
    ]
    batch = collate_preferences(longer, pad_token_id)
    mask = batch["response_mask"]
    last = mask.sum(1).long() - 1
    margins = torch.tensor([example.margin for example in examples]).repeat_interleave(2)
    alone = torch.zeros_like(mask).scatter(1, last[:, None], 1.0)
    return batch | {"response_mask": alone, "margin": margins}


def examples_digest(examples: Sequence[PreferenceExample]) -> str:
    """A digest of the tokens of examples, in their order."""
    found = hashlib.sha256()
    for example in examples:
        found.update(repr((example.prompt_ids, *example.responses)).encode())
    return found.hexdigest()


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
