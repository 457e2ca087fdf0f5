"""Rows of files as tokens to train on: responses, preferences and labelled steps.

A preference is two rows of a batch with one prompt, which a packed forward pass computes once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar, Unpack

import torch

from engine.batch import Batch, check_token_ids
from engine.config import RowsConfig
from engine.data import templates
from engine.data.chat_template import Message, refusals, with_template_variables
from engine.data.collate import SFTExample, collate_completions
from engine.errors import DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.data.preference_rows import Kind, Response

_log = logging.getLogger(__name__)


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
        return self.completion_ids, self.other_ids or self.completion_ids


@dataclass(frozen=True, slots=True)
class StepExample:
    """A conversation whose last message was written in steps."""

    prompt_ids: list[int]  # up to the first step's last token, which is not among them
    completion_ids: list[int]  # the rest of the conversation
    ends: list[int]  # index of each step's last token in completion_ids, e.g. [0, 7]
    labels: list[bool]  # of each step, whether it is right

    @property
    def responses(self) -> tuple[list[int]]:
        return (self.completion_ids,)


PreferenceExample = PairExample | LabelledExample
AnyExample = SFTExample | PreferenceExample | StepExample
E = TypeVar("E", bound=AnyExample)
TrainOn = Literal["all", "last"]


class ReadOptions(TypedDict, total=False):
    """How examples are read."""

    config: RowsConfig  # names columns and templates
    max_length: int  # tokens of an example; 0: any
    too_long: Literal["fail", "drop"]  # longer ones are an error (default), or left out


def read_sft_examples(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    train_on: TrainOn = "all",
    **options: Unpack[ReadOptions],
) -> list[SFTExample]:
    """Read and encode rows `{prompt, response}` or `{messages}` of files, folders, s3://… or hf://….

    Of `messages`, a conversation, all turns of the assistant are learned, or the last; `tools` are
    shown. Raises DataError for bad rows, and ModelError for a tokenizer without end token.
    """

    templates.end_token_id(tokenizer)  # else every row would be refused for it

    def encode(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[SFTExample]:
        if "messages" not in row:
            return [_turn(tokenizer, row, row["response"])]
        return conversation_examples(tokenizer, row["messages"], row.get("tools", ()), train_on)

    return _read(paths, tokenizer, "responses", encode, **options)


def conversation_examples(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] = (),
    train_on: TrainOn = "all",
) -> list[SFTExample]:
    """The examples of a conversation: each of its turns as the policy will see and sample it.

    Where a template writes earlier turns otherwise in a later prompt (without their thoughts),
    another example begins. A turn with `weight` 0 is not learned. Raises DataError where none is.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)]
    if train_on == "last":
        turns = [i for i in turns if i == len(messages) - 1]
    examples: list[SFTExample] = []
    for i in turns:
        example = templates.encode_turn(tokenizer, messages[:i], messages[i], tools)
        if examples and (joined := _joined(examples[-1], example)) is not None:
            examples[-1] = joined
        else:
            examples.append(example)
    if not any(any(example.learned or ()) for example in examples):
        raise DataError(
            "nothing of it is learned, by the weights of its messages, train_on or the marks "
            "{% generation %} of the chat template; remove it"
        )
    return examples


def _joined(first: SFTExample, second: SFTExample) -> SFTExample | None:
    """One example of two turns; None where the second's prompt doesn't begin with the first."""
    so_far = first.prompt_ids + first.response_ids
    if second.prompt_ids[: len(so_far)] != so_far:
        return None
    between = second.prompt_ids[len(so_far) :]
    learned = [*(first.learned or ()), *([False] * len(between)), *(second.learned or ())]
    response = first.response_ids + between + second.response_ids
    return SFTExample(first.prompt_ids, response, learned)


