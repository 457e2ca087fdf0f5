"""Products of long numbers: beyond a small model by itself, easy with a calculator.

    What is 482 * 937? Give the answer in the last line as "#### number".
    <tool_call>{"name": "calculator", "arguments": {"expression": "482 * 937"}}</tool_call>
    → 451634
    #### 451634

`data.source=products` makes rows, with demonstrations of a player who sometimes calls the
calculator; the environment `arithmetic` has that tool, and judges answers that are numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.agents import Action, Observation, register_environment
from engine.agents.environments import ToolEnvironment
from engine.config import DataConfig
from engine.data.chat_template import Message
from engine.data.rows import rl_row
from engine.data.sources import Splits, register_source
from engine.errors import ConfigError
from engine.final_answers import extract_answer, normalise_number
from engine.storage.json_rows import Row
from examples.demonstrations import made_digest, make_splits, truth_of, turn_rows

_FORM = 'Give the answer in the last line as "#### number".'


@dataclass(frozen=True, slots=True)
class Habits:
    """Shares of what a player does; the rest is answered from the head, and wrong."""

    calls: float  # calls the calculator, e.g. 0.3
    slips: float  # calls it with another expression
    malformed: float  # writes a call that can't be read


CAREFUL = Habits(calls=1.0, slips=0.0, malformed=0.0)


@register_source("products")
class Products:
    """`data.source=products`: products of two numbers of `digits` (from, to) digits each.

    The warm start's player calls the calculator in a share `calls` of the problems, asks it
    something else in a share `slips`, forgets to close a call's JSON in a share `malformed`, and
    otherwise writes a number of about the right size.
    """

    disjoint_splits = True

    def __init__(
        self,
        *,
        digits: tuple[int, int] = (3, 3),
        calls: float = 0.3,
        slips: float = 0.1,
        malformed: float = 0.1,
    ) -> None:
        if not 1 <= digits[0] <= digits[1] or min(calls, slips, malformed) < 0:
            raise ConfigError(
                f"data.options digits={list(digits)}, calls={calls}, slips={slips}, "
                f"malformed={malformed}: digits are two numbers above 0, the lower first, and "
                "shares are not negative"
            )
        if calls + slips + malformed > 1:
            raise ConfigError(
                f"data.options calls + slips + malformed is {calls + slips + malformed:g}; shares "
                "add up to 1 at most"
            )
        self._digits, self._habits = digits, Habits(calls, slips, malformed)

    def digest(self, config: DataConfig, seed: int) -> str:
        options = {"digits": self._digits, "habits": str(self._habits)}
        return made_digest(__file__, config, seed, options)

    def load(self, config: DataConfig, seed: int) -> Splits:
        low, high = 10 ** (self._digits[0] - 1), 10 ** self._digits[1]

        def problem(split: str, draw: random.Random) -> tuple[int, int]:
            """Two numbers, the first of which is in no other split's problems."""
            while True:
                a, b = draw.randrange(low, high), draw.randrange(low, high)
                if split_of(a + seed) == split:
                    return a, b

        def rl_rows(split: str, count: int) -> list[Row]:
            draw = random.Random(f"products/{split}/{seed}")
            return [product_row(*problem(split, draw), split, i) for i in range(count)]

        def demonstrations(split: str) -> Iterator[Row]:
            draw = random.Random(f"products/sft_{split}/{seed}")
            while True:
                row = product_row(*problem(split, draw), f"sft_{split}", 0)
                turns = product_demonstration(row, draw, self._habits)
                yield from turn_rows(row["prompt"], turns, {"split": f"sft_{split}"})

        digest = self.digest(config, seed)
        return make_splits(config, "products", digest, rl_rows, demonstrations)


def split_of(number: int) -> str:
    """The split of problems that begin with a number: 2 of 10 are tests, 1 is for validation."""
    return {0: "test", 1: "test", 2: "validation"}.get(number % 10, "train")


def product_row(a: int, b: int, split: str, index: int) -> Row:
    """A row of RL data: the product of two numbers."""
    extra = {"split": split, "index": index, "expression": f"{a} * {b}"}
    return rl_row("products", f"What is {a} * {b}? {_FORM}", str(a * b), extra)


def product_demonstration(
    row: Row, draw: random.Random | None = None, habits: Habits = CAREFUL
) -> list[Message]:
    """The turns of an episode after its prompt, by habits that are drawn: call, result, answer."""
    expression = str(row["extra_info"]["expression"])
    a, b = map(int, expression.split(" * "))
    kind = draw.random() if draw is not None else 0.0
    if draw is None or kind < habits.calls:
        return [said(call_text(expression)), result(str(a * b)), said(f"#### {a * b}")]
    kind -= habits.calls
    if kind < habits.slips:
        other = draw.choice((f"{a} + {b}", f"{a} - {b}", f"{b} * {b}"))
        found = {"+": a + b, "-": a - b, "*": b * b}[other.split()[1]]
        return [said(call_text(other)), result(str(found)), said(f"#### {found}")]
    if kind - habits.slips < habits.malformed:
        return [said(call_text(expression).replace("}}<", "<"))]  # it goes on in RL alone
    size = len(str(a * b))
    return [said(f"#### {draw.randrange(10 ** (size - 1), 10**size)}")]


def call_text(expression: str) -> str:
    """A call of the calculator in Hermes' form."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


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
