"""Batch: rows keep together through every operation, and the field table is enforced."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import completions_batch, random_completions

from engine.batch import FIELDS, Batch
from engine.errors import DataError


def numbered(rows: int) -> Batch:
    """Each field of row i tells that it is row i."""
    index = torch.arange(rows)
    return Batch(
        {"group_ids": index, "response_mask": index[:, None].float().expand(rows, 3).clone()},
        {"tag": [[i] * (i % 3) + [i] for i in range(rows)]},
    )


def row_numbers(batch: Batch) -> list[int]:
    """The rows' numbers, after checking that all fields agree on them."""
    numbers: list[int] = batch["group_ids"].tolist()
    assert batch["response_mask"][:, 2].tolist() == [float(n) for n in numbers]
    assert [tag[-1] for tag in batch.columns["tag"]] == numbers
    return numbers


@given(rows=st.integers(1, 40), data=st.data())
def test_split_and_concat_are_inverse(rows: int, data: st.DataObject) -> None:
    parts = numbered(rows).split(data.draw(st.integers(1, rows)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert row_numbers(Batch.concat(parts)) == list(range(rows))
    assert [n for part in parts for n in row_numbers(part)] == list(range(rows))


@pytest.mark.parametrize("parts", [0, 4])
def test_split_refuses_empty_parts(parts: int) -> None:
    with pytest.raises(DataError, match=f"3 rows into {parts} parts"):
        numbered(3).split(parts)


@given(rows=st.integers(1, 30), data=st.data())
def test_rows_by_index_mask_and_slice(rows: int, data: st.DataObject) -> None:
    batch = numbered(rows)
    index = data.draw(st.lists(st.integers(0, rows - 1), max_size=10))
    assert row_numbers(batch.rows(index)) == index
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    assert row_numbers(batch.rows(mask)) == mask.nonzero()[:, 0].tolist()
    assert row_numbers(batch.rows(slice(1, None, 2))) == list(range(1, rows, 2))


def test_union_takes_the_right_side() -> None:
    left = Batch({"x": torch.zeros(2), "y": torch.ones(2)}, {"a": ["1", "2"]})
    both = left | Batch({"x": torch.full((2,), 5.0)}, {"a": ["3", "4"], "b": [None, {}]})
    assert both["x"].tolist() == [5.0, 5.0]
    assert both["y"].tolist() == [1.0, 1.0]
    assert list(both.columns["a"]) == ["3", "4"]
    assert "b" in both
    assert "b" not in left
    assert left["x"].tolist() == [0.0, 0.0]
    assert (left | {}) is left
    assert (left | {"z": torch.zeros(2, 3)})["z"].shape == (2, 3)


def test_union_refuses_other_rows() -> None:
    with pytest.raises(DataError, match="2 and 3 rows"):
        numbered(2) | numbered(3)


def test_concat_widens_ranks_that_padded_less() -> None:
    prompts, responses = random_completions(12, seed=3)
    whole = completions_batch(prompts, responses)
    parts = [completions_batch(prompts[a:b], responses[a:b]) for a, b in ((0, 2), (2, 3), (3, 12))]
    assert len({p["input_ids"].shape[1] for p in parts}) > 1, "the parts must differ in width"
    joined = Batch.concat(parts)
    for name in set(FIELDS) & set(whole.names) - {"group_ids"}:
        assert torch.equal(joined[name], whole[name]), name


def test_concat_of_only_some_fields_and_of_none() -> None:
    with pytest.raises(DataError, match="nothing"):
        Batch.concat([])
    with pytest.raises(DataError, match=r"only one of them has \['y'\]"):
        Batch.concat([Batch({"x": torch.zeros(1)}), Batch({"x": torch.zeros(1)}, {"y": [0]})])
    with pytest.raises(DataError, match="can't stack 'x'"):
        Batch.concat([Batch({"x": torch.zeros(1, 2)}), Batch({"x": torch.zeros(1, 3)})])
    wide, narrow = torch.ones(1, 3), torch.ones(2, 1)
    joined = Batch.concat([Batch({"values": wide}), Batch({"values": narrow})])
    assert joined["values"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"input_ids": torch.zeros(2, 3)},
            r"'input_ids' must be torch.int64 .*\[B P\+R\].*float32",
        ),
        ({"values": torch.zeros(2)}, r"'values' must be torch.float32 of shape \[B R\].*\[2\]"),
        (
            {"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)},
            "'returns' has 4|'values' has",
        ),
        (
            {
                "input_ids": torch.zeros(2, 6, dtype=torch.long),
                "prompts": torch.zeros(2, 2, dtype=torch.long),
                "responses": torch.zeros(2, 3, dtype=torch.long),
            },
            "don't add up",
        ),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, "rows differ"),
        ({}, "at least one"),
    ],
)
def test_field_table_is_enforced(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batch(tensors)


def test_missing_field_lists_what_is_there() -> None:
    with pytest.raises(DataError, match=r"no tensor 'values'; it has group_ids, response_mask"):
        numbered(2)["values"]
    with pytest.raises(DataError, match="no tensor 'values'"):
        numbered(2).select(["values"])


def test_select_keeps_tensors_and_columns_asked_for() -> None:
    chosen = numbered(4).select(["tag", "group_ids"])
    assert chosen.names == ("group_ids",)
    assert list(chosen.columns) == ["tag"]
    assert len(chosen) == 4


def test_survives_pickling_and_says_what_it_holds() -> None:
    batch = pickle.loads(pickle.dumps(numbered(5)))
    assert row_numbers(batch) == list(range(5))
    assert repr(batch) == "Batch(5 rows: group_ids[5], response_mask[5, 3]; columns ['tag'])"
