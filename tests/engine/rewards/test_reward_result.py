import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import RewardError
from engine.rewards.reward_function import RewardFailure, Scores, read_result, require_components

TWO = {"answer": [1.0, 0.0, 1.0], "format": [0.5, 0.5, 0.0]}


class Broken:
    def __float__(self) -> float:
        raise KeyError("no value")


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ([1.0, math.nan, 0.0], 1),
        ([1.0, 0.0, math.inf], 2),
        ([None, 0.0, 0.0], 0),
        (["1", 0.0, 0.0], 0),
        ([[1.0], 0.0, 0.0], 0),
        ([10**400, 0.0, 0.0], 0),
        ([10**5000, 0.0, 0.0], 0),
        ([0.0, 0.0, 1e300], 2),
        ([0.0, torch.ones(2), 0.0], 1),
        ([0.0, Broken(), 0.0], 1),
        (np.array([0.0, -np.inf, 0.0]), 1),
    ],
)
def test_a_wrong_value_costs_its_row_alone(value: Any, row: int) -> None:
    scores = read_result("r", value, 3)
    assert list(scores.failures) == [row]
    assert scores.failures[row].cause == "not_finite"
    assert f"for completion {row}; it must be a finite float" in str(scores.failures[row])
    healthy = [i for i in range(3) if i != row]
    assert [scores.rows[i] for i in healthy] == [[float(value[i])] for i in healthy]
    assert scores.rows[row] == [0.0]


def test_the_value_and_its_component_are_named() -> None:
    scores = read_result("r", {"answer": [1.0, 1.0], "format": [0.0, math.nan]}, 2, first_row=7)
    assert str(scores.failures[1]) == (
        "reward 'r' returned nan as 'format' for completion 8; it must be a finite float"
    )
    assert scores.rows == [[1.0, 0.0], [0.0, 0.0]]


def test_components_become_columns_in_the_order_of_their_keys() -> None:
    scores = read_result("r", TWO, 3)
    assert scores.components == ("answer", "format")
    assert scores.rows == [[1.0, 0.5], [0.0, 0.5], [1.0, 0.0]]
    assert read_result("r", {"b": torch.ones(1), "a": np.zeros(1)}, 1).rows == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "reward 'r' returned 2 values for 3 completions"),
        ([1.0] * 4, "4 values for 3 completions"),
        (1.0, "returned float; it must return a list"),
        (torch.tensor(1.0), "returned Tensor; it must return a list"),
        (None, "returned NoneType"),
        ("abc", "returned str"),
        ({1.0, 2.0, 3.0}, "returned set"),
        ((x for x in [1.0, 2.0, 3.0]), "returned generator"),
        ({"a": 1, "b": 2, "c": 3}, "component 'a', returned int; it must return a list"),
        ({"a": [1.0] * 3, "b": [1.0] * 2}, "component 'b', returned 2 values for 3"),
        ({"a": {"x": 1}}, "component 'a', returned dict"),
        ({}, "at least one component"),
        ({0: [1.0] * 3}, r"keys \[0\]; it must have at least one component, each named by a"),
    ],
)
def test_a_wrong_form_is_wrong_as_a_whole(value: Any, message: str) -> None:
    with pytest.raises(RewardFailure, match=message) as caught:
        read_result("r", value, 3)
    assert caught.value.cause == "malformed"


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        (TWO, (), r"components \['answer', 'format'\] where a plain list was"),
        ([1.0] * 3, ("answer",), r"a plain list where components \['answer'\] was"),
        (TWO, ("format", "answer"), r"where components \['format', 'answer'\] was .* same order"),
        ({"answer": [0.0] * 3}, ("answer", "format"), r"returned components \['answer'\] where"),
    ],
)
def test_other_names_than_before_are_refused(
    value: Any, expected: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RewardFailure, match=message):
        require_components("r", read_result("r", value, 3).components, expected)


def test_only_a_batch_without_any_score_is_an_error() -> None:
    first, second = RewardFailure("raised", "first"), RewardFailure("deadline", "second")
    Scores.of((), {1: [1.0]}, {0: first}).raise_if_none()
    Scores((), [], {}).raise_if_none()
    with pytest.raises(RewardError, match=r"^first; none of the 2 completions") as caught:
        Scores.of((), {}, {0: first, 1: second}).raise_if_none()
    assert caught.value.__cause__ is first


def test_a_failure_travels_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(RewardFailure("deadline", "late")))
    assert (copy.cause, str(copy)) == ("deadline", "late")
