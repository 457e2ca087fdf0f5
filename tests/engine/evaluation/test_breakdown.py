"""Scores by source and level, against counts by hand."""

import pandas as pd
import pytest

from engine.errors import DataError
from engine.evaluation.summary import breakdown


def parts(before, after, k=2):
    return breakdown(before, after, k, 0.95, 200, 0)


def means(part, metric):
    return tuple(getattr(model, metric).mean for model in (part.before, part.after))


def test_each_source_and_each_of_its_levels(before, after):
    whole, easy, hard = parts(before, after)
    assert [(p.source, p.level, p.problems) for p in (whole, easy, hard)] == [
        ("arithmetic", "", 6), ("arithmetic", "easy", 3), ("arithmetic", "hard", 3),
    ]  # fmt: skip
    assert means(whole, "pass_at_1") == pytest.approx((2 / 6, 4 / 6))
    assert whole.gain.mean == pytest.approx(2 / 6)
    assert means(easy, "pass_at_1") == pytest.approx((1 / 3, 1))
    assert means(hard, "pass_at_1") == pytest.approx((1 / 3, 1 / 3))
    assert easy.before.mean_at_k.mean == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert easy.before.pass_at_k.mean == pytest.approx((1 - 1 / 6 + 1 / 2 + 0) / 3)
    assert hard.after.majority.mean == pytest.approx(2 / 3)
    rate = easy.before.mean_at_k
    assert 0 <= rate.low < rate.mean < rate.high <= 1
    assert easy.before.greedy_length.mean == pytest.approx(6)
    assert easy.line().startswith("arithmetic, easy: pass@1 33.3% → 100.0% (+66.7 [")


def test_sources_stand_apart_and_what_was_not_scored_is_told(before, after):
    for table in (before, after):
        table.loc[5, "data_source"] = "other"
        table.loc[0, "errors"] = 2
    found = parts(before, after)
    assert [p.source for p in found if not p.level] == ["arithmetic", "other"]
    assert found[-1].gain is None, "one problem shows no gain"
    assert found[0].line().endswith("5 problems, 4 not scored")
    with pytest.raises(DataError, match="asked 6 and 5 problems"):
        parts(before, after.head(5))


def test_cut_completions_count(before, after):
    after["greedy_truncated"] = pd.Series([True, False] * 3)
    assert parts(before, after)[0].after.truncated.mean == 0.5
