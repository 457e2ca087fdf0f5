"""Preference rows in canonical form, from files and from a policy's own scored completions.

A pair is `{prompt, chosen, rejected, margin}`, a labelled row `{prompt, completion, label}`, one
of steps `{prompt, completions, labels}`: `prompt` is chat messages, responses are text. Files may
have messages as responses, with or without the conversation before them. Tokens are made in
`training_examples`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from engine.config import RowsConfig
from engine.data.row_files import BadRows, FileRows, RowMapper, data_files, mapped_rows
from engine.data.rows import brief, has_words, is_messages, is_missing, is_utf8, user_message
from engine.errors import DataError
from engine.storage.json_rows import Row

Kind = Literal["pairs", "labels", "steps"]
_LABELS = {"true": True, "false": False, "1": True, "0": False}


def read_preference_rows(
    addresses: Iterable[str], config: RowsConfig, kind: Kind
) -> list[FileRows]:
    """Read the rows of files, folders, s3://… or hf://…, an entry a file, all of one kind.

    A pair gives two rows with labels where labels are asked for. Raises DataError for bad rows
    where `config.bad_rows` is "fail", with their numbers and the reason of the first.
    """
    mapper = PreferenceMapper(config, kind)
    found = []
    for address in (file for one in addresses for file in data_files(one)):
        bad = BadRows(address, config.bad_rows)
        numbered = list(mapped_rows(address, config, bad, mapper=mapper))
        bad.check()
        rows = [(number, one) for number, row in numbered for one in _of_kind(row, kind)]
        found.append(FileRows([row for _, row in rows], [number for number, _ in rows], bad))
    return found


class PreferenceMapper:
    """Turns rows of files into canonical rows, as `data.columns` and `data.templates` say.

    >>> mapper = PreferenceMapper(RowsConfig(columns={"chosen": "better"}), "pairs")
    >>> mapper({"prompt": "1+1?", "better": "2", "rejected": "3"}, "d.jsonl, row 1")
    {'prompt': [{'role': 'user', 'content': '1+1?'}], 'chosen': '2', 'rejected': '3', 'margin': 0.0}
    """

    def __init__(self, config: RowsConfig, kind: Kind) -> None:
        """Raise ConfigError for a template that is not one."""
        self._mapper, self._kind = RowMapper(config), kind

    def __call__(self, raw: Row, where: str) -> Row:
        """One canonical row; DataError that begins with `where` for a row that has none."""
        row = self._mapper.named(raw, where)
        if self._kind == "steps":
            canonical = steps_row(row, where)
            return canonical | {"prompt": self._mapper.with_system(canonical["prompt"])}
        single = self._kind == "labels" and not {"chosen", "rejected"} <= row.keys()
        canonical = labelled_row(row, where) if single else pair_row(row, where)
        return canonical | {"prompt": self._mapper.with_system(canonical["prompt"])}


def pair_row(row: Row, where: str) -> Row:
    """A pair in canonical form; DataError, which begins with `where`, for one that has none."""
    prompt, (chosen, rejected) = _conversation(row, ("chosen", "rejected"), where)
    if chosen == rejected:
        raise DataError(f"{where}: columns 'chosen' and 'rejected' are the same; remove the row")
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "margin": _margin(row.get("margin"), where),
    }


def labelled_row(row: Row, where: str) -> Row:
    """A completion with its label in canonical form; DataError for one that has none."""
    prompt, (completion,) = _conversation(row, ("completion",), where)
    if "label" not in row:
        raise _missing("label", row, where)
    given = row["label"]
    label = given if isinstance(given, bool | np.bool_) else _LABELS.get(_plain_label(given))
    if label is None:
        raise DataError(f"{where}: column 'label' is {brief(given)}; give true or false")
    return {"prompt": prompt, "completion": completion, "label": bool(label)}


def steps_row(row: Row, where: str) -> Row:
    """A completion in steps with their labels in canonical form; DataError for one that has
    none."""
    prompt = _prompt(row, where)
    if prompt is None:
        raise _missing("prompt", row, where)
    for name in ("completions", "labels"):
        if name not in row:
            raise _missing(name, row, where)
    steps, labels = (_entries(row[name]) for name in ("completions", "labels"))
    if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(
            f"{where}: column 'completions' is {brief(row['completions'])}; give a list of steps, "
            "texts that are not empty"
        )
    found = [_LABELS.get(_plain_label(label)) for label in labels]
    if len(found) != len(steps) or None in found:
        raise DataError(
            f"{where}: column 'labels' is {brief(row['labels'])} for {len(steps)} steps; give true "
            "or false for each"
        )
    return {"prompt": prompt, "completions": steps, "labels": found}


def _entries(cell: object) -> list[object]:
    return list(cell) if isinstance(cell, list | tuple | np.ndarray) else []


def _of_kind(row: Row, kind: Kind) -> list[Row]:
    if kind != "labels" or "label" in row:
        return [row]
    sides = ((row["chosen"], True), (row["rejected"], False))
    return [{"prompt": row["prompt"], "completion": text, "label": good} for text, good in sides]


def _conversation(
    row: Row, names: Sequence[str], where: str
) -> tuple[list[dict[str, str]], list[str]]:
    """The messages before the responses `names`, and the text of each of these."""
    prompt = _prompt(row, where)
    heads, texts = [], []
    for name in names:
        if name not in row:
            raise _missing(name, row, where)
        head, text = _response(row[name], name, where)
        heads.append(_whole_prompt(prompt, head, name, where))
        texts.append(text)
    if heads[0] != heads[-1]:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' answer different conversations; they must differ in "
            "the last message alone"
        )
    return heads[0], texts


def _prompt(row: Row, where: str) -> list[dict[str, str]] | None:
    given = row.get("prompt")
    if is_missing(given):
        return None
    prompt: object = user_message(given) if isinstance(given, str) else given
    if not is_messages(prompt) or not has_words(prompt) or not is_utf8(prompt):
        raise DataError(
            f"{where}: column 'prompt' is {brief(given)}; give a string that is not empty, or "
            'messages [{"role": "user", "content": …}] of which the last is not'
        )
    return [_message(one) for one in prompt]


def _response(cell: object, name: str, where: str) -> tuple[list[dict[str, str]], str]:
    """The messages before a response, which its cell may have, and its text."""
    messages: object = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else cell
    if not is_messages(messages) or not has_words(messages) or not is_utf8(messages):
        raise DataError(
            f"{where}: column {name!r} is {brief(cell)}; give text that is not empty, or messages "
            "that end with the assistant's"
        )
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the last message of column {name!r} is of the role "
            f"{messages[-1]['role']!r}; end it with the assistant's"
        )
    return [_message(one) for one in messages[:-1]], str(messages[-1]["content"])


def _whole_prompt(
    prompt: list[dict[str, str]] | None, head: list[dict[str, str]], name: str, where: str
) -> list[dict[str, str]]:
    """The conversation before a response: the column `prompt`, or what its cell begins with."""
    if prompt is None and not head:
        raise DataError(
            f"{where}: there is no column 'prompt', and no message before the response in "
            f"{name!r}; name the prompt's column in data.columns, e.g. data.columns.prompt=question"
        )
    if prompt is None or not head:
        return prompt or head
    if head[-len(prompt) :] != prompt:
        raise DataError(
            f"{where}: the messages of column {name!r} don't begin with the prompt; remove one of "
            "the two"
        )
    return head


def _message(message: dict[str, str]) -> dict[str, str]:
    return {"role": message["role"], "content": message["content"]}


def _margin(given: Any, where: str) -> float:
    if is_missing(given):
        return 0.0
    number = not isinstance(given, bool) and isinstance(given, int | float | np.number)
    if not number or not math.isfinite(given):
        raise DataError(f"{where}: column 'margin' is {brief(given)}; give a finite number")
    return float(given)


def _plain_label(given: object) -> str:
    if isinstance(given, float | np.floating) and float(given).is_integer():
        given = int(given)
    return str(given).strip().lower()


def _missing(name: str, row: Row, where: str) -> DataError:
    return DataError(
        f"{where}: there is no column {name!r}; name one of {sorted(row)} in data.columns, e.g. "
        f"data.columns.{name}=…"
    )


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """What a policy answered, and what the reward said of it."""

    text: str  # e.g. "<<23+14=37>>37\n#### 37"
    score: float | None  # None, or NaN: the reward failed
    truncated: bool = False  # cut at the length limit: it has no end that could be learned


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The completions of one prompt."""

    prompt: Sequence[Mapping[str, object]]  # messages, e.g. [{"role": "user", "content": "1+1?"}]
    completions: Sequence[ScoredCompletion]
    extra_info: Mapping[str, object] = field(default_factory=dict)  # e.g. {"policy_version": 12}

    @property
    def usable(self) -> list[tuple[str, float]]:
        """Text and score of what can be learned from, in the order of sampling."""
        return [
            (one.text, float(one.score))
            for one in self.completions
            if one.score is not None
            and not math.isnan(one.score)
            and not one.truncated
            and one.text.strip()
        ]


