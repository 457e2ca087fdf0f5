"""Several rewards as one: another one for each source of rows, and further components.

The reward of a row's source gives the component `answer`, or those that it names itself; each
further reward adds a component of its own. What they weigh is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.errors import ConfigError
from engine.rewards.call import RewardRows
from engine.rewards.result import RewardFailure, Scores, require_components
from engine.rewards.runner import score_rows
from engine.rewards.threads import RewardScorer, RowResult

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
