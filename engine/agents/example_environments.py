"""Environments of the demonstration tasks: products of long numbers, guessing, Python tasks.

Their rows are in `engine.data.demonstrations`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engine.agents.environment_protocol import Action, Observation, register_environment
from engine.agents.environments import ToolEnvironment
from engine.agents.tools import on_thread
from engine.data.demonstrations import HIGHER, LOWER
from engine.errors import ConfigError
from engine.rewards.answers import extract_answer, normalise_number
from engine.rewards.code import CodeTests, Verdict, program, read_tests, require_walls
from engine.rewards.sandbox.run import Limits

# Products of long numbers: beyond a small model by itself, easy with the calculator.


@register_environment("arithmetic")
class ArithmeticEnvironment(ToolEnvironment):
    """The row's prompt asks for a number, `reward_model.ground_truth`; a right answer earns 1.

    A call that can't be read or run earns `error_penalty`, so that calls learn their form.
    """

    def __init__(
        self,
        *,
        tools: Sequence[object] = ("calculator",),
        mcp_servers: Mapping[str, object] | None = None,
        timeout_s: float = 10.0,
        max_output: int = 400,
        max_calls: int = 4,
        method: Literal["strict", "flexible"] = "flexible",
        error_penalty: float = 0.0,
    ) -> None:
        """`method` is `answer_match`'s: what counts is the number after `####`, or the last one."""
        super().__init__(
            tools=tools,
            mcp_servers=mcp_servers,
            timeout_s=timeout_s,
            max_output=max_output,
            max_calls=max_calls,
        )
        self._method: Literal["strict", "flexible"] = method
        self._penalty = error_penalty

    async def step(self, action: Action) -> Observation:
        seen = await super().step(action)
        if seen.done:
            return seen
        wrong = sum(str(message["content"]).startswith("error:") for message in seen.messages)
        info = {**seen.info, "call_errors": wrong}
        return Observation(seen.messages, -abs(self._penalty) * wrong, False, info)

    async def answered(self, action: Action) -> Observation:
        wanted = normalise_number(str(truth_of(self.row)))
        correct = wanted is not None and wanted == extract_answer(action.text, method=self._method)
        info = {"calls": self.calls, "called": self.calls > 0, "correct": correct}
        return Observation(reward=float(correct), done=True, info=info)


def truth_of(row: Mapping[str, object]) -> object:
    """A row's ground truth; raise ConfigError for a row without one."""
    model = row.get("reward_model")
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise ConfigError("the environment reads reward_model.ground_truth, which a row lacks")
    return model["ground_truth"]


# Higher or lower: find a number in as few turns as bisection takes.

_NUMBER = re.compile(r"-?\d{1,9}")


