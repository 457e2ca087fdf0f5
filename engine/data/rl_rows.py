"""RL rows of files in their canonical form: the one that loaders, tasks and rewards get to see.

A canonical row has the columns of the contract and any others of its file, chat messages as
`prompt`, and its ground truth in `reward_model` alone. Parsing files is in
`engine.storage.readers`, whole tables are checked in `contract`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.data.rows import (
    EXTRA,
    RULE,
    TRUTH,
    as_text,
    brief,
    has_words,
    is_messages,
    is_missing,
    is_utf8,
    row_numbers,
    user_message,
)
from engine.errors import DataError
from engine.storage.json_rows import Row


def canonical_rows(rows: Sequence[Row], name: str, *, need_truth: bool = False) -> list[Row]:
    """Return the rows of the file `name` in canonical form, all with the same columns.

    A column that only some rows have is None in the others. Raises DataError that names the file
    and the row (from 1) as `canonical_row` does, and where only some rows have a ground truth, or
    any has none with `need_truth`.
    """
    rows = [canonical_row(row, f"{name}, row {i}") for i, row in enumerate(rows, start=1)]
    missing = [i for i, row in enumerate(rows, start=1) if row[RULE][TRUTH] is None]
    if missing and (need_truth or len(missing) < len(rows)):
        raise missing_truths(name, missing, len(rows), "" if need_truth else " or in none")
    return same_columns(rows)


def missing_truths(
    name: str, missing: Sequence[int], total: int, or_none: str = " or in none"
) -> DataError:
    """The error that says which rows of `total` have no ground truth."""
    return DataError(
        f"{name}: {len(missing)} of {total} rows have no ground truth ({row_numbers(missing)}); "
        f"give {RULE}.{TRUTH} in all rows{or_none}"
    )


def same_columns(rows: Sequence[Row]) -> list[Row]:
    """The rows with the columns of all of them; None where a row has none of that name."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return [row | {column: None for column in columns if column not in row} for row in rows]


def canonical_row(row: Row, where: str) -> Row:
    """Return one row in canonical form; DataError where it has none, or more than one.

    `prompt` may be a plain string, which becomes one user message. `ground_truth` may be a column
    of its own. What else is missing of `data_source`, `ability` and `extra_info` is filled in.
    """
    check_names(row, where)
    defaults = {"data_source": "file", "ability": "", EXTRA: {}}
    filled = {
        column: row[column] if not is_missing(row.get(column)) else default
        for column, default in defaults.items()
    }
    for column, value in filled.items():
        if not isinstance(value, type(defaults[column])):
            kind = "a dictionary" if column == EXTRA else "text"
            raise DataError(f"{where}: column {column!r} is {brief(value)}; give {kind}, or none")
    others = {column: value for column, value in row.items() if column != TRUTH}
    return {**others, **filled, "prompt": _prompt(row, where), RULE: reward_model(row, where)}


def check_names(columns: Iterable[str], where: str) -> None:
    """Raise DataError for a column that has the name of one that the engine fills."""
    from engine.batch import COLUMNS, FIELDS  # it loads torch, which a workflow's start does not

    for column in columns:
        if column in FIELDS or column in COLUMNS:
            raise DataError(
                f"{where}: column {column!r} has the name of a field that the engine fills; "
                "rename or remove it"
            )


def reward_model(row: Row, where: str) -> Row:
    """The cell of `reward_model`, with the row's `ground_truth`, or None where it has none.

    Raises DataError for a cell that is no dictionary, and for two ground truths that differ.
    """
    rule, own = row.get(RULE), row.get(TRUTH)
    if is_missing(rule) or rule == {}:
        rule = {"style": "rule"}
    if not isinstance(rule, dict):
        raise DataError(
            f'{where}: column {RULE!r} is {brief(rule)}; give {{"style": "rule", "{TRUTH}": …}}'
        )
    inner = rule.get(TRUTH)
    if is_missing(own) or is_missing(inner):
        truth = inner if is_missing(own) else own
        return {**rule, TRUTH: None if is_missing(truth) else truth}
    if as_text(own) != as_text(inner):
        raise DataError(
            f"{where}: column {TRUTH!r} is {brief(own)}, but {RULE}.{TRUTH} is {brief(inner)}; "
            "keep the right one of them"
        )
    return {**rule, TRUTH: own}


def _prompt(row: Row, where: str) -> list[Row]:
    given = row.get("prompt")
    prompt: object = user_message(given) if isinstance(given, str) else given
    if not is_messages(prompt) or not has_words(prompt) or not is_utf8(prompt):
        raise DataError(
            f"{where}: column 'prompt' is {brief(given)}; give a string that is not empty, or "
            'messages [{"role": "user", "content": …}] of which the last is not'
        )
    return list(prompt)
