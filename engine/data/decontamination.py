"""Training rows that held-out rows contain, and prompts that were seen before.

Only the held-out texts are kept in memory, so a training set may be of any size.
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import pandas as pd

from engine.config import DataConfig
from engine.data.row_files import MappedRows
from engine.data.rows import prompt_text
from engine.data.sources import Splits
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

    @classmethod
    def of(cls, config: DataConfig) -> Self:
        """Hold out the prompts of the evaluation sets in `data.decontaminate.against`."""
        settings = config.decontaminate
        held_out = cls(settings.ngram, settings.overlap)
        for address in settings.against:
            for _, row in MappedRows(address, config.model_copy(update={"bad_rows": "fail"})):
                held_out.add(question_text(row["prompt"]))
        return held_out

    def add(self, text: str) -> None:
        words = words_of(text)
        self._hashes.add(hash(words))
        for run in self._runs_of(words) if self.overlap else ():
            self._texts.setdefault(run, []).append(self._added)
        self._added += 1

    def find(self, text: str) -> Match:
        """How a text is in the held-out ones; empty where it isn't."""
        words = words_of(text)
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

    Evaluation sets are held out of both. Raises DataError where no row of a split is left.
    """
    held_out, notes = HeldOut.of(config), list(splits.notes)
    frames: dict[str, Any] = dict(splits.frames())
    kept = [*splits.evaluation.values(), frames["test"]]
    for names in (("validation", "sft_validation"), ("train", "sft_train")):
        for prompt in (prompt for frame in kept for prompt in frame["prompt"]):
            held_out.add(question_text(prompt))
        for name in names:
            frames[name] = _without(frames[name], held_out, name, notes)
        kept = [frames[name] for name in names]
    return replace(splits, **frames, notes=tuple(notes))


def _without(frame: pd.DataFrame, held_out: HeldOut, name: str, notes: list[str]) -> pd.DataFrame:
    matches = [held_out.find(question_text(prompt)) for prompt in frame["prompt"]]
    exact, near = matches.count("exact"), matches.count("near")
    if matches and exact + near == len(frame):
        raise DataError(
            f"{name}: all its prompts are in held-out ones; give others, or set "
            "data.decontaminate.overlap higher"
        )
    if exact + near:
        notes.append(
            f"{name}: {exact + near} prompts are in held-out ones ({exact} with the same words, "
            f"{near} nearly) and left out"
        )
    return frame[[not match for match in matches]].reset_index(drop=True)


def question_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """The words of a prompt without its system messages."""
    if isinstance(prompt, str):
        return prompt
    return prompt_text([m for m in prompt if m["role"] != "system"] or prompt)


def words_of(text: str) -> tuple[str, ...]:
    """A text's words without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


class SeenPrompts:
    """A set of keys in a temporary database, of which 32 MiB at most are in memory.

    >>> seen = SeenPrompts()
    >>> [seen.add(key) for key in (b"a" * 16, b"b" * 16, b"a" * 16)]
    [True, True, False]
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            "PRAGMA cache_size = -32768; PRAGMA journal_mode = OFF;"  # KiB
            "CREATE TABLE seen (key BLOB PRIMARY KEY) WITHOUT ROWID; BEGIN"
        )

    def add(self, key: bytes) -> bool:
        """Add a key; return whether it is new."""
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1
