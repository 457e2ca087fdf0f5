from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.collate import shared_prompt_batches, token_budget_batches
from engine.errors import ConfigError

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
