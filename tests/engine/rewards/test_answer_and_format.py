from collections.abc import Callable

import pytest

from engine.config import RewardConfig
from engine.errors import ConfigError, RewardError
from engine.rewards import Scorer, declared_components, resolve_reward
from engine.rewards.answers import answer_and_format


@pytest.fixture
def score() -> Callable[[str, str], tuple[float, float]]:
    def one(completion: str, truth: str) -> tuple[float, float]:
        result = answer_and_format(["q"], [completion], ground_truth=[truth], extra_info=[{}])
        assert list(result) == ["answer", "format"]
        return result["answer"][0], result["format"][0]

    return one


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("1+1=2\n#### 2", (1.0, 1.0)),
        ("1+1=3\n#### 3", (0.0, 1.0)),
        ("it is #### 2, I think", (1.0, 0.0)),
        ("two", (0.0, 0.0)),
    ],
)
def test_right_and_well_formed_are_scored_apart(
    score: Callable[[str, str], tuple[float, float]],
    completion: str,
    expected: tuple[float, float],
) -> None:
    assert score(completion, "2") == expected


def test_a_wrong_ground_truth_is_refused(score: Callable[[str, str], tuple[float, float]]) -> None:
    with pytest.raises(RewardError, match=r"row 0: ground_truth is 'two'"):
        score("#### 2", "two")


def test_it_declares_what_it_returns() -> None:
    assert resolve_reward("answer_and_format") is answer_and_format
    assert declared_components("answer_and_format") == ("answer", "format")


def weights(components: tuple[str, ...], given: dict[str, float]) -> list[float]:
    scorer = Scorer(RewardConfig())
    scorer.config = RewardConfig(name="r", weights=given)
    return scorer.weights(components)


def test_weights_come_in_the_components_order() -> None:
    names = ("answer", "format", "length")
    assert weights(names, {"length": -0.5, "answer": 2}) == [2.0, 1.0, -0.5]
    assert weights((), {}) == [1.0]


@pytest.mark.parametrize(
    ("components", "given", "message"),
    [
        (("answer",), {"anwser": 2.0}, r"\['anwser'\], which reward 'r' .* are \['answer'\]"),
        ((), {"answer": 2.0}, r"which reward 'r' .* are \[\]: correct or remove"),
    ],
)
def test_wrong_weights_are_refused(
    components: tuple[str, ...], given: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        weights(components, given)
