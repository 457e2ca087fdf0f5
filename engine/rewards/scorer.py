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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from engine.errors import ConfigError
from engine.redaction import redact_values
from engine.registry import keyword_defaults
from engine.rewards.calls import (
    OnError,
    RewardRows,
    RewardScorer,
    RewardThreads,
    RowResult,
    score,
    score_rows,
)
from engine.rewards.process import RewardPool, RewardProcess
from engine.rewards.reward_function import (
    RewardFailure,
    Scores,
    declared_components,
    ordered_weights,
    registered_reward,
    require_components,
    resolve_reward,
    reward_module,
)

if TYPE_CHECKING:
    from engine.config import RewardConfig, RewardSpec


ANSWER = "answer"  # the component that a plain list becomes
SOURCE = "data_source"


class CombinedReward:
    """Several rewards as one: another one for each source of rows, and further components.

    The reward of a row's source gives the component `answer`, or those that it names itself; each
    further reward adds a component of its own. All are called side by side; a row that one of them
    fails on has failed. A component that a row's source doesn't have is 0 there.
    """

    def __init__(
        self,
        main: RewardScorer,
        sources: Mapping[str, RewardScorer],
        further: Mapping[str, RewardScorer],
    ) -> None:
        """Raises ConfigError for components that can't be told apart."""
        self._main, self._sources, self._further = main, dict(sources), dict(further)
        self.name = " + ".join([main.name, *(reward.name for reward in further.values())])
        self._by_source = [main, *self._sources.values()]
        self._all = [*self._by_source, *self._further.values()]
        self._components = {id(reward): reward.components for reward in self._all}  # as known
        for name, reward in self._further.items():
            if reward.components:
                raise ConfigError(
                    f"reward.components.{name} is {reward.name!r}, which has components of its "
                    f"own, {list(reward.components)}; choose a reward with one score"
                )
        names = {name for reward in self._by_source for name in reward.components or (ANSWER,)}
        if twice := sorted(names & self._further.keys()):
            raise ConfigError(
                f"reward.components names {twice}, which the reward itself has; choose other names"
            )

    @property
    def components(self) -> tuple[str, ...] | None:
        """All names in order; None as long as a reward has not said its own."""
        known: dict[str, None] = {}
        for reward in self._by_source:
            names = self._components[id(reward)]
            if names is None:
                return None
            known |= dict.fromkeys(names or (ANSWER,))
        return (*known, *self._further)

    def components_of(self, source: object) -> tuple[str, ...]:
        """Those that the reward of a source's rows gives, as far as is known, without further."""
        names = self._components[id(self._sources.get(str(source), self._main))]
        return names or (ANSWER,)

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        parts = self._parts(rows)

        def score_part(part: tuple[RewardScorer, list[int], str]) -> Scores:
            reward, indices, _ = part
            names = self._components[id(reward)]
            return score_rows(reward, rows.select(indices), timeout_s, names)[0]

        with ThreadPoolExecutor(max(1, len(parts))) as threads:
            scores_by_part = list(threads.map(score_part, parts))
        by_name: list[dict[str, float]] = [{} for _ in range(len(rows))]
        failures: dict[int, RewardFailure] = {}
        for (reward, indices, label), scores in zip(parts, scores_by_part, strict=True):
            if scores.components is not None:
                self._components[id(reward)] = scores.components
            if label and scores.components:
                raise RewardFailure(
                    "malformed",
                    f"reward.components.{label} returned components, {list(scores.components)}; "
                    f"let reward {reward.name!r} return one list of scores",
                )
            names = (label,) if label else scores.components or (ANSWER,)
            for i, row in enumerate(indices):
                if i in scores.failures:
                    failures.setdefault(row, scores.failures[i])
                else:
                    by_name[row] |= dict(zip(names, scores.rows[i], strict=True))
        order = self.components or tuple(dict.fromkeys(name for row in by_name for name in row))
        if order:
            require_components(self.name, order, components)
        values = {
            row: [by_name[row].get(name, 0.0) for name in order]
            for row in range(len(rows))
            if row not in failures
        }
        return Scores.of(order or None, values, failures)

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        results: dict[int, RowResult] = {}
        for row, single in rows.items():
            scores = self.score_all(single, timeout_s, None)
            results[row] = scores.failures.get(0, scores)
        return results

    def close(self) -> None:
        for reward in self._all:
            reward.close()

    def _parts(self, rows: RewardRows) -> list[tuple[RewardScorer, list[int], str]]:
        """Who scores which rows; with the component's name, for a further reward."""
        sources = rows.columns.get(SOURCE, [""] * len(rows))
        by_source: dict[str, list[int]] = {}
        for row, source in enumerate(sources):
            by_source.setdefault(str(source) if source in self._sources else "", []).append(row)
        parts = [(self._sources.get(name, self._main), at, "") for name, at in by_source.items()]
        every_row = list(range(len(rows)))
        return [*parts, *((reward, every_row, name) for name, reward in self._further.items())]


