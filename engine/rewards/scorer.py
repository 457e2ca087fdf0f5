"""The scorer of a run: what RL learns from, and what validation, evaluation and gate judge by.

One `RewardConfig` makes one scorer. It gives scores by component, their weighted sum, and what an
evaluation needs: which completions are right, which answers they give, which keep the format.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from engine.redaction import redact_values
from engine.rewards.combined import CombinedReward
from engine.rewards.components import ordered_weights
from engine.rewards.opening import open_reward
from engine.rewards.registry import registered_reward, resolve_reward
from engine.rewards.result import Scores
from engine.rewards.runner import OnError, score
from engine.rewards.threads import RewardScorer

if TYPE_CHECKING:
    from engine.config import RewardConfig, RewardSpec

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
