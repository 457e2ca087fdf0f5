"""The data contract: which columns each kind of table has and what its cells must hold.

`check` validates a table with pandera, `check_disjoint` that splits share no prompts; both raise a
sentence with split, column, problem and rows (from 0). `uniform_columns` gives RL rows of several
writers one type a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import pandas as pd
import pandera.pandas as pandera
import pyarrow as pa
from pandera.errors import SchemaError, SchemaErrors

from engine.data import rows
from engine.data.rows import (
    EXTRA,
    RULE,
    SHOWN,
    TRUTH,
    as_text,
    brief,
    has_words,
    is_messages,
    is_missing,
    is_utf8,
    normalise,
    prompt_text,
    row_numbers,
)
from engine.errors import DataError


def uniform_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return RL rows whose cells have one type a column, and one a field of dictionaries.

    Rows without `extra_info` get an empty one, and ground truths become text. A field that is not
    of one type in all rows, such as an `index` that is a number here and a name there, becomes text
    too. Where `extra_info` is empty in all rows, the column is left out.
    """
    extras = frame[EXTRA].tolist() if EXTRA in frame else [None] * len(frame)
    columns: dict[str, list[object]] = {
        EXTRA: [{} if is_missing(cell) else cell for cell in extras]
    }
    if RULE in frame:
        truths = [truth_of(cell) for cell in frame[RULE]]
        columns[RULE] = [
            cell if truth is None else {**cell, TRUTH: truth}
            for cell, truth in zip(frame[RULE], truths, strict=True)
        ]
    for name, cells in columns.items():
        # Of dtype object: pandas must keep the dictionaries as they are.
        column = pd.Series(_with_one_type(cells), index=frame.index, dtype=object)
        frame = frame.assign(**{name: column})
    all_empty = all(isinstance(cell, dict) and not cell for cell in columns[EXTRA])
    return frame.drop(columns=EXTRA) if all_empty else frame


def truth_of(rule: object) -> str | None:
    """The ground truth in a cell of `reward_model`, as text; None where it holds none."""
    truth = rule.get(TRUTH) if isinstance(rule, dict) else None
    return None if is_missing(truth) else as_text(truth)


