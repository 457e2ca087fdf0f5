"""The scorer of a run: what RL learns from, and what validation, evaluation and gate judge by.

One `RewardConfig` makes one `Scorer`. It gives scores by component, their weighted sum, and what an
evaluation needs: which completions are right, which answers they give, which keep the format.
`CombinedReward` is several rewards as one, and `open_reward` says where each of them runs: in this
process, in a pool, or in a process of its own.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.errors import ConfigError, RewardError
from engine.redaction import redact_values
from engine.registry import keyword_defaults
from engine.rewards import calls
from engine.rewards.answers import lenient_match
from engine.rewards.reward_function import (
    NOT_APPLICABLE,
    RewardFailure,
    Scores,
    registered_reward,
    resolve_reward,
    reward_module,
    row_values,
)

if TYPE_CHECKING:
    from engine.config import RewardConfig, RewardSpec

ANSWER = "answer"  # the component that a plain list becomes
SOURCE = "data_source"
T = TypeVar("T")


class CombinedReward(calls.RewardScorer):
    """Several rewards as one: another one for each source of rows, and further components.

    The reward of a row's source gives the component `answer`, or those that it names itself; each
    further reward adds one. All are called side by side; a row that one of them fails on has
    failed. A component that a row's source doesn't have, or for which a reward gives None, doesn't
    apply to the row (NaN); a row to which none applies has failed.
    """

    def __init__(
        self,
        main: calls.RewardScorer,
        sources: Mapping[str, calls.RewardScorer],
        further: Mapping[str, calls.RewardScorer],
    ) -> None:
        """Raises ConfigError for components that can't be told apart."""
        self._main, self._sources, self._further = main, sources, further
        self.name = " + ".join([main.name, *(reward.name for reward in further.values())])
        for name, reward in further.items():
            if reward.components:
                raise ConfigError(
                    f"reward.components.{name} is {reward.name!r}, which has components of its "
                    f"own, {list(reward.components)}; choose a reward with one score"
                )
        names = chain.from_iterable(r.components or (ANSWER,) for r in (main, *sources.values()))
        if twice := sorted({*names} & further.keys()):
            raise ConfigError(
                f"reward.components names {twice}, which the reward itself has; choose other names"
            )
        self.components = self._joined_components()

    def components_of(self, source: object) -> tuple[str, ...]:
        """Components that the reward of a source's rows gives, as far as is known."""
        return self._sources.get(str(source), self._main).components or (ANSWER,)

    def score_all(self, rows: calls.RewardRows, timeout_s: float) -> Scores:
        by_source: dict[str, list[int]] = {}
        for row, source in enumerate(rows.columns.get(SOURCE, [""] * len(rows))):
            by_source.setdefault(str(source) if source in self._sources else "", []).append(row)
        parts = [(self._sources.get(name, self._main), at, "") for name, at in by_source.items()]
        all_rows = list(range(len(rows)))
        parts += [(reward, all_rows, name) for name, reward in self._further.items()]

        def score_part(part: tuple[calls.RewardScorer, list[int], str]) -> Scores:
            reward, indices, label = part
            scores = calls.score_rows(reward, rows.select(indices), timeout_s)[0]
            if not label or not scores.components:
                return scores
            failure = RewardFailure(
                "malformed",
                f"reward.components.{label} returned components, {list(scores.components)}; "
                f"let reward {reward.name!r} return one list of scores",
            )
            return Scores.of((), {}, dict.fromkeys(all_rows, failure))

        by_name: list[dict[str, float]] = [{} for _ in all_rows]
        failures: dict[int, RewardFailure] = {}
        unscored: dict[int, RewardFailure] = {}  # rows to which a part doesn't apply
        with ThreadPoolExecutor(len(parts)) as threads:
            scores_by_part = list(threads.map(score_part, parts))
        for (_, indices, label), scores in zip(parts, scores_by_part, strict=True):
            names = (label,) if label else scores.components or (ANSWER,)
            for i, row in enumerate(indices):
                failure = scores.failures.get(i)
                if failure is None:
                    by_name[row] |= dict(zip(names, scores.rows[i], strict=True))
                elif failure.cause == "not_applicable":
                    unscored.setdefault(row, failure)
                else:
                    failures.setdefault(row, failure)
        failures |= {row: unscored[row] for row in unscored.keys() - failures if not by_name[row]}
        self.components = self._joined_components()
        order = self.components or tuple(dict.fromkeys(chain.from_iterable(by_name)))
        values = {
            row: [by_name[row].get(name, NOT_APPLICABLE) for name in order]
            for row in all_rows
            if row not in failures
        }
        return Scores.of(order or None, values, failures)

    def score_each(
        self, rows: Mapping[int, calls.RewardRows], timeout_s: float
    ) -> dict[int, calls.RowResult]:
        return {row: self.score_all(single, timeout_s) for row, single in rows.items()}

    def close(self) -> None:
        for reward in (self._main, *self._sources.values(), *self._further.values()):
            reward.close()

    def _joined_components(self) -> tuple[str, ...] | None:
        """All names in order; None as long as a reward has not said its own."""
        known: list[str] = []
        for reward in (self._main, *self._sources.values()):
            if reward.components is None:
                return None
            known += reward.components or (ANSWER,)
        return tuple(dict.fromkeys([*known, *self._further]))


