"""The environments that are shipped: what their episodes say and earn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from engine.agents import Observation, ResumableEnvironment, make_environment
from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.errors import EngineError
from examples.guessing import guessing_demonstration, guessing_row
from examples.products import Habits, product_demonstration, product_row
from examples.python_tasks import KINDS, program_text, python_demonstration, python_row


def played(environment: Any, row: Mapping[str, Any], texts: list[str]) -> list[Observation]:
    parser = resolve_call_parser("hermes")

    async def play() -> list[Observation]:
        assert (await environment.reset(row)) == Observation()
        seen = []
        for text in texts:
            seen.append(await environment.step(parsed_action(parser, text)))
            if seen[-1].done:
                break
            if isinstance(environment, ResumableEnvironment):  # the state is all that there is
                state = environment.get_state()
                environment.set_state(state)
        return seen

    return asyncio.run(play())


def test_arithmetic_is_answered_with_the_calculator() -> None:
    row = product_row(482, 937, "train", 0)
    call, result, answer = product_demonstration(row)
    environment = make_environment("arithmetic", {"error_penalty": 0.25})
    texts = ["<tool_call>{</tool_call>", call["content"], answer["content"]]
    seen = played(environment, row, texts)
    assert [one.reward for one in seen] == [-0.25, 0.0, 1.0]
    assert seen[1].messages[0]["content"] == result["content"] == "451634"
    assert seen[2].info == {"calls": 2, "called": True, "correct": True}
    (wrong,) = played(environment, row, ["#### 1"])
    assert (wrong.reward, wrong.done, wrong.info["called"]) == (0.0, True, False)


@pytest.mark.parametrize("habit", ["calls", "slips", "malformed", "head"])
def test_habits_of_who_calculates_are_what_the_environment_says(habit: str) -> None:
    shares = {"calls": 0.0, "slips": 0.0, "malformed": 0.0} | {habit: 1.0}
    habits = Habits(**{name: shares[name] for name in ("calls", "slips", "malformed")})
    row = product_row(482, 937, "train", 0)
    for seed in range(5):
        turns = product_demonstration(row, random.Random(seed), habits)
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        told = [turn["content"] for turn in turns if turn["role"] == "tool"]
        seen = played(make_environment("arithmetic"), row, said)
        if habit == "malformed":
            assert seen[0].messages[0]["content"].startswith("error: the call")
            continue
        assert [one.messages[0]["content"] for one in seen[:-1]] == told
        assert seen[-1].done
        assert seen[-1].reward == float(habit == "calls")
        assert seen[-1].info["called"] is (habit != "head")


def test_a_number_is_guessed_by_bisection() -> None:
    environment = make_environment("guessing", {"max_turns": 8})
    for secret in range(1, 101, 5):
        row = guessing_row("Ada", 1, 100, secret, "train", 0)
        for draw in (None, random.Random(secret)):
            turns = guessing_demonstration(row, draw, 0.5, max_turns=8)
            guesses = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            answers = [turn["content"] for turn in turns if turn["role"] == "user"]
            seen = played(environment, row, guesses)
            assert [one.messages[0]["content"] for one in seen[:-1]] == answers
            assert len(seen) == len(guesses) <= 8
            if draw is None:
                assert (seen[-1].reward, seen[-1].info["solved"]) == (1.0, True)
                assert seen[-1].info["success"] is True
                assert len(seen) <= 7


def test_guessing_without_a_plan_earns_less() -> None:
    environment = make_environment("guessing", {"max_turns": 9, "turn_cost": 0.25})
    row = guessing_row("Ada", 1, 100, 50, "train", 0)
    seen = played(environment, row, ["1"] * 8 + ["I say 50"])
    assert [one.messages[0]["content"] for one in seen[:-1]] == ["higher"] * 8
    assert (seen[-1].reward, seen[-1].info["turns"]) == (0.5, 9)  # bisection needs 7
    assert (seen[-1].info["solved"], seen[-1].info["success"]) == (True, False)
    seen = played(environment, row, ["what?"] + ["99"] * 8)
    assert seen[0].messages[0]["content"] == "Give a number from 1 to 100."
    assert (seen[-1].reward, seen[-1].done, seen[-1].info["solved"]) == (0.0, True, False)
    with pytest.raises(EngineError, match=r"extra_info\.low"):
        asyncio.run(environment.reset({}))


def test_a_program_is_corrected_by_what_its_tests_say() -> None:
    row = {
        "prompt": [],
        "reward_model": {
            "ground_truth": {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 4]}
        },
    }
    environment = make_environment("python_tasks")
    wrong = "```python\ndef add(a, b):\n    return 4\n```"
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    seen = played(environment, row, ["def add(", wrong, right])
    assert [one.reward for one in seen] == [0.0, 0.5, 0.5]
    assert seen[0].messages[0]["content"].startswith("0 of 2 tests pass; these fail: 1, 2.")
    assert seen[1].messages[0]["content"].startswith("1 of 2 tests pass; these fail: 1.")
    assert (seen[2].done, seen[2].messages, seen[2].info["solved"]) == (True, (), True)
    strict = make_environment("python_tasks", {"partial": False, "max_turns": 1})
    (seen_once,) = played(strict, row, [wrong])
    assert (seen_once.reward, seen_once.done) == (0.0, True)
    with pytest.raises(EngineError, match=r"reward_model\.ground_truth"):
        asyncio.run(environment.reset({}))


def test_programs_of_the_demonstrations_get_the_answers_that_they_show() -> None:
    environment = make_environment("python_tasks", {"max_turns": 2, "partial": False})
    draw = random.Random(0)
    corrected = 0
    for first in KINDS:
        task = ((first, 3), ("multiply by", 4))
        row = python_row(task, "train", 0)
        (right,) = played(environment, row, [program_text(task)])
        assert (right.reward, right.done) == (1.0, True)
        turns = python_demonstration(task, draw, 1.0, 1.0, 1.0)
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        told = [turn["content"] for turn in turns if turn["role"] == "user"]
        seen = played(environment, row, said)
        assert [one.messages[0]["content"] for one in seen[:-1]] == told
        assert seen[-1].reward == 1.0
        corrected += len(told)
    assert corrected == 3  # "multiply by 3, then by 4" can't go wrong
