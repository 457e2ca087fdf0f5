import pytest

from engine.rewards.answers import last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\boxed{7}+\boxed{8}}", "8"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        ("no box", None),
        ("\\boxed{" + "{" * 5_000_000, None),
        ("\\boxed{" + "9" * 5_000_000 + "}", None),
    ],
)
def test_what_stands_in_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer
