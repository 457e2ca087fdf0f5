"""The order in which rows are drawn: by epoch, from easy to hard, or from sources by weight.

Indices in, indices out; each order says where it is and goes on from there. `PassRates` chooses the
rows of an epoch by the share of right completions that they had (`data.sampling.pass_rate`).
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.config import SamplingConfig
from engine.data.cells import brief
from engine.errors import ConfigError, DataError

if TYPE_CHECKING:
    from engine.batch import Batch


State = dict[str, Any]  # fit for JSON

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class PassRates:
    """The rates of N rows, how often each was used, and the rows of the present epoch.

    An epoch has the rows that nobody has sampled yet, those whose rate lies between the bounds, and
    those that were passed over `recheck` times in a row (0: never). Where these are fewer than
    `at_least`, the rows nearest to the bounds come too.

    >>> rates = PassRates(3, (0.1, 0.9), recheck=0, max_uses=0, at_least=1)
    >>> rates.observe(0, 1.0), rates.observe(1, 0.5)
    (None, None)
    >>> rates.begin_epoch(); rates.chosen.tolist()
    [False, True, True]
    """

    def __init__(
        self, size: int, bounds: tuple[float, float], recheck: int, max_uses: int, at_least: int
    ) -> None:
        self._low, self._high = bounds
        self._recheck, self._max_uses, self._at_least = recheck, max_uses, at_least
        self._rate = np.full(size, np.nan)
        self._passed_over = np.zeros(size, np.int32)  # epochs in a row
        self._uses = np.zeros(size, np.int32)
        self.chosen = np.ones(size, bool)  # of the present epoch

    def observe(self, row: int, rate: float) -> None:
        self._rate[row] = rate

    def use(self, row: int) -> None:
        self._uses[row] += 1

    def begin_epoch(self) -> None:
        """Choose the rows of the next epoch; none where all were used `max_uses` times."""
        usable = self._uses < (self._max_uses or np.iinfo(np.int32).max)
        # How far outside the bounds; 0 of what was never sampled.
        off = np.nan_to_num(np.maximum(self._low - self._rate, self._rate - self._high), nan=0.0)
        chosen = usable & (off <= 0)
        if self._recheck:
            chosen |= usable & (self._passed_over >= self._recheck)
        missing = min(self._at_least, int(usable.sum())) - int(chosen.sum())
        if missing > 0:
            others = np.flatnonzero(usable & ~chosen)
            chosen[others[np.argsort(off[others], kind="stable")[:missing]]] = True
        self._passed_over = np.where(chosen, 0, self._passed_over + 1).astype(np.int32)
        self.chosen = chosen

    def state_dict(self) -> State:
        """Return all of it as text, for JSON; exact."""
        return {
            name: base64.b64encode(zlib.compress(array.tobytes(), level=1)).decode()
            for name, array in self._arrays().items()
        }

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Restore `state_dict`; DataError where it is of another number of rows."""
        for name, array in self._arrays().items():
            saved = np.frombuffer(zlib.decompress(base64.b64decode(state[name])), array.dtype)
            if saved.shape != array.shape:
                raise DataError(
                    f"the saved pass rates are of {saved.size} rows, and there are {array.size} "
                    "here; resume with the same data"
                )
            array[:] = saved

    def _arrays(self) -> dict[str, NDArray[np.generic]]:
        rates = {"rate": self._rate, "passed_over": self._passed_over}
        return rates | {"uses": self._uses, "chosen": self.chosen}


def observed_rates(batch: Batch) -> Iterator[tuple[object, float]]:
    """Each group's prompt (messages) and the share of right ones of its scored completions."""
    right, scored = batch.columns["reward_correct"].astype(float), ~batch["reward_error"]
    groups = batch["group_ids"]
    for group in groups.unique().tolist():
        rows = ((groups == group) & scored).nonzero().flatten().tolist()
        if rows:
            yield batch.columns["prompt"][rows[0]], float(right[rows].mean())


