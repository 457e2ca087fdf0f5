"""The data contract: which columns each kind of table has and what its cells must hold.

`check` validates a table with pandera, `check_disjoint` that splits share no prompts; both raise a
sentence with split, column, problem and rows (from 0).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import pandas as pd
import pandera.pandas as pandera
import pyarrow as pa
from pandera.errors import SchemaErrors

from engine.data import rows
from engine.data.cells import SHOWN, as_text, brief, is_missing, row_numbers
from engine.data.rows import EXTRA, RULE, TRUTH, prompt_text
from engine.errors import DataError


def uniform_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """RL rows whose cells have one type a column, and one a field of dictionaries.

    Ground truths become text, and so does a field that is not of one type in all rows. Rows without
    `extra_info` get an empty one; where it is empty in all rows, the column is left out.
    """
    extras = frame[EXTRA].tolist() if EXTRA in frame else [None] * len(frame)
    extras = [{} if is_missing(cell) else cell for cell in extras]
    columns: dict[str, list[object]] = {EXTRA: extras}
    if RULE in frame:
        truths = map(truth_of, frame[RULE])
        columns[RULE] = [
            cell if truth is None else {**cell, TRUTH: truth}
            for cell, truth in zip(frame[RULE], truths, strict=True)
        ]
    for name, cells in columns.items():
        # Of dtype object: pandas must keep the dictionaries as they are.
        column = pd.Series(_with_one_type(cells), index=frame.index, dtype=object)
        frame = frame.assign(**{name: column})
    all_empty = all(isinstance(cell, dict) and not cell for cell in extras)
    return frame.drop(columns=EXTRA) if all_empty else frame


def truth_of(rule: object) -> str | None:
    """The ground truth in a cell of `reward_model`, as text; None where it holds none."""
    truth = rule.get(TRUTH) if isinstance(rule, dict) else None
    return None if is_missing(truth) else as_text(truth)


def _with_one_type(cells: Sequence[object]) -> list[object]:
    """Make the fields of dictionaries that are not of one type in all cells text."""
    records = [cell for cell in cells if isinstance(cell, dict)]
    if len(records) < len(cells):
        return list(cells)
    names = dict.fromkeys(name for record in records for name in record)
    mixed = {name for name in names if not _is_one_type([r.get(name) for r in records])}
    return [
        {
            name: as_text(value) if name in mixed and value is not None else value
            for name, value in record.items()
        }
        for record in records
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


def _column(*checks: pandera.Check, required: bool = True) -> pandera.Column:
    # nullable: the rules decide whether a missing cell is allowed, with their own message.
    return pandera.Column(checks=list(checks), nullable=True, required=required)


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return math.isfinite(value)


def _is_amount(value: object) -> TypeGuard[float]:
    return _is_number(value) and value >= 0


_TEXT = _rule(lambda v: isinstance(v, str), "must be text")
_FILLED = _rule(rows.has_words, "must not be empty")
_MESSAGES = _rule(rows.is_messages, 'must be chat messages [{"role": "user", "content": text}]')
_DICT = _rule(lambda v: isinstance(v, dict), "must be a dictionary")
_TRUTH = _rule(
    lambda v: not isinstance(v, dict) or bool((truth_of(v) or "").strip()),
    "must hold a ground_truth",
)
_FLAG = _rule(lambda v: isinstance(v, bool | np.bool_), "must be true or false")
_COUNT = _rule(
    lambda v: _is_amount(v) and isinstance(v, int | np.integer), "must be a whole number, 0 or more"
)
_NUMBER = _rule(_is_number, "must be a finite number")
_AMOUNT = _rule(_is_amount, "must be a finite number, 0 or more")
_SHARE = _rule(lambda v: not _is_amount(v) or v <= 1, "must be at most 1")
_ANSWER = _rule(lambda v: isinstance(v, str) or is_missing(v), "must be text or missing")
_MODEL = _rule(
    lambda v: v in ("warm_start", "rl", "champion"), "must be warm_start, rl or champion"
)
_LIST = _rule(lambda v: isinstance(v, list | np.ndarray), "must be a list")

_PROMPT = _column(_MESSAGES, _FILLED)
_PROSE = _column(_TEXT, _FILLED)
_EXTRA = _column(_DICT, required=False)

RL_PROMPTS = pandera.DataFrameSchema(
    {
        "data_source": _PROSE,
        "prompt": _PROMPT,
        "ability": _column(_TEXT),
        "reward_model": _column(_DICT, _TRUTH),
        "extra_info": _EXTRA,
    }
)
SFT_PAIRS = pandera.DataFrameSchema({"prompt": _PROMPT, "response": _PROSE, "extra_info": _EXTRA})
PREFERENCE_PAIRS = pandera.DataFrameSchema(
    {
        "prompt": _PROMPT,
        "chosen": _PROSE,
        "rejected": _PROSE,
        "margin": _column(_NUMBER, required=False),
        "extra_info": _EXTRA,
    },
    checks=pandera.Check(
        lambda frame: frame["chosen"] != frame["rejected"],
        error="columns 'chosen' and 'rejected' must differ",
    ),
)
KTO_ROWS = pandera.DataFrameSchema(
    {"prompt": _PROMPT, "completion": _PROSE, "label": _column(_FLAG), "extra_info": _EXTRA}
)

_BY_TYPE: dict[object, pandera.Check] = {str: _TEXT, int: _COUNT, bool: _FLAG, float: _NUMBER}
_BY_TYPE[list[str]] = _LIST
_EVALUATION_RULES = {  # of columns of which more is known than their type
    **dict.fromkeys(("dataset", "data_source", "prompt"), (_TEXT, _FILLED)),
    "model": (_MODEL,),
    **dict.fromkeys(("greedy_answer", "majority_answer"), (_ANSWER,)),
    **dict.fromkeys(("response_length", "sample_turns", "sample_malformed"), (_AMOUNT,)),
    **dict.fromkeys(("truncated", "format_rate", "sample_called"), (_AMOUNT, _SHARE)),
}
EVALUATION_ROWS = pandera.DataFrameSchema(
    {
        name: _column(
            *_EVALUATION_RULES.get(name, (_BY_TYPE[kind],)), required=name in rows.EVALUATION_ROWS
        )
        for name, kind in (rows.EVALUATION_ROWS | rows.EPISODE_COLUMNS).items()
    }
)


def check(frame: pd.DataFrame, schema: pandera.DataFrameSchema, name: str) -> None:
    """Raise DataError unless the table called `name` (a split, e.g. "train") keeps the contract."""
    if len(frame) == 0:
        raise DataError(f"{name} has no rows; give a source with at least one for each split")
    required = [column for column, spec in schema.columns.items() if spec.required]
    faults = [f"has no column {column!r}" for column in required if column not in frame]
    faults += [f"has an unknown column {str(c)!r}" for c in frame if c not in schema.columns]
    if faults:
        raise DataError(
            f"{name} {' and '.join(faults)}; its columns must be {list(schema.columns)}"
        )
    frame = frame.reset_index(drop=True)  # so that an index label is a row number
    for column in frame:  # pandera can't show what UTF-8 can't hold
        if broken := [row for row, cell in enumerate(frame[column]) if not rows.is_utf8(cell)]:
            whole = "must hold whole characters, not half of a surrogate pair"
            raise _breach(frame, name, column, whole, broken)
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        first = errors.schema_errors[0]
        rule = first.check.error if isinstance(first.check, pandera.Check) else str(first)
        broken = sorted({int(row) for row in first.failure_cases["index"]})
        raise _breach(frame, name, first.schema.name, rule, broken) from None


def _breach(
    frame: pd.DataFrame, name: str, column: Hashable, rule: str | None, broken: Sequence[int]
) -> DataError:
    numbers = f"{len(broken)} of {len(frame)} rows ({row_numbers(broken)})"
    if column not in frame.columns:  # a rule about the whole table
        return DataError(f"{name}: {rule}, but not so in {numbers}; correct or remove them")
    value = brief(frame[column].iloc[broken[0]])
    return DataError(
        f"{name}: column {column!r} {rule}, but not so in {numbers}: row {broken[0]} has {value}; "
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
        there = prompts[other]
        shared = [(row, there[text]) for text, row in prompts[held_out].items() if text in there]
        if shared:
            shown = ", ".join(f"{a} and {b}" for a, b in shared[:SHOWN])
            more = ", …" if len(shared) > SHOWN else ""
            prompt = brief(prompt_text(splits[held_out]["prompt"].iloc[shared[0][0]]))
            raise DataError(
                f"{len(shared)} prompts are in both {held_out} and {other} (rows {shown}{more}; "
                f"the first is {prompt}); remove them from one of the two"
            )


def _rows_by_prompt(frame: pd.DataFrame) -> dict[str, int]:
    """The first row of each prompt's normalised text, in the order of rows."""
    first: dict[str, int] = {}
    for row, prompt in enumerate(frame["prompt"]):
        first.setdefault(rows.normalise(prompt_text(prompt)), row)
    return first
