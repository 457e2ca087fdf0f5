"""Training rows that held-out rows contain, prompts that were seen before, and rows of retraining.

Only the held-out texts are kept in memory, so a training set may be of any size. How much of a test
set a finished model has seen is for `engine.promotion.gate` to measure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from engine.config import DataConfig
from engine.data.contract import truth_of
from engine.data.incremental_data import NewFiles, read_new_files
from engine.data.row_files import MappedRows
from engine.data.rows import RULE, normalise, prompt_text
from engine.data.sources import Splits, evaluation_files
from engine.errors import DataError

COMMON = 10  # held-out texts

_WORD = re.compile(r"\w+")
Match = Literal["", "exact", "near"]


@dataclass
class HeldOut:
    """Texts that training must not contain.

    A text is "near" to a held-out one that shares at least `overlap` (0 to 1; 0: never) of its
    distinct runs of `ngram` words with it (Brown et al. 2020, arXiv:2005.14165, app. C), and
    "exact" where the words are the same without case and punctuation. Runs that more than
    `COMMON` or half of the held-out texts have, as those of a prompt's instructions, don't count.

    >>> held_out = HeldOut(ngram=3, overlap=0.5)
    >>> held_out.add("Tom has two red apples.")
    >>> held_out.find("TOM has two red apples!"), held_out.find("Now Tom has two red pears.")
    ('exact', 'near')
    >>> held_out.find("Tom has two green apples.")
    ''
    """

    ngram: int = 13
    overlap: float = 0.8
    _hashes: set[int] = field(default_factory=set)
    _texts: dict[int, list[int]] = field(default_factory=dict)  # hash of a run: texts with it
    _added: int = 0
    _runs: Counter[int] = field(default_factory=Counter)  # of each text, how many count
    _counted: int = 0  # texts that `_runs` was counted for

    def add(self, text: str) -> None:
        """Hold a text out."""
        words = _words(text)
        self._hashes.add(hash(words))
        for run in self._runs_of(words) if self.overlap else ():
            self._texts.setdefault(run, []).append(self._added)
        self._added += 1

    def find(self, text: str) -> Match:
        """How a text is in the held-out ones; empty where it isn't."""
        words = _words(text)
        if hash(words) in self._hashes:
            return "exact"
        if self._counted != self._added:
            self._runs = self._shared(self._texts)
            self._counted = self._added
        shared = self._shared(self._runs_of(words)) if self._texts else {}
        near = any(count >= self.overlap * self._runs[held] for held, count in shared.items())
        return "near" if near else ""

    def _shared(self, runs: Iterable[int]) -> Counter[int]:
        """How many of the runs each held-out text has, without those of many texts."""
        limit = min(COMMON, max(1, self._added // 2))
        shared: Counter[int] = Counter()
        for run in runs:
            texts = self._texts.get(run, ())
            if len(texts) <= limit:
                shared.update(texts)
        return shared

    def _runs_of(self, words: tuple[str, ...]) -> set[int]:
        n = self.ngram
        return {hash(words[i : i + n]) for i in range(len(words) - n + 1)}


def without_held_out(splits: Splits, config: DataConfig) -> Splits:
    """The splits, where no training prompt is in a held-out one, nor a validation prompt in test.

    The splits' evaluation sets and those of `config.decontaminate.against` are held out of both.
    What was left out is in the notes. Raises DataError where no row of a split is left.
    """
    settings = config.decontaminate
    held_out = HeldOut(settings.ngram, settings.overlap)
    hold_out_files(config, held_out)
    for prompt in (p for frame in splits.evaluation.values() for p in frame["prompt"]):
        held_out.add(question_text(prompt))
    frames: dict[str, Any] = dict(splits.frames())
    notes = list(splits.notes)
    for names in (("test",), ("validation", "sft_validation"), ("train", "sft_train")):
        for name in names if names != ("test",) else ():
            frames[name] = _without(frames[name], held_out, name, notes)
        for prompt in (prompt for name in names for prompt in frames[name]["prompt"]):
            held_out.add(question_text(prompt))
    return replace(splits, **frames, notes=tuple(notes))


def _without(frame: pd.DataFrame, held_out: HeldOut, name: str, notes: list[str]) -> pd.DataFrame:
    matches = [held_out.find(question_text(prompt)) for prompt in frame["prompt"]]
    exact, near = matches.count("exact"), matches.count("near")
    if not exact + near:
        return frame
    if exact + near == len(frame):
        raise DataError(
            f"{name}: all its prompts are in held-out ones; give others, or set "
            "data.decontaminate.overlap higher"
        )
    notes.append(
        f"{name}: {exact + near} prompts are in held-out ones ({exact} with the same words, {near} "
        "nearly) and left out"
    )
    return frame[[not match for match in matches]].reset_index(drop=True)


def hold_out_files(config: DataConfig, held_out: HeldOut) -> None:
    """Hold out the prompts of the evaluation sets in `data.decontaminate.against`.

    Raises DataError where one can't be read, or has bad rows.
    """
    for address in config.decontaminate.against:
        for _, row in MappedRows(address, config.model_copy(update={"bad_rows": "fail"})):
            held_out.add(question_text(row["prompt"]))


def question_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """The words of a prompt without its system messages."""
    if isinstance(prompt, str):
        return prompt
    return prompt_text([m for m in prompt if m["role"] != "system"] or prompt)


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


_RECENT = 1 << 16  # keys in a Python set, at some 100 bytes each
_KEY = np.dtype("S16")


class SeenPrompts:
    """A set of keys of 16 bytes: the recent ones in a set, the others in sorted arrays.

    Arrays are merged by size, so that N keys are in about log2(N / 65536) of them.

    >>> seen = SeenPrompts()
    >>> [seen.add(key) for key in (b"a" * 16, b"b" * 16, b"a" * 16)]
    [True, True, False]
    """

    def __init__(self, recent: int = _RECENT) -> None:
        self._limit, self._recent = recent, set[bytes]()
        self._sorted: list[np.ndarray[tuple[int], np.dtype[np.bytes_]]] = []  # largest first

    def add(self, key: bytes) -> bool:
        """Add a key; return whether it is new."""
        if key in self._recent or any(_holds(array, key) for array in self._sorted):
            return False
        self._recent.add(key)
        if len(self._recent) >= self._limit:
            self._merge()
        return True

    def _merge(self) -> None:
        array = np.fromiter(self._recent, _KEY, len(self._recent))
        self._recent.clear()
        while self._sorted and len(self._sorted[-1]) <= len(array):
            array = np.concatenate([self._sorted.pop(), array])
        array.sort()
        self._sorted.append(array)


def _holds(array: np.ndarray[tuple[int], np.dtype[np.bytes_]], key: bytes) -> bool:
    at = int(array.searchsorted(np.bytes_(key)))
    return at < len(array) and bytes(array[at]) == key.rstrip(b"\0")  # NumPy drops NULs at the end


HELD_OUT = ("validation", "sft_validation")  # and the evaluation sets, `test` among them


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of new files that a retraining run may train on."""

    rows: pd.DataFrame  # each prompt once, in the order of arrival, with all columns of the files
    total: int  # rows in the new files, e.g. 70

    @property
    def dropped(self) -> int:
        """Number of rows that are repeated, held out, or trained on already."""
        return self.total - len(self.rows)


def find_new_rows(dataset: Path, new_files: NewFiles) -> NewRows:
    """Read the files of `new_files` and keep the rows that are new to the dataset folder `dataset`.

    Raises as `incremental_data.read_new_files` does.
    """
    arrived = pd.DataFrame(read_new_files(new_files))
    if arrived.empty:
        return NewRows(arrived, 0)
    keys = prompt_keys(arrived)
    judged = [path.stem for path in evaluation_files(dataset).values()]
    seen = {key for name in (*HELD_OUT, *judged) for key in prompt_keys(_read_split(dataset, name))}
    train = _read_split(dataset, "train")
    trained = set(zip(prompt_keys(train), map(truth_of, train[RULE]), strict=True))
    is_new = []
    for key, rule in zip(keys, arrived[RULE], strict=True):
        is_new.append(key not in seen and (key, truth_of(rule)) not in trained)
        if is_new[-1]:
            seen.add(key)
    return NewRows(arrived[is_new].reset_index(drop=True), len(arrived))


def sample_replay(old: pd.DataFrame, new: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Sample rows of `old` so that they make up `share` of the new training set.

    Each prompt at most once, and none that is in `new`; fewer rows where `old` has too few.
    """
    seen = set(prompt_keys(new))
    is_candidate = []
    for key in prompt_keys(old):
        is_candidate.append(key not in seen)
        seen.add(key)
    candidates = old[is_candidate].reset_index(drop=True)
    count = min(len(candidates), round(len(new) * share / (1 - share)))
    return candidates.sample(n=count, random_state=seed)


def prompt_keys(frame: pd.DataFrame) -> list[str]:
    """The text of each row's prompt, without case and spacing."""
    return [normalise(prompt_text(prompt)) for prompt in frame["prompt"]]


def _read_split(dataset: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(dataset / f"{name}.parquet")
