import pytest

from engine.errors import RewardError
from engine.rewards.answers import regular_expression


def found(pattern: str, texts: list[str], truths: list[str]) -> list[float]:
    return regular_expression([""] * len(texts), texts, ground_truth=truths, pattern=pattern)


def test_a_pattern_is_found_or_its_last_answer_is_right() -> None:
    assert found(r"\bcats?\b", ["a cat", "a category"], ["", ""]) == [1, 0]
    answers = ["say 3, no: say 4", "say 3", "nothing"]
    assert found(r"say (?P<answer>\d)", answers, ["4", "4", "4"]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "message"), [("", "set reward.options.pattern"), ("(", "'\\('")]
)
def test_a_pattern_that_is_none(pattern: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        found(pattern, ["a"], ["a"])
