from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.bucketing import token_budget_batches
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
