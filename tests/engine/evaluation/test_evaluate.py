"""Evaluations: rows, sets and their files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from judged_completions import judged
from tiny_engine import arithmetic_rows

from engine.config import EvaluateConfig
from engine.data.rows import EVALUATION_ROWS
from engine.errors import DataError, LineageError
from engine.evaluation.results import build_rows, check_paired, prompt_digest
from engine.evaluation.scoring import evaluate_model
from engine.evaluation.summary import Statistics, compare_sets, read_sets, rows_of_set, write_sets

CONFIG = EvaluateConfig(k=2, samples=3)


def table(folder: Path, seed: int = 0, **options: object) -> pd.DataFrame:
    return evaluate_model(
        folder,
        pd.DataFrame(arithmetic_rows(6)),
        "warm_start",  # type: ignore[arg-type]
        CONFIG,
        max_response_length=8,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.usefixtures("one_thread")
def test_one_row_a_problem_and_the_same_again(tiny_folder: Path) -> None:
    done: list[int] = []
    first = table(tiny_folder, on_progress=done.append)
    assert len(first) == 6
    assert done[-1] == 6 * (1 + 3)
    assert done == sorted(done)
    pd.testing.assert_frame_equal(first, table(tiny_folder))
    other = table(tiny_folder, seed=1)
    greedy = [c for c in first.columns if "greedy" in c or c in ("prompt", "ground_truth")]
    assert greedy
    pd.testing.assert_frame_equal(first[greedy], other[greedy])
    assert not first.equals(other), "another seed must give other samples"


@pytest.mark.usefixtures("one_thread")
def test_an_empty_split_is_refused(tiny_folder: Path) -> None:
    frame = pd.DataFrame(arithmetic_rows(1)).iloc[:0]
    with pytest.raises(DataError, match=r"no problems to evaluate on; check data\.test_size"):
        evaluate_model(tiny_folder, frame, "warm_start", CONFIG, max_response_length=4, seed=0)  # type: ignore[arg-type]


def test_one_row_a_problem_with_its_scores(before):
    assert list(before.columns) == list(EVALUATION_ROWS)
    assert len(before) == 6
    row = before.iloc[1]
    assert (row["index"], row["model"], row["data_source"]) == (1, "warm_start", "arithmetic")
    assert (row["prompt"], row["ground_truth"]) == ("Question 1: what is 14 + 0?", "14")
    assert (row["greedy_completion"], row["greedy_answer"]) == ("so\n#### 0", "0")
    assert not row["greedy_correct"]
    assert row["sample_answers"] == ["0", "14", "0", None]
    assert (row["samples_correct"], row["samples"], row["format_rate"]) == (1, 4, 0.75)
    assert (row["majority_answer"], row["majority_correct"]) == ("0", False)
    assert (row["response_length"], row["greedy_length"]) == (7.0, 6)


def test_no_answer_is_wrong_and_never_wins_a_vote(before):
    silent, one_answer = before.iloc[2], before.iloc[5]
    assert pd.isna(silent["greedy_answer"])
    assert pd.isna(silent["majority_answer"])
    assert not silent["greedy_correct"]
    assert not silent["majority_correct"]
    assert (silent["samples_correct"], silent["format_rate"]) == (0, 0.0)
    assert (one_answer["majority_answer"], one_answer["majority_correct"]) == ("35", True)


def one_each(**changes):
    return [judged("7", "7", **changes)] * 6


def test_what_the_scorer_says_is_kept(problems):
    good = judged("7", "7", 3, score=1.25)
    cut = judged(None, "7", 8, score=-0.5, truncated=True, failed=True, well_formed=False)
    rows = build_rows("rl", problems, one_each(failed=True, score=0.5), [[good, cut]] * 6)
    row = rows.iloc[0]
    assert (row["greedy_score"], row["sample_score"], row["truncated"]) == (0.5, 0.375, 0.5)
    assert (row["errors"], row["format_rate"], row["level"]) == (2, 0.5, "easy")
    assert not row["greedy_truncated"]
    assert list(rows["level"]) == ["easy"] * 3 + ["hard"] * 3


def test_where_no_answer_is_read_the_texts_vote(problems):
    """As for programs: the winner has no answer to show, and is right where its text is."""
    votes = [("a", False), ("b", True), ("b", True)]
    samples = [judged(None, "7", vote=vote, correct=right) for vote, right in votes]
    row = build_rows("rl", problems, one_each(), [samples] * 6).iloc[0]
    assert row["majority_correct"]
    assert pd.isna(row["majority_answer"])


def test_rows_survive_parquet(before, after, tmp_path):
    before.to_parquet(tmp_path / "rows.parquet")
    read = pd.read_parquet(tmp_path / "rows.parquet")
    assert [list(answers) for answers in read["sample_answers"]] == list(before["sample_answers"])
    pd.testing.assert_frame_equal(
        read.drop(columns="sample_answers"), before.drop(columns="sample_answers")
    )
    assert check_paired(read, after) == prompt_digest(before)


def test_half_a_character_does_not_lose_the_evaluation(problems, tmp_path):
    half = [judged("\ud83d 3", "3", text="\ud83d 3")] * 6
    rows = build_rows("rl", problems, half, [[one] for one in half])
    rows.to_parquet(tmp_path / "rows.parquet")
    assert set(rows["greedy_completion"]) == set(rows["greedy_answer"]) == {"? 3"}


def test_column_types_do_not_depend_on_the_answers(make_rows, before):
    silent = make_rows("rl", [None] * 6, [[None]] * 6)
    drop = ["sample_answers"]
    assert (silent.dtypes.drop(drop) == before.dtypes.drop(drop)).all()


def test_digest_covers_text_truth_and_order_but_not_the_model(before, after):
    assert check_paired(before, after) == prompt_digest(before) == prompt_digest(after)
    for column in ("prompt", "ground_truth", "data_source"):
        other = before.copy()
        other.loc[2, column] = "other"
        assert prompt_digest(other) != prompt_digest(before)
    assert prompt_digest(before.iloc[::-1]) != prompt_digest(before)


def test_rows_of_other_problems_are_refused_and_named(before, after):
    after.loc[4, "prompt"] = "Another question"
    with pytest.raises(DataError, match=r"differ in 'prompt' at row 4: .*Another question"):
        check_paired(before, after)


def test_another_order_is_refused(before, after):
    shuffled = after.iloc[[0, 1, 3, 2, 4, 5]].reset_index(drop=True)
    with pytest.raises(DataError, match="differ in 'index' at row 2"):
        check_paired(before, shuffled)


def test_another_number_of_problems_is_refused(before, after):
    with pytest.raises(DataError, match="asked 6 and 5 problems"):
        check_paired(before, after.head(5))


def test_two_models_in_one_table_and_missing_columns_are_refused(before, after):
    with pytest.raises(DataError, match=r"\(after\) must hold one model, got \['rl', 'warm_start'"):
        check_paired(before, pd.concat([after, before]))
    with pytest.raises(DataError, match=r"\(before\) lack the columns \['samples'\]"):
        check_paired(before.drop(columns="samples"), after)


@pytest.fixture
def tables(before, after):
    """Problems 0 to 2 are of `test`, the others of `hard`."""
    names = ["test"] * 3 + ["hard"] * 3
    return before.assign(dataset=names), after.assign(dataset=names)


def compare(tables, known):
    return compare_sets(*tables, known, Statistics(2, 0.95, 0))


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
    assert line.endswith("3 problems; known from training: 1 of 3 prompts (33.3%)")
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
    other = (tables[0].assign(samples=5), tables[1])
    with pytest.raises(DataError, match=r"evaluation set test: .*different numbers of samples"):
        compare(other, {"test": 0, "hard": 0})
    with pytest.raises(LineageError, match=r"sets\.json can't be read .*evaluate the models again"):
        read_sets(tmp_path)
