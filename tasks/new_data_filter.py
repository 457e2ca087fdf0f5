"""What of a night's new files is news to the champion: counted by `kickoff`, kept by `take_in`.

A problem is news when no held-out split of the champion's dataset holds its prompt, and the
champion's `train` does not hold it with the same ground truth. A corrected answer is news.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from engine.data.incremental_data import Window

HELD_OUT = ("test", "validation", "sft_validation")


@dataclass(frozen=True, slots=True)
class News:
    """The rows of new files that a night may train on."""

    fresh: pd.DataFrame  # each prompt once, in the order of arrival, with the columns as they came
    arrived: int  # rows in the new files, e.g. 70

    @property
    def left_out(self) -> int:
        """Rows that are repeated, held out, or trained on already."""
        return self.arrived - len(self.fresh)


def find_news(former: Path, window: Window) -> News:
    """Read the new files and keep what is news to the dataset in the folder `former`.

    Raises DataError where a row has no prompt, and as `incremental_data.read_window` does.
    """
    import pandas as pd

    from engine.data.columns import RULE, truth_of
    from engine.data.incremental_data import read_window
    from engine.errors import DataError

    arrived = pd.DataFrame(read_window(window))
    if arrived.empty:
        return News(arrived, 0)
    try:
        keys = prompt_keys(arrived)
    except (KeyError, TypeError) as error:
        raise DataError(
            f"a row of the new data in {window.prefix} has no prompt that can be read ({error!r}); "
            "its columns must be those of RL data"
        ) from None
    seen = {key for name in HELD_OUT for key in prompt_keys(_split(former, name))}
    train = _split(former, "train")
    truths = map(truth_of, train[RULE])
    trained = set(zip(prompt_keys(train), truths, strict=True))
    rules = arrived[RULE] if RULE in arrived else [None] * len(arrived)
    kept = []
    for key, rule in zip(keys, rules, strict=True):
        kept.append(key not in seen and (key, truth_of(rule)) not in trained)
        if kept[-1]:
            seen.add(key)
    return News(arrived[kept].reset_index(drop=True), len(arrived))


def prompt_keys(frame: pd.DataFrame) -> list[str]:
    """The words of each row's prompt, without case and spacing."""
    from engine.data.rows import normalise, prompt_text

    return [normalise(prompt_text(prompt)) for prompt in frame["prompt"]]


def _split(former: Path, name: str) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(former / f"{name}.parquet")
