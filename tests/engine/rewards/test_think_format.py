import pytest

from engine.rewards.answers import think_format


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>2+2</think>\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>4</answer><think>2+2</think>", 0.0),
        ("<think>2+2</think> so <answer>4</answer>", 0.0),
        ("<think>2+2</think><answer>4", 0.0),
        ("<think>2<think>+2</think><answer>4</answer>", 0.0),
        ("4", 0.0),
    ],
)
def test_tags_stand_once_in_order_and_closed(text: str, value: float) -> None:
    assert think_format([""], [text]) == [value]


def test_other_tags() -> None:
    assert think_format([""], ["<plan>go</plan>"], tags=("plan",)) == [1.0]