Isolation: TypeAlias = Literal["process", "none"]


def open_reward(
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    isolation: Isolation = "process",
    plugins: tuple[str, ...] = (),
    processes: int = 0,
    sample_timeout_s: float = 5.0,
) -> RewardScorer:
    """Make the reward `name` ready to be called; close it when done.

    The engine's own run in this process, or in a pool where they are registered for one; a user's
    in its own process. `plugins` are the modules that may register it. Raises ConfigError for a
    reward that can't be resolved, and RewardError for one whose module ends its process.
    """
    module = reward_module(name)
    if module.startswith("engine.rewards."):
        function, entry = resolve_reward(name, options), registered_reward(name)
        if entry is None or not entry.pooled:
            return RewardThreads(function, declared_components(name))
        return RewardPool(
            name,
            options,
            module,
            components=entry.components,
            imports=entry.imports,
            processes=processes,
            sample_timeout_s=sample_timeout_s,
        )
    if isolation == "none":
        return RewardThreads(resolve_reward(name, options), declared_components(name))
    if module == "__main__":
        raise ConfigError(
            f"reward.name={name!r} is defined in the program that runs, which its own process "
            "can't import; move it into a module, or set reward.isolation=none"
        )
    return RewardProcess(name, options, (module, *plugins))


R = TypeVar("R")
RIGHT = ("correct", "answer")  # components that say which completions are right


