"""RL rows of several writers with one type a column, so that one Parquet file can hold them.

`engine.data.contract` checks what rows must hold; cells that break it pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pyarrow as pa

from engine.data.rows import EXTRA, RULE, TRUTH, as_text, is_missing


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
        columns[RULE] = [_with_text(cell) for cell in frame[RULE]]
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


def _with_text(rule: object) -> object:
    truth = truth_of(rule)
    return {**rule, TRUTH: truth} if isinstance(rule, dict) and truth is not None else rule


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
