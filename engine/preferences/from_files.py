"""Preferences of files as tables: canonical rows, some of their prompts held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from engine.config import DataConfig, PairsConfig
from engine.data.decontamination import HeldOut, question_text
from engine.data.preference_rows import Kind, read_preference_rows
from engine.data.rows import normalise, prompt_text
from engine.errors import DataError


@dataclass(frozen=True, slots=True)
class PreferenceTables:
    """What is learned from, and what is held out."""

    train: pd.DataFrame  # prompt, chosen, rejected, margin; or prompt, completion, label
    validation: pd.DataFrame  # may be empty
    notes: tuple[str, ...]  # what was left out, a sentence each


def read_preference_tables(
    config: PairsConfig,
    data: DataConfig,
    kind: Kind,
    held_out: Iterable[str | Sequence[Mapping[str, object]]],
    seed: int,
) -> PreferenceTables:
    """Read `config.path`; `held_out` are prompts that must not be trained on, which are left out.

    Rows are put as `data.system_prompt` and `data.apply_chat_template_kwargs` say, too. Raises
    DataError for bad rows unless they are dropped, and where nothing is left to learn from.
    """
    settings = data.model_copy(
        update={name: getattr(config, name) for name in ("columns", "templates", "bad_rows")}
    )
    files = read_preference_rows([config.path], settings, kind)
    notes = [note for file in files if (note := file.bad.sentence())]
    rows = [row for file in files for row in file.rows]
    known = HeldOut(data.decontaminate.ngram, data.decontaminate.overlap)
    for prompt in held_out:
        known.add(question_text(prompt))
    kept = [row for row in rows if not known.find(question_text(row["prompt"]))]
    if len(kept) < len(rows):
        left_out = len(rows) - len(kept)
        notes.append(f"{left_out} rows have prompts of a test set, and are left out")
    apart = _prompts_apart(
        [prompt_text(row["prompt"]) for row in kept], config.validation_size, seed
    )
    sides: tuple[list[object], list[object]] = ([], [])
    for row in kept:
        sides[normalise(prompt_text(row["prompt"])) in apart].append(row)
    if not sides[0]:
        raise DataError(
            f"pairs.path={config.path!r} leaves no row to learn from: {len(rows)} rows, "
            f"{len(rows) - len(kept)} of them with prompts of a test set; give more, or lower "
            f"pairs.validation_size={config.validation_size}"
        )
    return PreferenceTables(pd.DataFrame(sides[0]), pd.DataFrame(sides[1]), tuple(notes))


def _prompts_apart(prompts: list[str], size: int, seed: int) -> set[str]:
    """Prompts to hold out, drawn by seed: those of `size` rows, or of a few more."""
    rows: dict[str, int] = {}
    for prompt in map(normalise, prompts):
        rows[prompt] = rows.get(prompt, 0) + 1
    apart: set[str] = set()
    left = size
    for prompt in sorted(
        rows, key=lambda one: hashlib.blake2b(f"{seed}/{one}".encode(), digest_size=8).digest()
    ):
        if left <= 0:
            break
        apart.add(prompt)
        left -= rows[prompt]
    return apart