def read_preferences(
    path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind = "pairs",
    **options: Unpack[ReadOptions],
) -> list[PreferenceExample]:
    """Read and encode the pairs, or labelled completions, of files, folders, s3://… or hf://…."""

    templates.end_token_id(tokenizer)

    def encode(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[PreferenceExample]:
        if "label" in row:
            prompt, completion, _ = _turn(tokenizer, row, row["completion"])
            return [LabelledExample(prompt, completion, row["label"])]
        prompt, chosen, _ = _turn(tokenizer, row, row["chosen"])
        _, rejected, _ = _turn(tokenizer, row, row["rejected"])
        _check_differ(chosen, rejected)
        return [PairExample(prompt, chosen, rejected, row["margin"])]

    return _read(path, tokenizer, kind, encode, **options)


def read_reward_pairs(
    path: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: Unpack[ReadOptions]
) -> list[PairExample]:
    """Read pairs as `read_preferences` does, as whole conversations for a reward model.

    What chosen and rejected begin with in common counts as the prompt, which is computed once.
    """

    def encode(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[PairExample]:
        chosen, rejected = (
            _conversation(tokenizer, row, row[side]) for side in ("chosen", "rejected")
        )
        _check_differ(chosen, rejected)
        longest = min(len(chosen), len(rejected)) - 1
        if longest < 1:
            raise DataError("one of its conversations is too short; remove the row")
        shared = max(1, min(longest, templates.common_length(chosen, rejected)))
        return [PairExample(chosen[:shared], chosen[shared:], rejected[shared:], row["margin"])]

    return _read(path, tokenizer, "pairs", encode, **options)


def read_steps(
    path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    separator: str = "\n",
    **options: Unpack[ReadOptions],
) -> list[StepExample]:
    """Read and encode rows `{prompt, completions, labels}` of files, folders, s3://… or hf://….

    `completions` are the steps of a response, which `separator` joins. Raises DataError, in a
    sentence, for bad rows.
    """

    def encode(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[StepExample]:
        steps: list[str] = row["completions"]
        prompt, tools = row["prompt"], row.get("tools", ())
        ids, ends = templates.encode_steps(tokenizer, prompt, steps, separator, tools)
        if ends[0] < 1 or any(b <= a for a, b in pairwise(ends)):
            raise DataError("two of its steps end in one token; join them, or split elsewhere")
        first, labels = ends[0], row["labels"]
        return [StepExample(ids[:first], ids[first:], [end - first for end in ends], labels)]

    return _read(path, tokenizer, "steps", encode, **options)


def _read(
    path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    encode: Callable[[PreTrainedTokenizerBase, Row], list[E]],
    *,
    config: RowsConfig | None = None,
    max_length: int = 0,
    too_long: str = "fail",
) -> list[E]:
    """Encode the rows of all files; DataError for long ones unless they are dropped."""
    from engine.data.preference_rows import read_preference_rows  # pandas; rows in memory need none

    config = config or RowsConfig()
    tokenizer = with_template_variables(tokenizer, config.apply_chat_template_kwargs)
    examples: list[E] = []
    for file in read_preference_rows([path] if isinstance(path, str) else path, config, kind):
        for note in file.notes:
            _log.warning("%s", note)
        encoded, long = list[E](), list[tuple[int, int]]()  # row and tokens
        for row, number in zip(file.rows, file.numbers, strict=True):
            with refusals(tokenizer, f"{file.address}, row {number}"):
                for example in encode(tokenizer, row):
                    if max_length and _length(example) > max_length:
                        long.append((number, _length(example)))
                    else:
                        encoded.append(example)
        if long and too_long != "drop":
            raise DataError(
                f"{file.address}: {len(long)} of {len(long) + len(encoded)} examples are longer "
                f"than {max_length} tokens, first row {long[0][0]} with {long[0][1]}; shorten "
                "them, or leave them out with data.too_long=drop"
            )
        examples += encoded
    return examples


def _length(example: AnyExample) -> int:
    """Tokens of the longer row that an example makes."""
    return len(example.prompt_ids) + max(map(len, example.responses))


def check_examples(examples: Sequence[AnyExample], vocabulary: int, name: str) -> None:
    """Check examples that a caller has made, which errors call by `name`, e.g. "train".

    ModelError for a token that the model doesn't have, DataError for a pair of equal responses and
    for `learned` of another length than its response.
    """
    for i, example in enumerate(examples):
        for ids in (example.prompt_ids, *example.responses):
            check_token_ids(f"{name} {i}", ids, vocabulary)
        if isinstance(example, PairExample):
            _check_differ(*example.responses, f"{name} {i}: ")
        if isinstance(example, SFTExample) and example.learned is not None:
            values, tokens = len(example.learned), len(example.response_ids)
            if values != tokens:
                raise DataError(
                    f"{name} {i} has {values} values of 'learned' for {tokens} tokens of its "
                    "response; give one for each token, or None"
                )


def _check_differ(chosen: list[int], rejected: list[int], where: str = "") -> None:
    if chosen == rejected:
        raise DataError(
            f"{where}'chosen' and 'rejected' are the same tokens, which tells nothing apart; "
            "remove it"
        )


def _message(response: Response) -> dict[str, object]:
    return {"role": "assistant", "content": response} if isinstance(response, str) else response


def _turn(tokenizer: PreTrainedTokenizerBase, row: Row, response: Response) -> SFTExample:
    message, tools = _message(response), row.get("tools", ())
    return templates.encode_turn(tokenizer, row["prompt"], message, tools)


def _conversation(tokenizer: PreTrainedTokenizerBase, row: Row, response: Response) -> list[int]:
    turns = [*row["prompt"], _message(response)]
    return templates.encode_conversation(tokenizer, turns, row.get("tools", ()))


def with_others(examples: Sequence[LabelledExample]) -> list[LabelledExample]:
    """Give each example the completion of the next one with another prompt, for KTO's estimate."""
    prompts = [tuple(example.prompt_ids) for example in examples]
    if len(set(prompts)) < 2:
        raise DataError("KTO needs rows with two prompts or more; give rows with other prompts")
    paired: list[LabelledExample] = []
    other = 0
    for i, example in enumerate(examples):
        other = max(other, i + 1)
        while prompts[other % len(examples)] == prompts[i]:
            other += 1
        paired.append(replace(example, other_ids=examples[other % len(examples)].completion_ids))
    return paired


def examples_digest(examples: Sequence[PreferenceExample]) -> str:
    """SHA-256 (hex) of the tokens of examples, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.prompt_ids, *example.responses)).encode())
    return digest.hexdigest()


def collate_preferences(examples: Sequence[PreferenceExample], pad_token_id: int) -> Batch:
    """Make two rows an example, the second one right after the first.

    With `ref_response_log_probs [2N]` where all have them, and of labels `desirable [2N]` bool.
    """
    responses = [ids for example in examples for ids in example.responses]
    batch = _padded([e.prompt_ids for e in examples], responses, pad_token_id)
    known = [example.reference for example in examples if example.reference is not None]
    if len(known) == len(examples):
        flat = torch.tensor(known, dtype=torch.float32).flatten()
        batch = batch | {"ref_response_log_probs": flat}
    labels = [e.label for e in examples if isinstance(e, LabelledExample)]
    if labels:
        batch = batch | {"desirable": torch.tensor(labels).repeat_interleave(2)}
    return batch


def collate_scored(examples: Sequence[PairExample], pad_token_id: int) -> Batch:
    """Make two conversations an example, each with a token after its last one.

    That token alone is masked in: a value before it is the conversation's score. With `margin
    [2N]`, and `ref_response_log_probs [2N]` where all examples have them.
    """
    end = [pad_token_id]
    longer = [
        replace(e, chosen_ids=e.chosen_ids + end, rejected_ids=e.rejected_ids + end)
        for e in examples
    ]
    batch = collate_preferences(longer, pad_token_id)
    mask = batch["response_mask"]
    last = torch.zeros_like(mask).scatter(1, mask.sum(1, keepdim=True).long() - 1, 1.0)
    margins = torch.tensor([example.margin for example in examples]).repeat_interleave(2)
    return batch | {"response_mask": last, "margin": margins}


def collate_steps(examples: Sequence[StepExample], pad_token_id: int) -> Batch:
    """Make a row an example, with a token after its last one.

    `response_mask` is 1 on the tokens after steps' ends: values before them are the steps' scores.
    With `step_labels [B, R]`.
    """
    rows = [[*example.completion_ids, pad_token_id] for example in examples]
    batch = _padded([e.prompt_ids for e in examples], rows, pad_token_id)
    mask, labels = (torch.zeros(batch["responses"].shape) for _ in range(2))
    for row, example in enumerate(examples):
        columns = [end + 1 for end in example.ends]
        mask[row, columns] = 1.0
        labels[row, columns] = torch.tensor(example.labels).float()
    return batch | {"response_mask": mask, "step_labels": labels}


def _padded(
    prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_token_id: int
) -> Batch:
    """Pad responses `[B, R]`, equally many for each prompt in order, behind their prompts."""
    each = len(responses) // max(1, len(prompts))
    groups = Batch({"group_ids": torch.arange(len(prompts))}, {"prompt_ids": list(prompts)})
    return collate_completions(
        groups,
        [i for i in range(len(prompts)) for _ in range(each)],
        responses,
        [[0.0] * len(ids) for ids in responses],
        pad_token_id=pad_token_id,
    ).select(["input_ids", "attention_mask", "responses", "response_mask"])
