"""Which completions become pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.preferences.ranking import ScoredText, ranked_pairs


def texts(*scores: float) -> list[ScoredText]:
    return [ScoredText(str(i), score) for i, score in enumerate(scores)]


def test_the_best_with_the_worst_then_the_next() -> None:
    pairs = ranked_pairs(texts(0.5, 1.0, 0.0, 0.9), margin=0.1, most=3)
    assert [(a.text, b.text) for a, b in pairs] == [("1", "2"), ("3", "0")]


def test_equal_scores_go_by_the_order_of_sampling() -> None:
    ((chosen, rejected),) = ranked_pairs(texts(0.0, 1.0, 1.0, 0.0), margin=1.0)
    assert (chosen.text, rejected.text) == ("1", "0")


def test_what_was_cut_off_is_neither_chosen_nor_rejected() -> None:
    group = [ScoredText("long", 1.0, usable=False), *texts(0.2, 0.8)]
    ((chosen, rejected),) = ranked_pairs(group, margin=0.5)
    assert (chosen.score, rejected.score) == (0.8, 0.2)
    assert ranked_pairs(group[:2], margin=0.5) == []


def test_two_of_one_text_are_no_pair() -> None:
    assert ranked_pairs([ScoredText("5", 0.0), ScoredText("5", 1.0)], margin=0.5) == []


@given(st.lists(st.floats(-1, 1), max_size=9), st.floats(0.01, 1), st.integers(1, 5))
def test_no_text_is_in_two_pairs_and_all_differ_by_the_margin(
    scores: list[float], margin: float, most: int
) -> None:
    pairs = ranked_pairs(texts(*scores), margin, most)
    used = [one.text for pair in pairs for one in pair]
    assert len(pairs) <= most
    assert len(used) == len(set(used))
    assert all(good.score - bad.score >= margin for good, bad in pairs)
