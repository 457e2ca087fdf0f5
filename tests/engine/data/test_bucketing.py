from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.bucketing import length_bucketed_epoch, token_budget_batches
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


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), seed=st.integers(0, 5))
def test_an_epoch_has_every_row_once_in_full_batches(
    lengths: list[int], batch_size: int, seed: int
) -> None:
    batches = length_bucketed_epoch(lengths, batch_size, seed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert sum(len(batch) < batch_size for batch in batches) <= 1
    assert all(0 < len(batch) <= batch_size for batch in batches)
    assert batches == length_bucketed_epoch(lengths, batch_size, seed)


def test_batches_are_alike_in_length_and_differ_by_seed() -> None:
    lengths = [(i * 37) % 101 for i in range(2000)]
    epoch = length_bucketed_epoch(lengths, 8, 0)
    padding = sum(max(lengths[i] for i in b) * len(b) - sum(lengths[i] for i in b) for b in epoch)
    assert padding < 0.05 * sum(lengths)
    longest = [max(lengths[i] for i in batch) for batch in epoch]
    assert longest != sorted(longest)
    assert {frozenset(b) for b in epoch} != {
        frozenset(b) for b in length_bucketed_epoch(lengths, 8, 1)
    }


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        token_budget_batches([1], 0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        length_bucketed_epoch([1], 0, 0)
