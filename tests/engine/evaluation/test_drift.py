"""Signals of drift, on made-up curves."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from engine.evaluation import drift

STEPS = 80


def curve(first: float, last: float, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    return np.linspace(first, last, STEPS) + np.random.default_rng(seed).normal(0, noise, STEPS)


def rows(every: int = 1, **curves: np.ndarray) -> list[dict[str, float]]:
    """Rows of steps; validation metrics are in every so many of them."""
    metrics = {
        "reward/mean": curve(0.2, 0.8),
        "reward/correct": curve(0.2, 0.8),
        "reward/second_grader": curve(0.25, 0.82, seed=1),
        "reward/only_lenient": curve(0.05, 0.02, 0.005),
        "reward/length_slope": curve(0.0, 0.0, 0.001),
        "response/length_mean": curve(40, 45, 1),
        "response/repeated_ngrams": curve(0.02, 0.04, 0.01),
        "validation/correct": curve(0.2, 0.75, seed=2),
    } | {name.replace("__", "/"): values for name, values in curves.items()}
    made = []
    for step in range(STEPS):
        row = {name: float(values[step]) for name, values in metrics.items()}
        if (step + 1) % every:
            row.pop("validation/correct", None)
        made.append(row)
    return made


def raised(history: list[dict[str, float]]) -> set[str]:
    return {signal.name for signal in drift.signals(history) if signal.raised}


@pytest.mark.parametrize("every", [1, 20])
def test_a_run_that_learns_its_task_raises_nothing(every: int) -> None:
    history = rows(every)
    assert {signal.name for signal in drift.signals(history)} == drift.NAMES
    for step in range(1, STEPS + 1):
        assert raised(history[:step]) == set(), step


@pytest.mark.parametrize(
    ("name", "curves"),
    [
        ("second_grader", {"reward__second_grader": curve(0.25, 0.26, seed=1)}),
        ("held_out", {"validation__correct": curve(0.3, 0.28, seed=2)}),
        ("repeated_ngrams", {"response__repeated_ngrams": curve(0.02, 0.6)}),
        ("only_lenient", {"reward__only_lenient": curve(0.02, 0.4)}),
        # Each token more makes an answer count as right by 1 % more, and nothing else does.
        (
            "length_adjusted",
            {
                "response__length_mean": curve(40, 100, 1),
                "reward__length_slope": curve(0.01, 0.01, 0.001),
                "reward__second_grader": np.full(STEPS, np.nan),
            },
        ),
    ],
)
def test_a_signal_is_raised_by_its_own_curve(name: str, curves: dict[str, np.ndarray]) -> None:
    history = rows(**curves)
    assert raised(history) == {name}
    measured = drift.NAMES - ({"second_grader"} if name == "length_adjusted" else set())
    assert drift.metrics(history) == {f"drift/{other}": float(other == name) for other in measured}


def test_a_reward_that_is_learned_alone_after_the_task_is_drift() -> None:
    """The task is learned in the first half; the whole run's gain hides what the second one is."""
    task = np.minimum(curve(0.2, 1.0, seed=1), curve(0.6, 0.6, seed=3))
    history = rows(reward__second_grader=task, validation__correct=task)
    assert raised(history[: STEPS // 2]) == set()
    assert raised(history) == {"second_grader", "held_out"}
    assert all(s.sentence.startswith("since step 41 ") for s in drift.signals(history) if s.raised)


def test_length_that_comes_with_better_answers_is_no_drift() -> None:
    """Within a step the longer answers are no better, as with reasoning that grows."""
    assert raised(rows(response__length_mean=curve(40, 400, 5))) == set()


def test_a_reward_near_zero_whose_accuracy_rises_with_it_is_no_drift() -> None:
    tiny = dict.fromkeys(("reward__mean", "reward__correct"), curve(2e-4, 1.3e-3, 5e-5))
    grader = curve(4e-4, 1.4e-3, 5e-5, seed=1)
    assert raised(rows(**tiny, reward__second_grader=grader, validation__correct=grader)) == set()
    flat = curve(4e-4, 4e-4, 5e-6, seed=1)
    assert "second_grader" in raised(rows(**tiny, reward__second_grader=flat))


def test_accuracy_that_catches_up_with_the_second_grader_is_no_drift() -> None:
    """An agent that gives the right answer, and learns to give it in time."""
    longer = {
        "response__length_mean": curve(40, 100, 1),
        "reward__length_slope": curve(0.01, 0.01, 0.001),
        "validation__correct": curve(0.9, 0.95, 0.001),
    }
    right = {"reward__correct": curve(0.85, 0.93, 0.01), "reward__mean": curve(0.85, 0.93, 0.01)}
    assert raised(rows(**longer, **right, reward__second_grader=curve(0.965, 0.976, 0.01))) == set()
    falls = raised(rows(**longer, **right, reward__second_grader=curve(0.99, 0.94, 0.005)))
    assert falls == {"second_grader", "length_adjusted"}


def test_longer_answers_that_a_second_grader_calls_right_are_no_drift() -> None:
    longer = {
        "response__length_mean": curve(40, 100, 1),
        "reward__length_slope": curve(0.01, 0.01, 0.001),
    }
    assert raised(rows(**longer)) == set()
    flat = curve(0.25, 0.26, seed=1)
    assert raised(rows(**longer, reward__second_grader=flat)) == {
        "length_adjusted",
        "second_grader",
    }


def test_a_validation_that_is_good_from_the_start_is_no_drift() -> None:
    assert raised(rows(20, validation__correct=curve(0.94, 0.96, 0.001))) == set()


def test_a_good_validation_that_falls_is_drift() -> None:
    assert raised(rows(20, validation__correct=curve(0.94, 0.82, 0.001))) == {"held_out"}


def test_a_reward_that_rises_without_accuracy_is_drift_by_a_better_validation_too() -> None:
    """A bonus for format does this, and greedy decoding is right more often than sampling."""
    flat = {
        "reward__correct": curve(0.3, 0.3, seed=5),
        "validation__correct": curve(0.35, 0.35, 0.004, seed=2),
    }
    assert "held_out" in raised(rows(**flat))


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_rises_by_format_alone_is_drift_in_noise_of_small_batches(seed: int) -> None:
    flat = {
        "reward__mean": curve(0.2, 0.8, 0.03, seed),
        "reward__correct": curve(0.3, 0.3, 0.03, seed + 10),
        "reward__second_grader": curve(0.32, 0.32, 0.03, seed + 20),
        "validation__correct": curve(0.3, 0.3, 0.03, seed + 30),
    }
    assert {"second_grader", "held_out"} <= raised(rows(**flat))


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_second_grader_confirms_nothing(seed: int) -> None:
    longer = {
        "response__length_mean": curve(40, 100, 1),
        "reward__length_slope": curve(0.01, 0.01, 0.001),
    }
    noisy = curve(0.3, 0.3, 0.8, seed=seed)
    assert raised(rows(**longer, reward__second_grader=noisy)) == {"length_adjusted"}


def test_a_few_validations_that_stand_still_are_enough() -> None:
    assert raised(rows(20, validation__correct=curve(0.4, 0.4, 0.001))) == {"held_out"}


def test_two_validations_are_too_few_for_a_signal() -> None:
    measured = drift.signals(rows(40, validation__correct=curve(0.4, 0.4, 0.001)))
    assert "held_out" not in {signal.name for signal in measured}


def test_noise_alone_raises_nothing() -> None:
    flat = {
        name: curve(0.5, 0.5, 0.2, seed)
        for seed, name in enumerate(("reward__mean", "reward__correct", "validation__correct"))
    }
    assert raised(rows(**flat, reward__second_grader=curve(0.5, 0.5, 0.2, 9))) == set()


def test_what_is_not_measured_gives_no_signal() -> None:
    assert drift.signals(rows()[:7]) == []
    only = [{"reward/mean": row["reward/mean"], "reward/correct": 0.0} for row in rows()]
    assert drift.signals(only) == []


def test_a_report_says_which_steps_had_a_signal() -> None:
    history = rows(validation__correct=curve(0.3, 0.28, seed=2))
    table = pd.DataFrame([row | drift.metrics(history[: i + 1]) for i, row in enumerate(history)])
    ((name, sentence),) = drift.raised(table).items()
    assert name == "held_out"
    assert sentence.startswith("steps ")
    assert "to 80: the reward goes 0." in sentence
    assert drift.raised(pd.DataFrame(rows())) == {}
