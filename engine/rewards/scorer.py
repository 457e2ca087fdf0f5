"""The scorer of a run: what RL learns from, and what validation, evaluation and gate judge by.

Several rewards as one, and where each of them runs: in this process, in a pool, or in a process
of its own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from engine.errors import ConfigError
from engine.redaction import redact_values
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


# Several rewards as one: another one for each source of rows, and further components.
#
# The reward of a row's source gives the component `answer`, or those that it names itself; each
# further reward adds a component of its own. What they weigh is not known here.

ANSWER = "answer"  # the component that a plain list becomes
SOURCE = "data_source"


class CombinedReward:
    """Calls each reward on its rows, all side by side; a row that one of them fails on has failed.

    A component that a row's source doesn't have is 0 there.
    """

    def __init__(
        self,
        main: RewardScorer,
        sources: Mapping[str, RewardScorer],
        further: Mapping[str, RewardScorer],
    ) -> None:
        """Raises ConfigError for components that can't be told apart."""
        self._main, self._sources, self._further = main, dict(sources), dict(further)
        self.name = " + ".join([main.name, *(one.name for one in further.values())])
        self._named = {id(one): one.components for one in self._all()}
        for name, one in self._further.items():
            if one.components:
                raise ConfigError(
                    f"reward.components.{name} is {one.name!r}, which has components of its own, "
                    f"{list(one.components)}; choose a reward with one score"
                )
        own = {name for one in self._answering() for name in one.components or (ANSWER,)}
        if twice := sorted(own & self._further.keys()):
            raise ConfigError(
                f"reward.components names {twice}, which the reward itself has; choose other names"
            )

    @property
    def components(self) -> tuple[str, ...] | None:
        """All names in order; None as long as a reward has not said its own."""
        own: dict[str, None] = {}
        for one in self._answering():
            names = self._named[id(one)]
            if names is None:
                return None
            own |= dict.fromkeys(names or (ANSWER,))
        return (*own, *self._further)

    def components_of(self, source: object) -> tuple[str, ...]:
        """Those that the reward of a source's rows gives, as far as is known, without further."""
        names = self._named[id(self._sources.get(str(source), self._main))]
        return names or (ANSWER,)

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        parts = self._parts(rows)
        with ThreadPoolExecutor(max(1, len(parts))) as threads:
            done = list(
                threads.map(
                    lambda part: score_rows(
                        part[0], rows.select(part[1]), timeout_s, self._named[id(part[0])]
                    )[0],
                    parts,
                )
            )
        found: list[dict[str, float]] = [{} for _ in range(len(rows))]
        failures: dict[int, RewardFailure] = {}
        for (scorer, places, label), scores in zip(parts, done, strict=True):
            if scores.components is not None:
                self._named[id(scorer)] = scores.components
            names = self._labels(scorer, label, scores.components)
            for row, place in enumerate(places):
                if row in scores.failures:
                    failures.setdefault(place, scores.failures[row])
                else:
                    found[place] |= dict(zip(names, scores.rows[row], strict=True))
        order = self.components or tuple(dict.fromkeys(name for row in found for name in row))
        if order:
            require_components(self.name, order, components)
        values = {
            row: [found[row].get(name, 0.0) for name in order]
            for row in range(len(rows))
            if row not in failures
        }
        return Scores.of(order or None, values, failures)

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        results: dict[int, RowResult] = {}
        for row, one in rows.items():
            scores = self.score_all(one, timeout_s, None)
            results[row] = scores.failures.get(0, scores)
        return results

    def close(self) -> None:
        for one in self._all():
            one.close()

    def _answering(self) -> list[RewardScorer]:
        return [self._main, *self._sources.values()]

    def _all(self) -> list[RewardScorer]:
        return [*self._answering(), *self._further.values()]

    def _parts(self, rows: RewardRows) -> list[tuple[RewardScorer, list[int], str]]:
        """Who scores which rows; with the component's name, for a further reward."""
        sources = rows.columns.get(SOURCE, [""] * len(rows))
        places: dict[str, list[int]] = {}
        for row, source in enumerate(sources):
            places.setdefault(str(source) if source in self._sources else "", []).append(row)
        parts = [(self._sources.get(name, self._main), at, "") for name, at in places.items()]
        everywhere = list(range(len(rows)))
        return [*parts, *((one, everywhere, name) for name, one in self._further.items())]

    def _labels(
        self, scorer: RewardScorer, label: str, names: tuple[str, ...] | None
    ) -> Sequence[str]:
        if not label:
            return names or (ANSWER,)
        if names:
            raise RewardFailure(
                "malformed",
                f"reward.components.{label} returned components, {list(names)}; let reward "
                f"{scorer.name!r} return one list of scores",
            )
        return (label,)


# Where a reward runs: in this process, in a pool of processes, or in a process of its own.

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


# The scorer of a run: what RL learns from, and what validation, evaluation and gate judge by.
#
# One `RewardConfig` makes one scorer. It gives scores by component, their weighted sum, and what
# an
# evaluation needs: which completions are right, which answers they give, which keep the format.

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
        try:
            self.reward = self._open(config, plugins)
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
        least = self._by_source(sources, _right_from)
        right = []
        for row, (source, bound) in enumerate(zip(sources, least, strict=True)):
            own = self._components_of(source, names)
            by = next((names.index(name) for name in RIGHT if name in own and name in names), None)
            value = totals[row] if by is None else scores.rows[row][by]
            right.append(row not in scores.failures and value >= bound)
        return right

    def answers(
        self, completions: Sequence[str], sources: Sequence[object]
    ) -> tuple[list[str | None], bool]:
        """The answers that completions give, None without one; and whether any can be read."""
        readers = self._by_source(sources, _reader)
        found = [
            read(text) if read else None for read, text in zip(readers, completions, strict=True)
        ]
        return found, any(readers)

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

    def _components_of(self, source: object, names: tuple[str, ...]) -> tuple[str, ...]:
        """The components that rows of a source have, of all that there are."""
        if isinstance(self.reward, CombinedReward):
            return self.reward.components_of(source)
        return names

    def _open(self, config: RewardConfig, plugins: tuple[str, ...]) -> RewardScorer:
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

        main = opened(config)
        if not config.sources and not config.components:
            return main
        sources = {name: opened(spec) for name, spec in config.sources.items()}
        further = {name: opened(spec) for name, spec in config.components.items()}
        return CombinedReward(main, sources, further)

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
    return None if entry is None else _with_options(entry.answer, spec)


def _form(spec: RewardSpec) -> Callable[[str], bool] | None:
    """What says whether a text keeps the format: it has an answer, where nothing else does."""
    entry = registered_reward(spec.name)
    if entry is None:
        return None
    if entry.well_formed is not None:
        return _with_options(entry.well_formed, spec)
    read = _with_options(entry.answer, spec)
    return None if read is None else lambda text: read(text) is not None


def _right_from(spec: RewardSpec) -> float:
    entry = registered_reward(spec.name)
    if entry is None or entry.right_from is None:
        return 1.0
    least = _with_options(entry.right_from, spec)
    return 1.0 if least is None else float(least())


def _with_options(function: Callable[..., R] | None, spec: RewardSpec) -> Callable[..., R] | None:
    """The function with those of a reward's options that are keywords of it."""
    if function is None:
        return None
    names = inspect.signature(function).parameters
    options = {name: value for name, value in spec.options.items() if name in names}
    return lambda *arguments: function(*arguments, **options)
