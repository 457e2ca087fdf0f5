import pytest

from engine.errors import RewardError
from engine.rewards.answers import choice, multiple_choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("Answer: **D**", "D"),
        ("B", "B"),
        ("(b)", None),
        ("A or B? Choice B", "B"),
        ("Not A. I'd say C", "C"),
        (r"so \boxed{\text{D}}", "D"),
        ("I don't know", "I"),
        ("", None),
        ("A" * 1_000_000, None),
    ],
)
def test_the_letter_that_a_text_settles_on(text: str, letter: str | None) -> None:
    assert choice(text) == letter


def test_a_truth_is_a_letter_or_a_place() -> None:
    assert multiple_choice([""] * 4, ["B"] * 4, ground_truth=["b", "(B)", 1, "2"]) == [1, 1, 1, 0]
    with pytest.raises(RewardError, match=r"row 0: ground_truth is 'BC'; .* needs a letter"):
        multiple_choice([""], ["B"], ground_truth=["BC"])
