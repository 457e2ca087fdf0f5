import pytest

from engine.rewards.answers import exact_match, normalised_match


@pytest.mark.parametrize(
    ("text", "truth", "exact", "alike"),
    [
        (" Paris\n", "Paris", 1.0, 1.0),
        ("the  PARIS.", "Paris", 0.0, 1.0),
        ("Lyon", ["Paris", "Lyon"], 1.0, 1.0),
        ("lyon!", ["Paris", "Lyon"], 0.0, 1.0),
        ("It is Paris", "Paris", 0.0, 0.0),
        ("7", 7, 1.0, 1.0),
    ],
)
def test_letter_by_letter_or_normalised(
    text: str, truth: object, exact: float, alike: float
) -> None:
    assert exact_match([""], [text], ground_truth=[truth]) == [exact]
    assert normalised_match([""], [text], ground_truth=[truth]) == [alike]


def test_what_follows_a_mark_counts() -> None:
    texts = ["Answer: no. Answer: yes", "yes"]
    assert exact_match([""] * 2, texts, ground_truth=["yes"] * 2, after="Answer:") == [1.0, 0.0]
