"""Test prompts in the training data: verbatim, rewritten, and only alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataError
from engine.promotion.gate import share_trained_on, trained_on

LONG = "Tom has three apples and he gives two of them to his friend Ann on Monday at noon"
TEXTS = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8).map(" ".join))


@pytest.mark.parametrize(
    ("training", "found"),
    [
        (LONG.upper().replace(" ", "  ") + "!", True),  # case, spacing and punctuation apart
        (f"Question: {LONG}. How many are left?", True),  # within a longer text
        (LONG.replace("noon", "dawn"), True),  # one word at the end: 13 of 14 runs of 5 stay
        (LONG.replace("them", "those"), False),  # in the middle: 5 of 14 runs are gone
        ("Tom has three apples and", False),
        ("", False),
    ],
)
def test_what_counts_as_known(training: str, found: bool) -> None:
    assert trained_on([LONG], [training], ngram=5, overlap=0.8) == [found]


def test_a_short_text_counts_by_its_whole_alone() -> None:
    found = trained_on(["2 + 3?", "4 + 5?"], ["What is 2 + 3?", "4 5"], ngram=5, overlap=0.5)
    assert found == [False, True]


def test_runs_of_several_training_texts_add_up() -> None:
    first, second = LONG[:45], LONG[30:]
    assert trained_on([LONG], [first], 3, 0.8) == [False]
    assert trained_on([LONG], [first, second], 3, 0.8) == [True]


def test_the_share_and_nothing_to_look_for() -> None:
    assert share_trained_on(["a b", "c d"], ["a b"], 2, 1.0) == 0.5
    with pytest.raises(DataError, match="no test prompts"):
        share_trained_on([], ["a"], 2, 1.0)


@given(test=TEXTS, training=TEXTS, ngram=st.integers(2, 4))
def test_more_training_data_never_hides_a_prompt(
    test: list[str], training: list[str], ngram: int
) -> None:
    before = trained_on(test, training, ngram, 0.8)
    after = trained_on(test, training + test[:1], ngram, 0.8)
    assert all(a <= b for a, b in zip(before, after, strict=True))
    assert trained_on(test, test, ngram, 1.0) == [True] * len(test)
