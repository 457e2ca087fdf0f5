"""Preference rows in canonical form, from files and from a policy's own scored completions.

A pair is `{prompt, chosen, rejected, margin}`, a labelled row `{prompt, completion, label}`, one
of steps `{prompt, completions, labels}`, one to fine-tune on `{prompt, response}` or `{messages}`.
`prompt` is canonical chat messages (`data.messages`), a response text, or the assistant's message
where it has more than that. Files may have messages as responses, also whole conversations.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from engine.config import RowsConfig
from engine.data.cells import brief, is_missing
from engine.data.messages import canonical_messages, row_tools
from engine.data.row_files import FileRows, MappedRows, RowMapper, data_files
from engine.data.rows import is_filled, prompt_messages
from engine.errors import DataError
from engine.storage.json_rows import Row

Kind = Literal["pairs", "labels", "steps", "responses"]
Response = str | dict[str, Any]  # what the assistant says: text, or its message where it has more
_LABELS = {"true": True, "false": False, "1": True, "0": False}


def read_preference_rows(
    addresses: Iterable[str], config: RowsConfig, kind: Kind
) -> list[FileRows]:
    """Read the rows of files, folders, s3://… or hf://…, an entry a file, all of one kind.

    A pair gives two rows with labels where labels are asked for. Raises as `MappedRows` does.
    """
    mapper = partial(preference_row, RowMapper(config), kind)
    files = []
    for file in (file for address in addresses for file in data_files(address)):
        mapped, rows, numbers = MappedRows(file, config, mapper=mapper), list[Row](), list[int]()
        for number, row in mapped:
            split = _as_labelled(row) if kind == "labels" and "label" not in row else [row]
            rows += split
            numbers += [number] * len(split)
        files.append(FileRows(file, rows, numbers, mapped.notes()))
    return files


def preference_row(mapper: RowMapper, kind: Kind, raw: Row, where: str) -> Row:
    """Turn a row of a file into a canonical one; DataError that begins with `where` for none.

    >>> mapper = RowMapper(RowsConfig(columns={"chosen": "better"}))
    >>> row = {"prompt": "1+1?", "better": "2", "rejected": "3"}
    >>> preference_row(mapper, "pairs", row, "d.jsonl, row 1")
    {'prompt': [{'role': 'user', 'content': '1+1?'}], 'chosen': '2', 'rejected': '3', 'margin': 0.0}
    """
    row = mapper.named(raw, where)
    if kind == "responses":
        canonical = _response_row(row, where)
    elif kind == "steps":
        canonical = _steps_row(row, where)
    elif kind == "pairs" or {"chosen", "rejected"} <= row.keys():
        canonical = _pair_row(row, where)
    else:
        canonical = _labelled_row(row, where)
    if tools := row_tools(row.get("tools"), where):
        canonical["tools"] = tools
    name = "prompt" if "prompt" in canonical else "messages"
    return canonical | {name: mapper.with_system(canonical[name])}


def _pair_row(row: Row, where: str) -> Row:
    prompt, (chosen, rejected) = _conversation(row, ("chosen", "rejected"), where)
    if chosen == rejected:
        raise DataError(f"{where}: columns 'chosen' and 'rejected' are the same; remove the row")
    margin = 0.0 if is_missing(row.get("margin")) else row["margin"]
    is_number = isinstance(margin, int | float | np.number) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise DataError(f"{where}: column 'margin' is {brief(margin)}; give a finite number")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": float(margin)}


def _labelled_row(row: Row, where: str) -> Row:
    prompt, (completion,) = _conversation(row, ("completion",), where)
    label = _label(_cell(row, "label", where))
    if label is None:
        raise DataError(f"{where}: column 'label' is {brief(row['label'])}; give true or false")
    return {"prompt": prompt, "completion": completion, "label": label}


def _as_labelled(pair: Row) -> list[Row]:
    common: Row = {name: pair[name] for name in ("prompt", "tools") if name in pair}
    sides = {"chosen": True, "rejected": False}
    return [{**common, "completion": pair[side], "label": sides[side]} for side in sides]


def _steps_row(row: Row, where: str) -> Row:
    prompt = prompt_messages(_cell(row, "prompt", where), where)
    cells = (_cell(row, name, where) for name in ("completions", "labels"))
    steps, labels = (list(c) if isinstance(c, list | tuple | np.ndarray) else [] for c in cells)
    if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(
            f"{where}: column 'completions' is {brief(row['completions'])}; give a list of steps, "
            "texts that are not empty"
        )
    flags = [_label(label) for label in labels]
    if len(flags) != len(steps) or None in flags:
        raise DataError(
            f"{where}: column 'labels' is {brief(row['labels'])} for {len(steps)} steps; give true "
            "or false for each"
        )
    return {"prompt": prompt, "completions": steps, "labels": flags}


def _response_row(row: Row, where: str) -> Row:
    if "prompt" not in row and not is_missing(row.get("messages")):
        messages = canonical_messages(row["messages"], f"{where}: column 'messages'")
        roles = [message["role"] for message in messages]
        if roles[-1:] != ["assistant"] or len(roles) < 2:
            raise DataError(f"{where}: 'messages' must end with what the assistant says")
        alone = roles[0] == "assistant" and messages[0].get("weight", 1)
        if alone or ("assistant", "assistant") in pairwise(roles):
            raise DataError(
                f"{where}: column 'messages' has an assistant's message that answers none; join "
                "it with the one before it, or remove it"
            )
        return {"messages": messages}
    prompt = prompt_messages(_cell(row, "prompt", where), where)
    before, response = _response(_cell(row, "response", where), "response", where)
    if before:
        raise DataError(f"{where}: column 'response' has {len(before) + 1} messages; give one")
    return {"prompt": prompt, "response": response}


def _conversation(
    row: Row, names: Sequence[str], where: str
) -> tuple[list[dict[str, object]], list[Response]]:
    """The messages before the responses `names`, and each of these."""
    prompt = None if is_missing(row.get("prompt")) else prompt_messages(row["prompt"], where)
    heads, responses = [], []
    for name in names:
        head, response = _response(_cell(row, name, where), name, where)
        if prompt is None and not head:
            raise DataError(
                f"{where}: there is no column 'prompt', and no message before the response in "
                f"{name!r}; name the prompt's column, e.g. data.columns.prompt=question"
            )
        if prompt is not None and head and head[-len(prompt) :] != prompt:
            raise DataError(
                f"{where}: the messages of column {name!r} don't begin with the prompt; remove "
                "one of the two"
            )
        heads.append(head or prompt or [])
        responses.append(response)
    if heads[0] != heads[-1]:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' answer different conversations; they must differ in "
            "the last message alone"
        )
    return heads[0], responses


def _response(cell: object, name: str, where: str) -> tuple[list[dict[str, Any]], Response]:
    """The messages before a response, which its cell may have, and the response."""
    given: object = {"role": "assistant", "content": cell} if isinstance(cell, str) else cell
    given = [given] if isinstance(given, Mapping) else given
    messages = list[dict[str, Any]]()
    if isinstance(given, list | tuple | np.ndarray):
        messages = canonical_messages(given, f"{where}: column {name!r}")
    if not messages or not (is_filled(messages) or messages[-1].get("tool_calls")):
        raise DataError(
            f"{where}: column {name!r} is {brief(cell)}; give text that is not empty, or messages "
            "that end with the assistant's"
        )
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the last message of column {name!r} is of the role "
            f"{messages[-1]['role']!r}; end it with the assistant's"
        )
    *before, last = ({k: v for k, v in message.items() if k != "weight"} for message in messages)
    return before, last["content"] if last.keys() == {"role", "content"} else last


def _label(cell: object) -> bool | None:
    """A label as a boolean: also 1, 0.0, "true" and "False"; None for anything else."""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        cell = int(cell)
    return _LABELS.get(str(cell).strip().lower())


def _cell(row: Row, name: str, where: str) -> object:
    if name not in row:
        example = {"prompt": "question", "response": "answer"}.get(name, "…")
        raise DataError(
            f"{where}: there is no column {name!r}; name one of {sorted(row)} in data.columns, "
            f"e.g. data.columns.{name}={example}"
        )
    return row[name]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """What can be learned from of a policy's completions of one prompt."""

    prompt: Sequence[Mapping[str, object]]  # messages, e.g. [{"role": "user", "content": "1+1?"}]
    scores: Mapping[str, float]  # by text, in the order of sampling
    extra_info: Mapping[str, object] = field(default_factory=dict)  # e.g. {"policy_version": 12}

    def row(self, extra_info: Mapping[str, object], **columns: object) -> Row:
        prompt = [dict(message) for message in self.prompt]
        return {"prompt": prompt, **columns, "extra_info": {**self.extra_info, **extra_info}}


