import pytest

from engine.errors import RewardError
from engine.rewards.answers import cosine_length


def test_short_right_answers_are_worth_most_and_short_wrong_ones_least() -> None:
    texts = ["x" * length + "#### 5" for length in (0, 94, 194, 900)]
    right = cosine_length([""] * 4, texts, ground_truth=["5"] * 4, max_length=200)
    wrong = cosine_length([""] * 4, texts, ground_truth=["4"] * 4, max_length=200)
    assert right == pytest.approx([1.0, 0.75, 0.5, 0.5], abs=2e-3)
    assert wrong == pytest.approx([-1.0, -0.75, -0.5, -0.5], abs=2e-3)


def test_the_answers_rule_is_one_of_the_engines_with_one_score() -> None:
    with pytest.raises(RewardError, match="'answer_and_format' is not one of the engine's"):
        cosine_length([""], [""], ground_truth=["1"], answer="answer_and_format")
    texts = cosine_length([""], ["B"], ground_truth=["B"], answer="multiple_choice")
    assert texts == pytest.approx([1.0])
