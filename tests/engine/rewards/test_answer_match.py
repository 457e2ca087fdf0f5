import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RewardError
from engine.rewards.answers import answer_match, extract_answer, has_format, normalise_number

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("text", "answer", "formatted"),
    [
        ("<<23+5=28>>28\n#### 28", "28", True),
        ("#### 28\n", "28", True),
        ("####28", "28", True),
        ("#### $1,234.50", "1234.5", True),
        ("#### -5.", "-5", True),
        ("#### -$5", "-5", True),
        ("#### $-5", "-5", True),
        ("#### +7", "7", True),
        ("#### 007", "7", True),
        ("#### .50", "0.5", True),
        ("#### -0.0", "0", True),
        ("#### 3\n#### 4", "4", False),
        ("#### 28 apples", "28", False),
        ("#### 28\nThat is all.", "28", False),
        ("so #### 28", "28", False),
        ("#### 1e5", None, False),
        ("#### 1/2", None, False),
        ("#### 1.2.3", None, False),
        ("#### 28apples", None, False),
        ("#### twenty", None, False),
        ("#### 5\n####", None, False),
        ("####\n28", None, False),
        ("The answer is 28", None, False),
        ("", None, False),
        ("#### " + "9" * 5000, None, True),
    ],
)
def test_reading_an_answer(text: str, answer: str | None, formatted: bool) -> None:
    assert extract_answer(text) == answer
    assert has_format(text) is formatted


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 28", "28"),
        ("so $1,234.50 in total", "1234.5"),
        ("it costs -3.5 dollars", "-3.5"),
        ("50% off", "50"),
        ("x=12km", "12"),
        ("a 3 and a 4", "4"),
        ("12:30, then 1,000,000.", "1000000"),
        ("no number", None),
        ("9" * 5_000_000, None),
        ("-" * 5_000_000, None),
    ],
)
def test_the_last_number_of_a_text(text: str, answer: str | None) -> None:
    assert extract_answer(text, method="flexible") == answer
    assert answer_match([""], [text], ground_truth=[answer or "1"], method="flexible") == [
        float(answer is not None)
    ]


@given(number=st.decimals(-(10**9), 10**9, places=3))
def test_writings_of_one_number_are_one(number: object) -> None:
    plain = normalise_number(f"{number:f}")
    assert plain is not None
    assert normalise_number(f"${number:,.5f}") == plain
    assert extract_answer(f"#### {number:,.3f}.") in (plain, None)
    assert float(plain) == float(str(number))


@given(a=st.integers(-(10**20), 10**20), b=st.integers(-(10**20), 10**20))
def test_only_equal_numbers_match(a: int, b: int) -> None:
    scores = answer_match(["", ""], [f"#### {a}", f"#### {a:,}"], ground_truth=[b, str(a)])
    assert scores == [float(a == b), 1.0]


def test_scores_are_one_or_zero() -> None:
    completions = ["#### 1,000", "#### 1000.00", "#### 999", "1000", "#### 1000\n#### 1"]
    scores = answer_match([""] * 5, completions, ground_truth=["1000"] * 5, kind=["a"] * 5)
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("truth", ["abc", None, "", "1/2"])
def test_a_ground_truth_that_is_no_number_is_named(truth: object) -> None:
    with pytest.raises(RewardError, match=r"row 1: ground_truth is"):
        answer_match(["", ""], ["#### 1", "#### 1"], ground_truth=["1", truth])


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not on this machine")
def test_every_gsm8k_solution_scores_one() -> None:
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    truths = [answer.rpartition("####")[2] for answer in answers]
    assert answer_match(answers, answers, ground_truth=truths) == [1.0] * 1319
    assert all(has_format(answer) for answer in answers)
