from collections.abc import Iterator

import pytest

from engine.rewards import open_reward, score
from engine.rewards.answers import math
from engine.rewards.calls import RewardScorer


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\dfrac12", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{\boxed{\frac{4}{8}}}", r"\frac12", 1.0),
        (r"\boxed{(1, 2]}", r"(1,2]", 1.0),
        (r"\boxed{[1, 2]}", r"(1,2]", 0.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{3}, no, \boxed{4}", "3", 0.0),
        (r"\boxed{4", "4", 0.0),
        (r"so $x = 7$", "7", 1.0),
        ("no idea", "7", 0.0),
        (r"\boxed{12}", r"The sum is 12, so \boxed{12}.", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(text: str, truth: str, value: float) -> None:
    assert math([""], [text], ground_truth=[truth]) == [value]


def test_only_a_box_counts_where_asked_for() -> None:
    texts = ["so $x = 7$", r"\boxed{7}"]
    assert math(["", ""], texts, ground_truth=["7", "7"], boxed_only=True) == [0.0, 1.0]


@pytest.fixture
def pool() -> Iterator[RewardScorer]:
    opened = open_reward("math", processes=1, sample_timeout_s=0.7)
    yield opened
    opened.close()


def test_what_explodes_costs_its_deadline_and_no_other_completion(pool: RewardScorer) -> None:
    texts = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{0.5}",
        r"\boxed{10!!!!!}",
        "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
        "\\boxed{" + "9" * 3_000_000 + "}",
        "{" * 1_000_000,
        r"\boxed{\frac{2}{4}}",
    ]
    columns = {"ground_truth": [r"\frac{1}{2}"] * len(texts)}
    scores = score(pool, [""] * len(texts), texts, columns, 30.0, on_error="zero")
    assert [row[0] for row in scores.rows] == [0, 1, 0, 0, 0, 0, 1]
    assert scores.failures.keys() <= {0, 2, 3}
    assert 0 in scores.failures
    assert "raise reward.sample_timeout_s" in str(scores.failures[0])