def _with_one_type(cells: Sequence[object]) -> list[object]:
    """Make the fields of dictionaries that are not of one type in all cells text."""
    rows = [cell for cell in cells if isinstance(cell, dict)]
    if len(rows) < len(cells):
        return list(cells)
    names = dict.fromkeys(name for row in rows for name in row)
    mixed = {name for name in names if not _is_one_type([row.get(name) for row in rows])}
    return [
        {
            name: as_text(value) if name in mixed and value is not None else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _is_one_type(values: list[object]) -> bool:
    try:
        kind = pa.array(values).type
    except (pa.ArrowException, OverflowError):
        return False
    return not (pa.types.is_struct(kind) and kind.num_fields == 0)  # Parquet has no such column


def _rule(holds: Callable[[object], bool], error: str) -> pandera.Check:
    """Check every cell, missing ones too, and say what it must be."""
    return pandera.Check(holds, element_wise=True, ignore_na=False, error=error)


def _column(*rules: pandera.Check, required: bool = True) -> pandera.Column:
    # nullable: the rules decide whether a missing cell is allowed, with their own message.
    return pandera.Column(checks=list(rules), nullable=True, required=required)


def _has_ground_truth(value: object) -> bool:
    truth = value.get("ground_truth") if isinstance(value, dict) else ""
    return not is_missing(truth) and (not isinstance(value, dict) or bool(str(truth).strip()))


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return math.isfinite(float(value))


def _is_count(value: object) -> bool:
    return _is_amount(value) and isinstance(value, int | np.integer)


def _is_amount(value: object) -> TypeGuard[float]:
    return _is_number(value) and float(value) >= 0


_TEXT = _rule(lambda v: isinstance(v, str), "must be text")
_FILLED = _rule(has_words, "must not be empty")
_MESSAGES = _rule(is_messages, 'must be chat messages [{"role": "user", "content": text}]')
_DICT = _rule(lambda v: isinstance(v, dict), "must be a dictionary")
_TRUTH = _rule(_has_ground_truth, "must hold a ground_truth")
_FLAG = _rule(lambda v: isinstance(v, bool | np.bool_), "must be true or false")
_COUNT = _rule(_is_count, "must be a whole number, 0 or more")
_NUMBER = _rule(_is_number, "must be a finite number")
_AMOUNT = _rule(_is_amount, "must be a finite number, 0 or more")
_SHARE = _rule(lambda v: not _is_amount(v) or float(v) <= 1, "must be at most 1")
_ANSWER = _rule(lambda v: isinstance(v, str) or is_missing(v), "must be text or missing")

_PROMPT = _column(_MESSAGES, _FILLED)
_PROSE = _column(_TEXT, _FILLED)
_EXTRA = _column(_DICT, required=False)


def _table(columns: Mapping[str, pandera.Column], *rules: pandera.Check) -> pandera.DataFrameSchema:
    return pandera.DataFrameSchema(dict(columns), checks=list(rules), strict=True)


RL_PROMPTS = _table(
    {
        "data_source": _PROSE,
        "prompt": _PROMPT,
        "ability": _column(_TEXT),
        "reward_model": _column(_DICT, _TRUTH),
        "extra_info": _EXTRA,
    }
)

SFT_PAIRS = _table({"prompt": _PROMPT, "response": _PROSE, "extra_info": _EXTRA})

PREFERENCE_PAIRS = _table(
    {
        "prompt": _PROMPT,
        "chosen": _PROSE,
        "rejected": _PROSE,
        "margin": _column(_NUMBER, required=False),
        "extra_info": _EXTRA,
    },
    pandera.Check(
        lambda frame: frame["chosen"] != frame["rejected"],
        error="columns 'chosen' and 'rejected' must differ",
    ),
)

KTO_ROWS = _table(
    {"prompt": _PROMPT, "completion": _PROSE, "label": _column(_FLAG), "extra_info": _EXTRA}
)

_BY_TYPE: dict[object, pandera.Check] = {str: _TEXT, int: _COUNT, bool: _FLAG, float: _NUMBER}
_BY_TYPE[list[str]] = _rule(lambda v: isinstance(v, list | np.ndarray), "must be a list")
_MODEL = _rule(
    lambda v: v in ("warm_start", "rl", "champion"), "must be warm_start, rl or champion"
)
_EPISODES = {  # of episodes alone
    "greedy_turns": (_COUNT,),
    "greedy_return": (_NUMBER,),
    "greedy_calls": (_COUNT,),
    "greedy_malformed": (_COUNT,),
    "greedy_end": (_TEXT,),
    "sample_turns": (_AMOUNT,),
    "sample_return": (_NUMBER,),
    "sample_called": (_AMOUNT, _SHARE),
    "sample_malformed": (_AMOUNT,),
}

EVALUATION_ROWS = _table(
    {
        **{name: _column(_BY_TYPE[kind]) for name, kind in rows.EVALUATION_ROWS.items()},
        **dict.fromkeys(("dataset", "data_source", "prompt"), _PROSE),
        "model": _column(_MODEL),
        **{name: _column(_ANSWER) for name in ("greedy_answer", "majority_answer")},
        "response_length": _column(_AMOUNT),
        **{name: _column(_AMOUNT, _SHARE) for name in ("truncated", "format_rate")},
        **{name: _column(*rules, required=False) for name, rules in _EPISODES.items()},
    }
)


def check(frame: pd.DataFrame, schema: pandera.DataFrameSchema, name: str) -> None:
    """Raise DataError unless the table called `name` (a split, e.g. "train") keeps the contract."""
    if len(frame) == 0:
        raise DataError(f"{name} has no rows; give a source with at least one for each split")
    frame = frame.reset_index(drop=True)  # so that an index label is a row number
    for column in frame:  # pandera can't show what UTF-8 can't hold
        if rows := [row for row, cell in enumerate(frame[column]) if not is_utf8(cell)]:
            rule = "must hold whole characters, not half of a surrogate pair"
            raise DataError(_cells(frame, name, column, rule, rows))
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        raise DataError(_sentence(errors.schema_errors, frame, schema, name)) from None


def _sentence(
    errors: Sequence[SchemaError], frame: pd.DataFrame, schema: pandera.DataFrameSchema, name: str
) -> str:
    """Describe the first problem: wrong columns before wrong cells."""
    required = [column for column, spec in schema.columns.items() if spec.required]
    parts = [f"has no column {column!r}" for column in required if column not in frame.columns]
    unknown = [str(column) for column in frame.columns if column not in schema.columns]
    parts += [f"has an unknown column {column!r}" for column in unknown]
    if parts:
        return f"{name} {' and '.join(parts)}; its columns must be {list(schema.columns)}"
    first = errors[0]
    rule = first.check.error if isinstance(first.check, pandera.Check) else str(first)
    rows = sorted({int(row) for row in first.failure_cases["index"]})
    return _cells(frame, name, first.schema.name, rule, rows)


def _cells(
    frame: pd.DataFrame, name: str, column: Hashable, rule: str | None, rows: Sequence[int]
) -> str:
    where = f"{len(rows)} of {len(frame)} rows ({row_numbers(rows)})"
    if column not in frame.columns:  # a rule about the whole table
        return f"{name}: {rule}, but not so in {where}; correct or remove them"
    value = brief(frame[column].iloc[rows[0]])
    return (
        f"{name}: column {column!r} {rule}, but not so in {where}: row {rows[0]} has {value}; "
        "correct or remove them"
    )


def check_disjoint(splits: Mapping[str, pd.DataFrame]) -> None:
    """Raise DataError where a prompt of a held-out split is also in one that it must not be in.

    The test split shares no prompt with any other; a validation split shares none with a training
    split. SFT and RL may train on the same prompts, and validate on the same. Prompts are compared
    without case and spacing.
    """
    prompts = {name: _rows_by_prompt(frame) for name, frame in splits.items()}
    pairs = [("test", other) for other in splits if "test" in splits and other != "test"]
    held_out_splits = [name for name in splits if name.endswith("validation")]
    pairs += [(a, b) for a in held_out_splits for b in splits if b.endswith("train")]
    for held_out, other in pairs:
        shared = sorted(
            (row, prompts[other][text])
            for text, row in prompts[held_out].items()
            if text in prompts[other]
        )
        if shared:
            shown = ", ".join(f"{a} and {b}" for a, b in shared[:SHOWN])
            more = ", …" if len(shared) > SHOWN else ""
            prompt = brief(prompt_text(splits[held_out]["prompt"].iloc[shared[0][0]]))
            raise DataError(
                f"{len(shared)} prompts are in both {held_out} and {other} (rows {shown}{more}; "
                f"the first is {prompt}); remove them from one of the two"
            )


def _rows_by_prompt(frame: pd.DataFrame) -> dict[str, int]:
    """Return the first row of each prompt's normalised text."""
    first: dict[str, int] = {}
    for row, prompt in enumerate(frame["prompt"]):
        first.setdefault(normalise(prompt_text(prompt)), row)
    return first