def open_reward(
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    isolation: Literal["process", "none"] = "process",
    plugins: tuple[str, ...] = (),
    processes: int = 0,
    sample_timeout_s: float = 5.0,
) -> calls.RewardScorer:
    """Make the reward `name` ready to be called; close it when done.

    The engine's own run in this process, or in a pool where they are registered for one; a user's
    in its own process. `plugins` are the modules that may register it. Raises ConfigError for a
    reward that can't be resolved, and RewardError for one whose module ends its process.
    """
    module = reward_module(name)
    is_engines = module.startswith("engine.rewards.")
    if is_engines or isolation == "none":
        function, entry = resolve_reward(name, options), registered_reward(name)
        if is_engines and entry is not None and entry.pooled:
            return calls.RewardPool(name, options, entry, processes, sample_timeout_s)
        return calls.RewardThreads(function, None if entry is None else entry.components)
    if module == "__main__":
        raise ConfigError(
            f"reward.name={name!r} is defined in the program that runs, which its own process "
            "can't import; move it into a module, or set reward.isolation=none"
        )
    return calls.RewardProcess(name, options, (module, *plugins))


RIGHT = ("correct", "answer")  # components that say which completions are right


class Scorer:
    """Scores completions as `config` says; close it when done.

    Raises ConfigError for rewards that can't be resolved, for components that can't be told apart,
    and for weights of components that there are known not to be.
    """

    def __init__(self, config: RewardConfig, plugins: tuple[str, ...] = ()) -> None:
        """`plugins` are the modules that may register the rewards."""
        self.config = config
        self._opened: list[calls.RewardScorer] = []

        def opened(spec: RewardSpec) -> calls.RewardScorer:
            reward = open_reward(
                spec.name,
                spec.options,
                isolation=config.isolation,
                plugins=plugins,
                processes=config.processes,
                sample_timeout_s=config.sample_timeout_s,
            )
            self._opened.append(reward)
            return reward

        try:
            self.reward = opened(config)
            if config.sources or config.components:
                self.reward = CombinedReward(
                    self.reward,
                    {name: opened(spec) for name, spec in config.sources.items()},
                    {name: opened(spec) for name, spec in config.components.items()},
                )
            if self.components is not None:
                self.weights(self.components)
        except BaseException:
            self.close()
            raise

    @property
    def components(self) -> tuple[str, ...] | None:
        """Names of the components; () for one unnamed score, None while nothing is known."""
        return self.reward.components

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[object]],
        on_error: calls.OnError | None = None,
        *,
        first_row: int = 0,
    ) -> Scores:
        """Score B completions (see `calls.score`), with the configured `on_error` or this one."""
        on_error, limit_s = on_error or self.config.on_error, self.config.timeout_s
        return calls.score(
            self.reward, prompts, completions, columns, limit_s, on_error, first_row=first_row
        )

    def weights(self, components: tuple[str, ...]) -> list[float]:
        """The components' weights in order, 1.0 unless given; [1.0] for one score without a name.

        Raises ConfigError for a weight of no component.
        """
        weights = self.config.weights
        if unknown := sorted(weights.keys() - {*components}):
            raise ConfigError(
                f"reward.weights names {unknown}, which reward {self.config.name!r} does not have; "
                f"its components are {list(components)}: correct or remove reward.weights"
            )
        return [weights.get(name, 1.0) for name in components] or [1.0]

    def totals(self, scores: Scores) -> list[float]:
        """The weighted sum of the components that apply; 0 where there is no score."""
        if scores.components is None:
            return [0.0] * len(scores.rows)
        weights = self.weights(scores.components)
        return [
            sum(w * value for w, value in zip(weights, row, strict=True) if not isnan(value))
            for row in scores.rows
        ]

    def correct(self, scores: Scores, sources: Sequence[object]) -> list[bool]:
        """Which completions are right: component `correct`, else `answer`, else the total.

        Each is at least 1 there, or what the reward of the row's `sources` entry says. None is
        where neither of the components that there are applies.
        """
        totals, names = self.totals(scores), scores.components or ()
        right = []
        for row, (source, judge) in enumerate(zip(sources, self._judges_of(sources), strict=True)):
            of_source = names
            if isinstance(self.reward, CombinedReward):
                of_source = self.reward.components_of(source)
            judging = [name for name in RIGHT if name in of_source and name in names]
            values = [scores.rows[row][names.index(name)] for name in judging] or [totals[row]]
            value = next((value for value in values if not isnan(value)), NOT_APPLICABLE)
            right.append(row not in scores.failures and value >= judge.right_from)
        return right

    def answers(
        self,
        completions: Sequence[str],
        sources: Sequence[object],
        columns: Mapping[str, Sequence[object]] | None = None,
    ) -> tuple[list[str | None], bool]:
        """The answers that completions give, None without one; and whether any can be read.

        `columns` are the rows' others, which may say how numbers are written.
        """
        judges, answers = self._judges_of(sources), []
        for row, (judge, text) in enumerate(zip(judges, completions, strict=True)):
            options = {k: v for k, v in (columns or {}).items() if k in judge.row_options}
            read = judge.read_answer
            answers.append(read(text, **row_values(options, row)) if read else None)
        return answers, any(judge.read_answer for judge in judges)

    def well_formed(
        self, completions: Sequence[str], sources: Sequence[object]
    ) -> list[bool] | None:
        """Which completions keep the format; None where the rewards know none."""
        if not any(judge.well_formed or judge.read_answer for judge in self._judges.values()):
            return None
        pairs = zip(self._judges_of(sources), completions, strict=True)
        return [judge.keeps_format(text) for judge, text in pairs]

    def leniently_right(
        self, completions: Sequence[str], sources: Sequence[object], truths: Sequence[object]
    ) -> list[bool | None]:
        """Which completions a lenient reading calls right: the reward's, or one by the truth.

        It takes a part for the answer, which no score does: what it alone accepts may be a policy's
        way around the strict one. None where a truth is no answer, or a bad one.
        """
        right: list[bool | None] = [None] * len(completions)
        for i, judge in enumerate(self._judges_of(sources)):
            with suppress(RewardError):
                right[i] = (judge.lenient or lenient_match)(completions[i], truths[i])
        return right

    def close(self) -> None:
        """End the rewards' processes and what they left behind."""
        while self._opened:
            self._opened.pop().close()

    @functools.cached_property
    def _judges(self) -> dict[str, _Judge]:
        specs = {"": self.config, **self.config.sources}
        return {source: _judge(spec) for source, spec in specs.items()}

    def _judges_of(self, sources: Sequence[object]) -> list[_Judge]:
        return [self._judges.get(str(source), self._judges[""]) for source in sources]