def pairs_from_groups(
    groups: Iterable[ScoredGroup], pairs_per_group: int = 1, min_gap: float = 0.0
) -> list[Row]:
    """The best and the worst completion of each group as chosen and rejected, with margin 0.

    With `pairs_per_group` also the second best and the second worst, and so on. A pair's scores,
    which are in `extra_info`, differ by more than `min_gap`; of equal ones the first counts.
    """
    rows: list[Row] = []
    for group in groups:
        scores = group.scores
        best = sorted(scores, key=lambda text: -scores[text])  # stable: of equal ones the first
        worst = sorted(scores, key=lambda text: scores[text])
        count = min(pairs_per_group, len(scores) // 2)
        for chosen, rejected in zip(best[:count], worst[:count], strict=True):
            high, low = scores[chosen], scores[rejected]
            if high - low <= min_gap:
                break
            ends = {"chosen_score": high, "rejected_score": low}
            rows.append(group.row(ends, chosen=chosen, rejected=rejected, margin=0.0))
    return rows


def labels_from_groups(groups: Iterable[ScoredGroup], per_group: int = 0) -> list[Row]:
    """Each completion with a label: good where its score is above 0.5.

    Of each label at most `per_group` completions of a group (0: all), the first ones. For KTO,
    which needs no partner: a group that is all good, or all bad, counts as well.
    """
    rows: list[Row] = []
    for group in groups:
        taken = {True: 0, False: 0}
        for text, score in group.scores.items():
            label = score > 0.5
            taken[label] += 1
            if not per_group or taken[label] <= per_group:
                rows.append(group.row({"score": score}, completion=text, label=label))
    return rows
