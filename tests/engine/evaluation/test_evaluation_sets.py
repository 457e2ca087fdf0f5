"""Two models on several evaluation sets, each compared by itself."""

import pandas as pd
import pytest

from engine.errors import DataError, LineageError
from engine.evaluation.summary import Statistics, compare_sets, read_sets, rows_of_set, write_sets


@pytest.fixture
def tables(before, after):
    """Problems 0 to 2 are of `test`, the others of `hard`."""
    names = ["test"] * 3 + ["hard"] * 3
    return before.assign(dataset=names), after.assign(dataset=names)


def compare(tables, known):
    return compare_sets(*tables, known, Statistics(2, 0.95, 200, 0))


def test_each_set_has_its_own_numbers(tables, tmp_path):
    sets = compare(tables, {"test": 1, "hard": 0})
    test, hard = sets
    assert [(one.name, one.comparison.problems) for one in sets] == [("test", 3), ("hard", 3)]
    assert test.comparison.after.pass_at_1.mean == 1.0
    assert hard.comparison.gain.mean == pytest.approx(0.0)
    assert test.comparison.before.mean_at_k.mean == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert test.comparison.prompt_digest != hard.comparison.prompt_digest
    (line,) = test.lines()
    assert line.startswith("test: pass@1 33.3% → 100.0% (+66.7 [")
    assert line.endswith("3 problems; 1 of 3 prompts known from training (33.3%)")
    write_sets(tmp_path, sets)
    assert read_sets(tmp_path) == sets


def test_a_set_of_several_parts_has_a_line_each_and_none_for_all_of_it(before, after):
    (one,) = compare((before, after), {"test": 0})
    assert [line.split(":")[1] for line in one.lines()[1:]] == [
        " arithmetic, easy", " arithmetic, hard",
    ]  # fmt: skip


def test_a_set_that_is_not_there_is_named(tables, tmp_path):
    with pytest.raises(DataError, match="no set 'aime', but test, hard; name one of them"):
        rows_of_set(tables[0], "aime")
    one = tuple(pd.concat([table[:1], table[3:]]) for table in tables)
    with pytest.raises(DataError, match=r"evaluation set test: .*at least 2 problems"):
        compare(one, {"test": 0, "hard": 0})
    with pytest.raises(LineageError, match=r"sets\.json can't be read .*evaluate the models again"):
        read_sets(tmp_path)