class Scorer:
    """Scores completions as `config` says; close it when done.

    Raises ConfigError for rewards that can't be resolved, for components that can't be told apart,
    and for weights of components that there are known not to be.
    """

    def __init__(self, config: RewardConfig, plugins: tuple[str, ...] = ()) -> None:
        """`plugins` are the modules that may register the rewards."""
        self.config = config
        self._opened: list[RewardScorer] = []

        def opened(spec: RewardSpec) -> RewardScorer:
            self._opened.append(
                open_reward(
                    spec.name,
                    spec.options,
                    isolation=config.isolation,
                    plugins=plugins,
                    processes=config.processes,
                    sample_timeout_s=config.sample_timeout_s,
                )
            )
            return self._opened[-1]

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
        self._known = self.components

    @property
    def components(self) -> tuple[str, ...] | None:
        """Their names; () for one score without a name, None as long as nothing is known."""
        return self.reward.components

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[object]],
        on_error: OnError | None = None,
    ) -> Scores:
        """Score B completions (see `runner.score`); `on_error` stands in for the configured one."""
        scores = score(
            self.reward,
            prompts,
            completions,
            columns,
            self.config.timeout_s,
            components=self._known,
            on_error=on_error or self.config.on_error,
        )
        self._known = scores.components or self._known
        return scores

    def weights(self, components: tuple[str, ...]) -> list[float]:
        """The components' weights in order; [1.0] for one score without a name."""
        return ordered_weights(self.config.name, components, self.config.weights)

    def totals(self, scores: Scores) -> list[float]:
        """The weighted sum of each completion's components; 0 where there is no score."""
        if scores.components is None:
            return [0.0] * len(scores.rows)
        weights = self.weights(scores.components)
        return [
            sum(w * value for w, value in zip(weights, row, strict=True)) for row in scores.rows
        ]

    def correct(self, scores: Scores, sources: Sequence[object]) -> list[bool]:
        """Which completions are right: component `correct`, else `answer`, else the total.

        Each is at least 1 there, or what the reward of the row's `sources` entry says.
        """
        totals, names = self.totals(scores), scores.components or ()
        thresholds = self._by_source(sources, _right_from)
        right = []
        for row, (source, threshold) in enumerate(zip(sources, thresholds, strict=True)):
            of_source = names
            if isinstance(self.reward, CombinedReward):
                of_source = self.reward.components_of(source)
            judging = [name for name in RIGHT if name in of_source and name in names]
            value = scores.rows[row][names.index(judging[0])] if judging else totals[row]
            right.append(row not in scores.failures and value >= threshold)
        return right

    def answers(
        self, completions: Sequence[str], sources: Sequence[object]
    ) -> tuple[list[str | None], bool]:
        """The answers that completions give, None without one; and whether any can be read."""
        readers = self._by_source(sources, _reader)
        answers = [
            read(text) if read else None for read, text in zip(readers, completions, strict=True)
        ]
        return answers, any(readers)

    def well_formed(
        self, completions: Sequence[str], sources: Sequence[object]
    ) -> list[bool] | None:
        """Which completions keep the format; None where the rewards know none."""
        checks = self._by_source(sources, _form)
        if not any(_form(spec) for spec in (self.config, *self.config.sources.values())):
            return None
        return [not check or check(text) for check, text in zip(checks, completions, strict=True)]

    def close(self) -> None:
        """End the rewards' processes and what they left behind."""
        while self._opened:
            self._opened.pop().close()

    def _by_source(self, sources: Sequence[object], of: Callable[[RewardSpec], R]) -> list[R]:
        """What `of` makes of the spec of each row's source, made once a spec."""
        main = of(self.config)
        others = {name: of(spec) for name, spec in self.config.sources.items()}
        return [others.get(str(source), main) for source in sources]


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
    values = redact_values(config.model_dump(mode="json", include=known))
    values = {key: value for key, value in values.items() if value} | (
        {"code": code} if code else {}
    )
    if values.keys() == {"name"}:
        return str(values["name"])
    text = json.dumps(values, sort_keys=True)
    return (
        text if len(text) <= 200 else f"{config.name} {hashlib.sha256(text.encode()).hexdigest()}"
    )


def _reader(spec: RewardSpec) -> Callable[[str], str | None] | None:
    entry = registered_reward(spec.name)
    return None if entry is None or not entry.answer else _with_options(entry.answer, spec)


def _form(spec: RewardSpec) -> Callable[[str], bool] | None:
    """What says whether a text keeps the format: it has an answer, where nothing else does."""
    entry = registered_reward(spec.name)
    if entry is not None and entry.well_formed is not None:
        return _with_options(entry.well_formed, spec)
    read = _reader(spec)
    return None if read is None else lambda text: read(text) is not None


def _right_from(spec: RewardSpec) -> float:
    """The least score of a right completion."""
    entry = registered_reward(spec.name)
    if entry is None or entry.right_from is None:
        return 1.0
    if not isinstance(entry.right_from, str):
        return float(_with_options(entry.right_from, spec)())
    options: Mapping[str, Any] = keyword_defaults(entry.function) | dict(spec.options)
    return float(options[entry.right_from])


def _with_options(function: Callable[..., R], spec: RewardSpec) -> Callable[..., R]:
    """The function with those of a reward's options that are keywords of it."""
    names = inspect.signature(function).parameters
    options = {name: value for name, value in spec.options.items() if name in names}
    return functools.partial(function, **options)
