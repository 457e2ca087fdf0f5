"""Rewards for programs: 1 where a Python solution passes all of its test cases.

The program is the last fenced block of a completion, or the whole text. It runs in a sandbox
(`sandbox`) of its own, and never meets the results that are expected of it. `read_tests` reads test
cases as data sets write them, as JSON text or values: input and output (APPS, TACO, verl,
LiveCodeBench), calls of `fn_name`, and assertions (MBPP, HumanEval); see docs/rewards.md.
"""

import ast
import json
import logging
import math
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from engine.errors import RewardError
from engine.rewards.reward_function import register_row_reward
from engine.rewards.sandbox import Limits, Sandbox, guest
from engine.rewards.sandbox.guest import Remote, ask

_CLOSE = 1e-6  # of two numbers, relative or absolute
_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LONGEST = 200_000  # characters of a program
logger = logging.getLogger("engine.rewards")


@dataclass(slots=True)
class Verdict:
    """Which tests a program passed, and the layers of containment, where they are known."""

    passed: list[bool] = field(default_factory=list)
    layers: tuple[str, ...] | None = None


# Three kinds of tests of one problem. `judge` runs them all within `seconds`, or with `stop` until
# one fails.


@dataclass(frozen=True, slots=True)
class InputOutput:
    """The program reads standard input and writes standard output, afresh for each test."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    def __len__(self) -> int:
        return len(self.inputs)

    def judge(self, program: str, limits: Limits, seconds: float, *, stop: bool) -> Verdict:
        verdict, until = Verdict(), time.monotonic() + seconds
        with Sandbox(limits) as sandbox:
            for stdin, expected in zip(self.inputs, self.outputs, strict=True):
                left = until - time.monotonic()
                if left <= 0:
                    break
                ended = sandbox.run(program, left, stdin)
                verdict.layers = ended.layers if verdict.layers is None else verdict.layers
                ok = ended.well and same_output(ended.output, expected)
                verdict.passed.append(ok)
                if ended.how == "lost" or (stop and not ok):
                    break
        return verdict


@dataclass(frozen=True, slots=True)
class Calls:
    """A function of the program is called; `name` may be a method, as `Solution.add`."""

    name: str
    inputs: Sequence[Sequence[object]]
    outputs: Sequence[object]

    def __len__(self) -> int:
        return len(self.inputs)

    def judge(self, program: str, limits: Limits, seconds: float, *, stop: bool) -> Verdict:
        verdict, until = Verdict(), time.monotonic() + seconds
        channel, program_end = socket.socketpair()
        with channel, Sandbox(limits, program_end) as sandbox:
            sandbox.begin("served", program, seconds)
            try:
                target = self._target(channel, until)
                for arguments, expected in zip(self.inputs, self.outputs, strict=True):
                    try:
                        details = guest.encode((tuple(arguments), {}), repr)
                        result = ask(channel, "call", target, details, until=until)
                        ok = not isinstance(result, Remote) and _is_right(result, expected)
                    except guest.Closed:
                        raise
                    except Exception:  # the program's own, or no value at all
                        ok = False
                    verdict.passed.append(ok)
                    if stop and not ok:
                        break
            except Exception:  # the sandbox has gone, or the program gives no such function
                verdict.passed.append(False)
            channel.close()
            verdict.layers = sandbox.end().layers
        return verdict

    def _target(self, channel: socket.socket, until: float) -> object:
        """A reference to the function that tests call; LookupError where the program has none."""
        names = guest.receive(channel, until - time.monotonic())
        first, _, method = self.name.partition(".")
        if not method and first not in names and "Solution" in names:  # LeetCode's form
            first, method = "Solution", first
        if first not in names:
            raise LookupError(self.name)
        function: Any = ask(channel, "name", first, until=until)
        return guest.reference_of(getattr(function(), method) if method else function)


@dataclass(frozen=True, slots=True)
class Assertions:
    """Python that calls what the program defines; each top-level assertion or call is a test."""

    text: str
    candidate: str  # what `candidate` stands for; empty: nothing

    def __len__(self) -> int:
        statements = ast.parse(self.text).body
        return sum(isinstance(statement, guest.TESTS) for statement in statements)

    def judge(self, program: str, limits: Limits, seconds: float, *, stop: bool) -> Verdict:
        for_program, for_tests = socket.socketpair()
        with Sandbox(limits, for_program) as judged, Sandbox(limits, for_tests) as tests:
            judged.begin("served", program, seconds)
            tests.begin("tests", self.text, seconds, candidate=self.candidate)
            ended = tests.end()
        try:
            passed = json.loads(ended.output) if ended.how == "itself" else []
        except ValueError:
            passed = []
        return Verdict([ok is True for ok in passed][: len(self)], ended.layers)


CodeTests: TypeAlias = InputOutput | Calls | Assertions


def read_tests(truth: object) -> CodeTests:
    """The tests of a ground truth; RewardError where it has none that can be read."""
    try:
        tests = _tests(_loaded(truth))
        if not len(tests):
            raise ValueError("it has none")
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        raise RewardError(
            f"ground_truth holds no test cases ({type(error).__name__}: {error}); "
            'give JSON with "inputs" and "outputs", assertions as Python text, or a list of those'
        ) from None
    return tests


def _tests(value: Any) -> CodeTests:
    if isinstance(value, Mapping):
        if "inputs" in value:
            return _pairs(value["inputs"], value["outputs"], value.get("fn_name"))
        keys = ("test", "test_list", "asserts")
        assertions = [value[key] for key in keys if value.get(key) is not None]
        if not assertions:
            raise ValueError(f"its keys are {sorted(map(str, value))}")
        text = f"{value.get('test_setup_code') or ''}\n{_text(assertions[0])}"
        entry_point = str(value.get("entry_point") or "")
        if entry_point and "check(" in text:
            text += f"\ncheck({entry_point})\n"
        return Assertions(text, entry_point)
    if isinstance(value, str) or all(isinstance(case, str) for case in value):
        return Assertions(_text(value), "")
    cases = list(value)
    name = next((case.get("fn_name") for case in cases if case.get("fn_name")), None)
    return _pairs([case["input"] for case in cases], [case["output"] for case in cases], name)


def _pairs(inputs: Iterable[Any], outputs: Iterable[Any], name: str | None) -> CodeTests:
    inputs, outputs = list(inputs), list(outputs)
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        arguments = [list(_call_arguments(text)) for text in inputs]
        return Calls(name, arguments, [_plain(_loaded(text)) for text in outputs])
    return InputOutput([_text(lines) for lines in inputs], [_text(lines) for lines in outputs])


def _loaded(value: object) -> object:
    """JSON text as its value; any other value, and any other text, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _call_arguments(value: object) -> Any:
    """A list of arguments; text has one a line, in JSON."""
    if isinstance(value, str):
        lines = [_plain(json.loads(line)) for line in value.strip().splitlines()]
        return lines[0] if len(lines) == 1 and isinstance(lines[0], list) else lines
    return _plain(value)