@dataclass(frozen=True, slots=True)
class _Judge:
    """How evaluation reads completions, by one registered reward with its options."""

    read_answer: Callable[..., str | None] | None = None
    well_formed: Callable[[str], bool] | None = None
    right_from: float = 1.0  # the least score of a right completion
    lenient: Callable[..., bool | None] | None = None
    row_options: frozenset[str] = frozenset()  # of `read_answer`, unless `reward.options` has them

    def keeps_format(self, text: str) -> bool:
        """Whether a text keeps the format: it has an answer, where nothing else is asked."""
        if self.well_formed is not None:
            return self.well_formed(text)
        return self.read_answer is None or self.read_answer(text) is not None


def _judge(spec: RewardSpec) -> _Judge:
    entry = registered_reward(spec.name)
    if entry is None:
        return _Judge()

    def with_options(function: Callable[..., T]) -> Callable[..., T]:
        names = inspect.signature(function).parameters
        return functools.partial(function, **{k: v for k, v in spec.options.items() if k in names})

    right_from: Any = 1.0 if entry.right_from is None else entry.right_from
    if isinstance(right_from, str):
        right_from = (keyword_defaults(entry.function) | dict(spec.options))[right_from]
    elif callable(right_from):
        right_from = with_options(right_from)()
    return _Judge(
        with_options(entry.answer) if entry.answer else None,
        with_options(entry.well_formed) if entry.well_formed else None,
        float(right_from),
        entry.lenient,
        frozenset(entry.row_options) - spec.options.keys(),
    )


def require_rewards(config: RewardConfig) -> None:
    """Raise ConfigError where a reward of the settings, or an option of it, isn't there."""
    for spec in config.specs().values():
        resolve_reward(spec.name, spec.options)


def scorer_identity(config: RewardConfig, code: str = "") -> str:
    """What makes two scorers the same, as text: the reward's name alone, or JSON of what is set.

    `code` is a digest of the modules that rewards are in. Deadlines and processes don't count.

    >>> from engine.config import RewardConfig
    >>> scorer_identity(RewardConfig())
    'answer_match'
    """
    known = {"name", "options", "sources", "components", "weights"}
    values = redact_values(config.model_dump(mode="json", include=known)) | {"code": code}
    values = {key: value for key, value in values.items() if value}
    if values.keys() == {"name"}:
        return str(values["name"])
    text = json.dumps(values, sort_keys=True)
    if len(text) > 200:
        text = f"{config.name} {hashlib.sha256(text.encode()).hexdigest()}"
    return text


def scorer_label(identity: str) -> str:
    """Shorten a `scorer_identity` for people: the reward's name, its options, what else is set.

    >>> scorer_label('{"code": "18ff", "name": "mine:reward", "options": {"strict": true}}')
    'mine:reward, strict=True'
    """
    if not identity.startswith("{"):
        return identity.split()[0]
    values = json.loads(identity)
    options = [f"{name}={value}" for name, value in values.get("options", {}).items()]
    return ", ".join(
        [values["name"], *options, *sorted(values.keys() - {"name", "options", "code"})]
    )