def pairs_from_groups(
    groups: Iterable[ScoredGroup],
    *,
    pairs_per_group: int = 1,
    min_gap: float = 0.0,
    margins: bool = False,
) -> list[Row]:
    """The best and the worst completion of each group as chosen and rejected.

    With `pairs_per_group` also the second best and the second worst, and so on; each text is in one
    pair of a group at most. A pair's scores differ by more than `min_gap`; of equal ones the first
    counts. `margins` makes the difference the pair's `margin`, which the reward model's loss asks
    its scores to exceed; without it that is 0. Both scores are in `extra_info`. Raises DataError
    for a number of pairs below 1 or a negative gap.
    """
    if pairs_per_group < 1:
        raise DataError(f"pairs_per_group={pairs_per_group} must be 1 or more")
    if not min_gap >= 0:
        raise DataError(f"min_gap={min_gap} must be 0 or more")
    rows: list[Row] = []
    for group in groups:
        scores = _distinct(group.usable)
        best = sorted(scores, key=lambda text: -scores[text])  # stable: of equal ones the first
        worst = sorted(scores, key=lambda text: scores[text])
        count = min(pairs_per_group, len(scores) // 2)
        for chosen, rejected in zip(best[:count], worst[:count], strict=True):
            high, low = scores[chosen], scores[rejected]
            if high - low <= min_gap:
                break
            rows.append(
                {
                    "prompt": [dict(message) for message in group.prompt],
                    "chosen": chosen,
                    "rejected": rejected,
                    "margin": high - low if margins else 0.0,
                    "extra_info": {**group.extra_info, "chosen_score": high, "rejected_score": low},
                }
            )
    return rows


def labels_from_groups(
    groups: Iterable[ScoredGroup], *, threshold: float = 0.5, per_group: int = 0
) -> list[Row]:
    """Each completion with a label: good where its score is above `threshold`.

    Of each label at most `per_group` completions of a group (0: all), the first ones; each text
    once. For KTO, which needs no partner: a group that is all good, or all bad, counts as well.
    """
    rows: list[Row] = []
    for group in groups:
        taken = {True: 0, False: 0}
        for text, score in _distinct(group.usable).items():
            label = score > threshold
            taken[label] += 1
            if per_group and taken[label] > per_group:
                continue
            rows.append(
                {
                    "prompt": [dict(message) for message in group.prompt],
                    "completion": text,
                    "label": label,
                    "extra_info": {**group.extra_info, "score": score},
                }
            )
    return rows


def _distinct(scored: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Each text with the score that it got first."""
    found: dict[str, float] = {}
    for text, score in scored:
        found.setdefault(text, score)
    return found
