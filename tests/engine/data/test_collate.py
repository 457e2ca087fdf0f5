"""Padding of prompts and completions, and which rows share a batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import arithmetic_rows

from engine.batch import Batch
from engine.data.collate import (
    collate_completions,
    collate_prompts,
    pad,
    shared_prompt_batches,
    token_budget_batches,
)
from engine.errors import ConfigError, DataError


def test_layout_by_hand() -> None:
    prompts = collate_prompts(arithmetic_rows(2), [[5], [6, 7, 8]])
    batch = collate_completions(
        prompts, [1, 0, 0], [[9], [3, 4], [2, 2]], [[-1.0], [-2, -3], [-4, -5]], pad_token_id=1
    )
    assert batch["input_ids"].tolist() == [[6, 7, 8, 9, 1], [1, 1, 5, 3, 4], [1, 1, 5, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert batch["prompts"].tolist() == [[6, 7, 8], [1, 1, 5], [1, 1, 5]]
    assert batch["responses"].tolist() == [[9, 1], [3, 4], [2, 2]]
    assert batch["response_mask"].tolist() == [[1, 0], [1, 1], [1, 1]]
    assert batch["rollout_log_probs"].tolist() == [[-1, 0], [-2, -3], [-4, -5]]
    assert batch["group_ids"].tolist() == [1, 0, 0]
    assert list(batch.columns["ground_truth"]) == ["2", "0", "0"]
    assert "prompt_ids" not in batch


def test_prompts_without_a_ground_truth() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"style": "model"}}]
    assert list(collate_prompts(rows, [[1]]).columns["ground_truth"]) == [None]


def test_a_truth_comes_from_either_place_and_from_one() -> None:
    row = {"prompt": [], "reward_model": {"ground_truth": "5"}, "ground_truth": float("nan")}
    assert list(collate_prompts([row], [[1]]).columns["ground_truth"]) == ["5"]
    with pytest.raises(DataError, match=r"row 1 of a step: column 'ground_truth' is '6', but"):
        collate_prompts([row, {**row, "ground_truth": "6"}], [[1], [2]])


@pytest.mark.parametrize("name", ["prompts", "input_ids", "completion", "partial_group"])
def test_a_column_with_the_name_of_a_field_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"column '{name}' has the name of a field that the engine"):
        collate_prompts([{"prompt": [], name: 1}], [[1]])


def test_tokens_in_a_column_don_t_replace_the_prompt() -> None:
    assert collate_prompts([{"prompt_ids": [1, 2]}], [[1, 2]]).columns["prompt_ids"][0] == [1, 2]
    with pytest.raises(DataError, match="'prompt_ids' that are not the tokens of their prompts"):
        collate_prompts([{"prompt_ids": [7]}], [[1, 2]])


def test_rows_with_other_columns_are_refused() -> None:
    with pytest.raises(DataError, match=r"differ in their columns: \['level'\] are in some only"):
        collate_prompts([{"prompt": []}, {"prompt": [], "level": 1}], [[1], [2]])


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        collate_prompts([], [])
    prompts = Batch({"group_ids": torch.arange(1)}, {"prompt_ids": [[1]]})
    with pytest.raises(DataError, match="no completions"):
        collate_completions(prompts, [], [], [], pad_token_id=0)


def test_pad_takes_its_dtype_from_the_filling() -> None:
    assert pad([[1], [2, 3]], 0, side="left").dtype == torch.long
    assert pad([[1], [2, 3]], 0.0, side="right").dtype == torch.float32
    assert pad([[], []], 0, side="right").shape == (2, 1)


LENGTHS = st.lists(st.integers(0, 60), max_size=80)


@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_budget_holds_and_every_row_comes_once(lengths: list[int], budget: int) -> None:
    batches = token_budget_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        longest = max(lengths[i] for i in batch)
        assert len(batch) * longest <= budget or len(batch) == 1


@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_no_batch_could_take_the_first_row_of_the_next(lengths: list[int], budget: int) -> None:
    batches = token_budget_batches(lengths, budget)
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * lengths[following[0]] > budget


def test_a_row_above_the_budget_is_alone() -> None:
    assert token_budget_batches([5, 100, 5], 10) == [[0, 2], [1]]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        token_budget_batches([1], 0)


@st.composite
def groups_of_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Groups, shuffled over the rows, with rows' lengths and prompts' lengths."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    order = draw(st.permutations(range(sum(sizes))))
    groups, lengths, prompts = [], [0] * len(order), [0] * len(order)
    for size in sizes:
        group, order, prompt = sorted(order[:size]), order[size:], draw(st.integers(1, 20))
        groups.append(group)
        for row in group:
            prompts[row], lengths[row] = prompt, prompt + draw(st.integers(0, 30))
    return groups, lengths, prompts


@given(rows=groups_of_rows(), budget=st.integers(1, 150))
def test_shared_prompts_count_once_a_batch(
    rows: tuple[list[list[int]], list[int], list[int]], budget: int
) -> None:
    groups, lengths, prompts = rows
    batches = shared_prompt_batches(groups, lengths, prompts, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        tokens = sum(lengths[i] - prompts[i] for i in batch)
        tokens += sum(prompts[group[0]] for group in groups if set(group) & set(batch))
        assert tokens <= budget or len(batch) == 1
    for group in groups:
        whole = prompts[group[0]] + sum(lengths[i] - prompts[i] for i in group)
        homes = [batch for batch in batches if set(group) & set(batch)]
        assert len(homes) == 1 or whole > budget, "a group that fits stays together"