def _text(value: str | Iterable[object]) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _plain(value: object) -> object:
    """Arrays, as Parquet gives them, as lists; tuples too, as JSON has none."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs are the same but for blanks at ends of lines, and rounding."""
    lines, expected_lines = (
        [line.split() for line in text.strip().splitlines()] for text in (output, expected)
    )
    return len(lines) == len(expected_lines) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, expected_lines, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in expected and "e" not in expected.lower():  # whole numbers are exact
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=_CLOSE, abs_tol=_CLOSE)
    except ValueError:
        return False


def _is_right(result: object, expected: Any) -> bool:
    """Whether a result is the expected one, which may be alone in a list (APPS)."""
    alone = isinstance(expected, list) and len(expected) == 1
    return same_value(result, expected) or (alone and same_value(result, expected[0]))


def same_value(value: object, expected: object) -> bool:
    """Whether two results are the same; tuples are lists, and floats are close."""
    value, expected = _plain(value), _plain(expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        # JSON has no keys but strings.
        entries, others = ({str(k): v for k, v in d.items()} for d in (value, expected))
        return entries.keys() == others.keys() and all(
            same_value(entries[key], others[key]) for key in others
        )
    if isinstance(expected, float) and isinstance(value, int | float):
        close = math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
        return close and not isinstance(value, bool)
    return type(value) is type(expected) and bool(value == expected)


def program(text: str) -> str:
    """The program that a completion gives.

    >>> program("Try this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _FENCE.findall(text[-_LONGEST:])
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return str((python or [code for _, code in blocks] or [text])[-1])


def has_program(text: str) -> bool:
    """Whether a completion has a fenced block that is closed."""
    return text.count("```") >= 2


@register_row_reward("code", pooled=True, well_formed=has_program)
def code(
    completion: str,
    truth: object,
    *,
    timeout_s: float = 4.0,
    memory_mb: int = 512,
    partial: bool = False,
    weak: bool = False,
) -> float:
    """1.0 where a program passes all of its tests, else 0.0; with `partial` the share that passes.

    `timeout_s` is for all tests of a completion, and below `reward.sample_timeout_s`. A ground
    truth are test cases as `read_tests` reads them. Raises RewardError for one that has none, and
    where the host has neither seccomp nor a way to hide its files, unless `weak` allows that.
    """
    tests = read_tests(truth)
    limits = Limits(memory_mb=memory_mb)
    verdict = tests.judge(program(completion), limits, timeout_s, stop=not partial)
    require_containment(verdict.layers, weak)
    passed = sum(verdict.passed) / len(tests)
    return passed if partial else float(passed == 1)


@cache
def require_containment(layers: tuple[str, ...] | None, weak: bool) -> None:
    """Say once what locks programs in; raise RewardError where that is known to be too little."""
    if layers is None:
        return
    hides_files = "root" in layers or "landlock" in layers
    if "seccomp" in layers and hides_files:
        logger.info("programs run behind: %s", ", ".join(layers))
        return
    lacking = "seccomp" if hides_files else "namespaces or Landlock"
    described = ", ".join(layers) or "limits only"
    if not weak:
        raise RewardError(
            f"this host gives no {lacking}, so programs could reach what is not theirs (it gives: "
            f"{described}); run as root or on another host, or set reward.options.weak=true in a "
            "container of its own"
        )
    logger.warning("programs run without %s: %s", lacking, described)