@register_environment("guessing")
class GuessingEnvironment:
    """The secret is `reward_model.ground_truth`, between `extra_info.low` and `high`.

    The number that a turn ends with is its guess. The guess that is right earns 1 less
    `turn_cost` for each turn that bisection would not have needed; none earns 0. Success is to
    need none of these.
    """

    def __init__(self, *, max_turns: int = 10, turn_cost: float = 0.1) -> None:
        if max_turns < 1 or turn_cost < 0:
            raise ConfigError(
                "rollout.agent.environment.options: max_turns is at least 1, turn_cost at least 0"
            )
        self._max_turns, self._turn_cost = max_turns, turn_cost
        self._low = self._high = self._secret = self._turns = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        try:
            about = row["extra_info"]
            self._low, self._high = int(about["low"]), int(about["high"])
            self._secret = int(row["reward_model"]["ground_truth"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "environment 'guessing' reads extra_info.low, extra_info.high and "
                f"reward_model.ground_truth, and a row lacks them ({error!r})"
            ) from None
        self._turns = 0
        return Observation()

    async def step(self, action: Action) -> Observation:
        self._turns += 1
        numbers = _NUMBER.findall(action.text[-1000:])
        guess = int(numbers[-1]) if numbers else None
        if guess == self._secret:
            return self._ended(solved=True)
        if self._turns >= self._max_turns:
            return self._ended(solved=False)
        if guess is None:
            told = f"Give a number from {self._low} to {self._high}."
        else:
            told = HIGHER if guess < self._secret else LOWER
        return Observation(({"role": "user", "content": told},))

    async def close(self) -> None:
        """Nothing is held."""

    def get_state(self) -> object:
        return self._low, self._high, self._secret, self._turns

    def set_state(self, state: Any) -> None:
        self._low, self._high, self._secret, self._turns = state

    def _ended(self, solved: bool) -> Observation:
        needed = math.ceil(math.log2(self._high - self._low + 2))  # by bisection, at worst
        reward = max(0.0, 1.0 - self._turn_cost * max(0, self._turns - needed)) if solved else 0.0
        success = solved and self._turns <= needed
        info = {"solved": solved, "success": success, "turns": self._turns}
        return Observation(reward=reward, done=True, info=info)


# Python tasks with test cases: the policy sees which tests fail, and tries again.


@register_environment("python_tasks")
class PythonTasksEnvironment:
    """`reward_model.ground_truth` are test cases as the reward `code` reads them.

    Each turn's program, its last fenced block or the whole text, runs in the sandbox against all
    of them. The episode ends with the first that passes them all, or after `max_turns`. A turn
    earns what it adds to the share of tests that pass, so that an episode's turns add up to its
    best share; with `partial=False` only a program that passes them all earns 1.
    """

    def __init__(
        self,
        *,
        max_turns: int = 3,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        partial: bool = True,
        weak: bool = False,
    ) -> None:
        """`timeout_s` is for all tests of a turn; `weak` allows hosts that give few walls."""
        if max_turns < 1 or timeout_s <= 0:
            raise ConfigError(
                "rollout.agent.environment.options: max_turns is at least 1, timeout_s above 0"
            )
        self._max_turns, self._timeout_s = max_turns, timeout_s
        self._limits = Limits(memory_mb=memory_mb)
        self._partial, self._weak = partial, weak
        self._row: Mapping[str, object] = {}
        self._tests: CodeTests | None = None
        self._turns, self._best = 0, 0.0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self._row, self._turns, self._best = row, 0, 0.0
        self._tests = read_tests(truth_of(row), int(row.get("extra_info", {}).get("index", 0)))
        return Observation()

    async def step(self, action: Action) -> Observation:
        assert self._tests is not None
        self._turns += 1
        tests, text = self._tests, program(action.text)
        verdict: Verdict = await on_thread(
            lambda: tests.judge(text, self._limits, self._timeout_s, stop=False)
        )
        if verdict.layers:
            require_walls(
                tuple(name for name, there in verdict.layers.items() if there), self._weak
            )
        passed, solved = sum(verdict.passed), sum(verdict.passed) == len(tests)
        worth = passed / len(tests) if self._partial else float(solved)
        reward, self._best = max(0.0, worth - self._best), max(worth, self._best)
        done = solved or self._turns >= self._max_turns
        info = {"passed": passed / len(tests), "solved": solved, "turns": self._turns}
        told = {"role": "user", "content": _told(verdict, len(tests))}
        return Observation(() if done else (told,), reward, done, info)

    async def close(self) -> None:
        """Nothing is held: sandboxes end with their turn."""

    def get_state(self) -> object:
        return dict(self._row), self._turns, self._best

    def set_state(self, state: Any) -> None:
        self._row, self._turns, self._best = state
        self._tests = read_tests(truth_of(self._row), 0)


def _told(verdict: Verdict, count: int) -> str:
    """What the policy reads: which tests fail, and nothing of what they expect."""
    passed = verdict.passed + [False] * (count - len(verdict.passed))
    failed = [str(place + 1) for place, ok in enumerate(passed) if not ok]
    shown = ", ".join(failed[:10]) + (", …" if len(failed) > 10 else "")
    return f"{sum(passed)} of {count} tests pass; these fail: {shown}. Give the corrected program."