class EpochOrder:
    """Every row once an epoch.

    >>> order = EpochOrder(3, seed=0, difficulty=[2.0, 0.5, 1.0])
    >>> [order.next() for _ in range(4)]
    [1, 2, 0, 1]
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        shuffle: bool = True,
        difficulty: Sequence[float] | None = None,
        max_uses: int = 0,
        stream: Sequence[int] = (),
        rates: PassRates | None = None,
    ) -> None:
        """`difficulty` of each row: an epoch goes from easy to hard, equal rows in drawn order.

        `max_uses`: times that a row may be given (0: endless). `stream` tells orders of one seed
        apart. `rates` chooses each epoch's rows.
        """
        self._size, self._seed, self._shuffle, self._stream = size, seed, shuffle, tuple(stream)
        self._difficulty = None if difficulty is None else np.asarray(difficulty)
        self._max_uses, self._rates = max_uses, rates
        self.epoch, self._position = 0, 0  # of the next row
        self._order = self._draw()

    @property
    def ended(self) -> bool:
        """Whether every row was used as often as it may be."""
        if self._rates is not None:
            return not len(self._order)
        return bool(self._max_uses) and self.epoch >= self._max_uses

    def next(self) -> int:
        """Return the next row; DataError where none may be used again."""
        if self.ended:
            raise DataError(
                f"all {self._size} prompts were used {self._max_uses} times; raise "
                "data.sampling.max_uses, or take fewer steps"
            )
        row = int(self._order[self._position])
        self._position += 1
        if self._rates is not None:
            self._rates.use(row)
        if self._position == len(self._order):
            self.epoch, self._position = self.epoch + 1, 0
            if self._rates is not None:
                self._rates.begin_epoch()
            self._order = self._draw()
        return row

    def observe(self, row: int, rate: float) -> None:
        """Note the share of right completions that a row has had; read at its next epoch."""
        if self._rates is not None:
            self._rates.observe(row, rate)

    def state_dict(self) -> State:
        rates = {} if self._rates is None else {"rates": self._rates.state_dict()}
        return {"epoch": self.epoch, "position": self._position, **rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        epoch, position = int(state["epoch"]), int(state["position"])
        if self._rates is not None:
            self._rates.load_state_dict(state["rates"])
        self.epoch, self._position = max(0, epoch), position
        self._order = self._draw()
        rows = len(self._order)
        if epoch < 0 or not 0 <= position < max(1, rows):
            raise DataError(
                f"the saved loader state is damaged: epoch {epoch}, position {position} of "
                f"{rows} rows; resume from another checkpoint"
            )

    def _draw(self) -> NDArray[np.int64]:
        order = np.arange(self._size)
        if self._shuffle:
            draw = np.random.default_rng([self._seed, self.epoch, *self._stream])
            order = draw.permutation(self._size)
        if self._difficulty is not None:
            order = order[np.argsort(self._difficulty[order], kind="stable")]
        if self._rates is not None:
            order = order[self._rates.chosen[order]]
        return order


class WeightedOrder:
    """Each row from a source that is drawn by weight, until all rows of it were used enough."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        orders: Mapping[str, EpochOrder],
        weights: Mapping[str, float],
        seed: int,
    ) -> None:
        """Take each source's rows, the order among them, and its weight."""
        self._names, self._seed, self._rows, self._orders = sorted(rows), seed, rows, orders
        self._weights = np.asarray([weights[name] for name in self._names], dtype=float)
        # By row: its source, and its index there.
        self._index = {row: (n, i) for n, rows in rows.items() for i, row in enumerate(rows)}
        self._drawn = 0

    @property
    def epoch(self) -> int:
        """The least epoch of all sources."""
        return min(order.epoch for order in self._orders.values())

    def next(self) -> int:
        """The next row; DataError where every source has ended."""
        draw = np.random.default_rng([self._seed, self._drawn, 2]).random()
        self._drawn += 1
        open_ = np.asarray([not self._orders[name].ended for name in self._names])
        bounds = np.cumsum(self._weights * (open_ if open_.any() else 1))
        name = self._names[int(np.searchsorted(bounds, draw * bounds[-1], side="right"))]
        return self._rows[name][self._orders[name].next()]

    def observe(self, row: int, rate: float) -> None:
        name, index = self._index[row]
        self._orders[name].observe(index, rate)

    def state_dict(self) -> State:
        sources = {name: order.state_dict() for name, order in self._orders.items()}
        return {"drawn": self._drawn, "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        for name, order in self._orders.items():
            order.load_state_dict(state["sources"][name])


Order = EpochOrder | WeightedOrder  # endless, or until every row was used enough


def make_order(
    rows: Sequence[Mapping[str, object]],
    seed: int,
    shuffle: bool,
    sampling: SamplingConfig,
    batch_size: int,
) -> Order:
    """The order in which rows are drawn, in batches of about `batch_size`."""
    difficulty = difficulty_of(rows, sampling.curriculum) if sampling.curriculum else None
    bounds, recheck, uses = sampling.pass_rate, sampling.pass_rate_recheck, sampling.max_uses
    weights = sampling.weights

    def epochs(indices: Sequence[int], stream: Sequence[int] = ()) -> EpochOrder:
        size = len(indices)
        return EpochOrder(
            size,
            seed,
            shuffle=shuffle,
            difficulty=None if difficulty is None else [difficulty[i] for i in indices],
            max_uses=uses,
            stream=stream,
            rates=None if bounds is None else PassRates(size, bounds, recheck, uses, batch_size),
        )

    if not weights:
        return epochs(range(len(rows)))
    by_source: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        by_source.setdefault(str(row.get("data_source")), []).append(i)
    for name in sorted(by_source.keys() ^ weights.keys()):
        raise ConfigError(
            f"data.sampling.weights has {sorted(weights)}, and the rows' data_source is one of "
            f"{sorted(by_source)}: {name!r} is in one only; give each source a weight"
        )
    if any(weight <= 0 for weight in weights.values()):
        raise ConfigError(f"data.sampling.weights={weights}: weights must be above 0")
    sources = enumerate(by_source.items())
    orders = {name: epochs(indices, (1, number)) for number, (name, indices) in sources}
    return WeightedOrder(by_source, orders, weights, seed)


def difficulty_of(rows: Sequence[Mapping[str, object]], path: str) -> list[float]:
    """The number that each row has in a column, or below it, e.g. `extra_info.level`.

    Of text its first number counts: 5.0 of "Level 5". Raises DataError for a row without any.
    """
    numbers: list[float] = []
    for number, row in enumerate(rows, start=1):
        value: object = row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        match = _NUMBER.search(str(value))
        if match is None:
            raise DataError(
                f"data.sampling.curriculum={path!r}: row {number} has {brief(value)} there, and no "
                "number; give a column that says how hard each row is"
            )
        numbers.append(float(match[0]))
    return numbers
