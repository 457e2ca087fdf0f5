"""Live pass rates: the share of right completions of each row when it was last sampled.

They choose the rows of each epoch (`data.sampling.pass_rate`). Orders are in `order`.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import DataError

if TYPE_CHECKING:
    from engine.batch import Batch

State = dict[str, str]


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
        """Note the share of right completions that a row has just had."""
        self._rate[row] = rate

    def use(self, row: int) -> None:
        """A row is given out."""
        self._uses[row] += 1

    def begin_epoch(self) -> None:
        """Choose the rows of the next epoch; none where all were used `max_uses` times."""
        usable = np.ones_like(self.chosen)
        if self._max_uses:
            usable = self._uses < self._max_uses
        # How far outside the bounds; 0 of what was never sampled.
        off = np.nan_to_num(np.maximum(self._low - self._rate, self._rate - self._high), nan=0.0)
        wanted = usable & (off <= 0)
        if self._recheck:
            wanted |= usable & (self._passed_over >= self._recheck)
        missing = min(self._at_least, int(usable.sum())) - int(wanted.sum())
        if missing > 0:
            others = np.flatnonzero(usable & ~wanted)
            wanted[others[np.argsort(off[others], kind="stable")[:missing]]] = True
        self._passed_over = np.where(wanted, 0, self._passed_over + 1).astype(np.int32)
        self.chosen = wanted

    def state_dict(self) -> State:
        """All of it as text, for JSON; exact."""
        return {name: _packed(array) for name, array in self._arrays().items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Restore `state_dict`; DataError where it is of another number of rows."""
        for name, array in self._arrays().items():
            array[:] = _unpacked(state[name], array)

    def _arrays(self) -> dict[str, NDArray[np.generic]]:
        return {
            "rate": self._rate,
            "passed_over": self._passed_over,
            "uses": self._uses,
            "chosen": self.chosen,
        }


def observed_rates(batch: Batch) -> Iterator[tuple[object, float]]:
    """Each group's prompt (messages) and the share of right ones of its scored completions.

    `batch` has `group_ids` and `reward_error` `[B]`, and the columns `prompt` and `reward_correct`.
    """
    right, scored = batch.columns["reward_correct"].astype(float), ~batch["reward_error"]
    groups = batch["group_ids"]
    for group in groups.unique().tolist():
        rows = ((groups == group) & scored).nonzero().flatten().tolist()
        if rows:
            yield batch.columns["prompt"][rows[0]], float(right[rows].mean())


def _packed(array: NDArray[np.generic]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), level=1)).decode()


def _unpacked(text: str, like: NDArray[np.generic]) -> NDArray[np.generic]:
    found = np.frombuffer(zlib.decompress(base64.b64decode(text)), like.dtype)
    if found.shape != like.shape:
        raise DataError(
            f"the saved pass rates are of {found.size} rows, and there are {like.size} here; "
            "resume with the same data"
        )
    return found
