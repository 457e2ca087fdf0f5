"""Rows that held-out rows contain, and prompts that were seen before."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import DataConfig
from engine.data.decontamination import HeldOut, SeenPrompts, without_held_out
from engine.data.rows import rl_row, sft_row
from engine.data.sources import Splits
from engine.errors import DataError

STORY = "A farmer sells seven baskets of apples and then buys two more sacks of grain for his horse"


def test_matches_are_exact_near_or_none() -> None:
    held_out = HeldOut(ngram=5, overlap=0.5)
    held_out.add(STORY)
    assert held_out.find(STORY.upper().replace(" ", ",  ")) == "exact"
    assert held_out.find(f"Long ago. {STORY.replace('horse', 'cow')}, they say.") == "near"
    assert held_out.find(" ".join(STORY.split()[:9])) == ""  # 5 of 14 runs
    assert held_out.find(" ".join(reversed(STORY.split()))) == ""
    assert HeldOut().find(STORY) == ""


def test_runs_of_two_texts_don_t_add_up() -> None:
    held_out = HeldOut(ngram=3, overlap=0.9)
    held_out.add("one two three four five six")
    held_out.add("six seven eight nine ten eleven")
    assert held_out.find("one two three four then seven eight nine ten") == ""
    only_exact = HeldOut(ngram=3, overlap=0)
    only_exact.add("one two three four five six")
    assert only_exact.find("one two three four five six seven") == ""


def test_instructions_that_all_prompts_share_are_no_match() -> None:
    instructions = " ".join(f"Rule {n}: think of the {n}th thing first." for n in range(40))
    held_out = HeldOut()
    for n in range(30):
        held_out.add(f"{instructions} {STORY.replace('seven', str(n))}")
    assert held_out.find(f"{instructions} Why is the sky blue and the grass green?") == ""
    nearly = STORY.replace("seven", "7").replace("farmer", "farmer, who is old,")
    assert held_out.find(f"{instructions} Now: {nearly}!") == ""
    assert held_out.find(f"{instructions} {STORY.replace('seven', '7')} Say so.") == "near"


def frame(*questions: str) -> pd.DataFrame:
    return pd.DataFrame([rl_row("x", question, "1", {}) for question in questions])


def learned(*questions: str) -> pd.DataFrame:
    return pd.DataFrame([sft_row(question, "1", {}) for question in questions])


def test_splits_lose_what_is_held_out(tmp_path: Path) -> None:
    other = (
        "The train leaves at nine in the morning and arrives in the city by late afternoon today"
    )
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": other}) + "\n")
    splits = Splits(
        sft_train=learned("a?", STORY + ".", "c?"),
        sft_validation=learned("v?"),
        train=frame(f"{STORY}!", "b?", other.replace("today", "")),
        validation=frame("v?", "t"),
        test=frame(STORY, "T"),
        source_digest="",
        source_uri="",
    )
    config = DataConfig(source="mine", decontaminate={"against": [f"{tmp_path}/eval.jsonl"]})
    clean = without_held_out(splits, config)
    left = {n: [p[0]["content"] for p in f["prompt"]] for n, f in clean.frames().items()}
    assert left == {
        "sft_train": ["a?", "c?"],
        "sft_validation": ["v?"],
        "train": ["b?"],
        "validation": ["v?"],
        "test": [STORY, "T"],
    }
    assert clean.notes == (
        "validation: 1 prompts are in held-out ones (1 with the same words, 0 nearly) and left out",
        "train: 2 prompts are in held-out ones (1 with the same words, 1 nearly) and left out",
        "sft_train: 1 prompts are in held-out ones (1 with the same words, 0 nearly) and left out",
    )
    with pytest.raises(DataError, match="sft_train: all its prompts are in held-out ones"):
        without_held_out(Splits(**{**splits.frames(), "sft_train": learned("t")},
                                source_digest="", source_uri=""), config)  # fmt: skip


# Few bytes, so that keys repeat, and NULs at the end.
KEYS = st.lists(st.binary(max_size=2).map(lambda some: some.ljust(16, b"\0")), max_size=60)


@given(KEYS | st.lists(st.integers(0, 40).map(lambda n: bytes([n]) * 16)))
def test_a_key_is_new_once(keys: list[bytes]) -> None:
    seen, known = SeenPrompts(), set[bytes]()
    for key in keys:
        assert seen.add(key) == (key not in known)
        known.add(key)
