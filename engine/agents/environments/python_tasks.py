"""Python tasks with test cases: the policy sees which tests fail, and tries again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.agents.environments.arithmetic import truth_of
from engine.agents.protocol import Action, Observation
from engine.agents.registry import register_environment
from engine.agents.tools.running import on_thread
from engine.errors import ConfigError
from engine.rewards.code import program, require_walls
from engine.rewards.code_tests import CodeTests, Verdict, read_tests
from engine.rewards.sandbox.run import Limits


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
