"""The environments that are shipped: what their episodes say and earn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from engine.agents import Observation, is_resumable, make_environment
from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.agents.environments.arithmetic import arithmetic_demonstration, arithmetic_rows
from engine.agents.environments.guessing import guessing_demonstration, guessing_rows
from engine.errors import EngineError


def played(environment: Any, row: Mapping[str, Any], texts: list[str]) -> list[Observation]:
    parser = resolve_call_parser("hermes")

    async def play() -> list[Observation]:
        assert (await environment.reset(row)) == Observation()
        seen = []
        for text in texts:
            seen.append(await environment.step(parsed_action(parser, text)))
            if seen[-1].done:
                break
            if is_resumable(environment):  # the state is all that there is
                state = environment.get_state()
                environment.set_state(state)
        return seen

    return asyncio.run(play())


def test_arithmetic_is_answered_with_the_calculator() -> None:
    row = arithmetic_rows(3, digits=(4, 4))[2]
    assert row == arithmetic_rows(3, digits=(4, 4))[2]
    assert row != arithmetic_rows(3, digits=(4, 4), split="test")[2]
    call, result, answer = arithmetic_demonstration(row)
    arguments = call["tool_calls"][0]["function"]["arguments"]
    expression = arguments["expression"]
    assert expression in row["prompt"][0]["content"]
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
    environment = make_environment("arithmetic", {"error_penalty": 0.25})
    seen = played(
        environment, row, ["<tool_call>{</tool_call>", text % expression, answer["content"]]
    )
    assert [one.reward for one in seen] == [-0.25, 0.0, 1.0]
    assert (
        seen[1].messages[0]["content"] == result["content"] == row["reward_model"]["ground_truth"]
    )
    assert seen[2].info == {"calls": 2, "called": True, "correct": True}
    (wrong,) = played(environment, row, ["#### 1"])
    assert (wrong.reward, wrong.done, wrong.info["called"]) == (0.0, True, False)


def test_a_number_is_guessed_by_bisection() -> None:
    environment = make_environment("guessing", {"max_turns": 8})
    for row in guessing_rows(20, high=100):
        turns = guessing_demonstration(row)
        guesses = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        answers = [turn["content"] for turn in turns if turn["role"] == "user"]
        seen = played(environment, row, guesses)
        assert [one.messages[0]["content"] for one in seen[:-1]] == answers
        assert (seen[-1].reward, seen[-1].info["solved"]) == (1.0, True)
        assert len(seen) == len(guesses) <= 7


def test_guessing_without_a_plan_earns_less() -> None:
    environment = make_environment("guessing", {"max_turns": 9, "turn_cost": 0.25})
    row = guessing_rows(1)[0] | {"reward_model": {"ground_truth": "50"}}
    seen = played(environment, row, ["1"] * 8 + ["I say 50"])
    assert [one.messages[0]["content"] for one in seen[:-1]] == ["higher"] * 8
    assert (seen[-1].reward, seen[-1].info["turns"]) == (0.5, 9)  # bisection needs 7
    seen = played(environment, row, ["what?"] + ["99"] * 8)
    assert seen[0].messages[0]["content"] == "Give a number from 1 to 100."
    assert (seen[-1].reward, seen[-1].done, seen[-1].info["solved"]) == (0.0, True, False)
    with pytest.raises(EngineError, match=r"extra_info\.low"):
        asyncio.run(environment.reset({}))
    turns = guessing_demonstration(row, seed=1)
    assert turns[-1]["content"] == "50"


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
