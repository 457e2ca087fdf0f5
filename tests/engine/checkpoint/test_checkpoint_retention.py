"""Which checkpoints stay: checked against the rule's own words."""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.format import Marker
from engine.checkpoint.store import RetentionPolicy, abandoned_drafts, draft_name, retained
from engine.errors import ConfigError
from engine.storage.folder import Folder


def marker(sequence: int, step: int, value: float | None = None) -> Marker:
    return Marker(step, sequence, "", {} if value is None else {"reward": value})


def test_last_and_best_stay() -> None:
    values = [0.1, 0.9, 0.3, math.nan, 0.2]
    markers = [marker(i, 10 * i, value) for i, value in enumerate(values)]
    assert retained(markers, RetentionPolicy(2, 1, "reward")) == {3, 4, 1}
    assert retained(markers, RetentionPolicy(2, 2, "reward")) == {3, 4, 1, 2}
    assert retained(markers, RetentionPolicy(1, 1, "reward", "min")) == {4, 0}
    assert retained(markers, RetentionPolicy(1, 3)) == {4}
    assert retained(
        [marker(0, 0, 0.5), marker(1, 1, 0.5), marker(2, 2)], RetentionPolicy(1, 1, "reward")
    ) == {
        2,
        1,
    }


def test_the_newest_is_the_last_written_and_not_the_highest_step() -> None:
    # A run went on from step 10 after 20 and 30 had been written: 20 is of the present course.
    markers = [marker(1, 10), marker(2, 20), marker(3, 30), marker(4, 20)]
    assert retained(markers, RetentionPolicy(1)) == {4}
    assert retained(markers, RetentionPolicy(2)) == {4, 3}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.floats(-1, 1)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_newest_always_stays_and_counts_hold(
    facts: list[tuple[int, float | None]], last: int, best: int
) -> None:
    markers = [marker(i, step, value) for i, (step, value) in enumerate(facts)]
    stay = retained(markers, RetentionPolicy(last, best, "reward"))
    assert len(markers) - 1 in stay
    steps = [facts[i][0] for i in stay]
    assert len(set(steps)) == len(steps) <= last + best
    newest_of = {step: i for i, (step, _) in enumerate(facts)}
    measured = [facts[i][1] for i in newest_of.values() if facts[i][1] is not None]
    if best and measured:
        assert max(measured) in [facts[i][1] for i in stay]


def test_a_retention_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_last=0 must be at least 1"):
        RetentionPolicy(0)
    with pytest.raises(ConfigError, match=r"mode='best'"):
        RetentionPolicy(mode="best")  # type: ignore[arg-type]


def test_only_drafts_of_the_dead_are_abandoned(tmp_path: Path) -> None:
    host = socket.gethostname().replace("-", "_")
    own = draft_name(3)
    dead = f".writing-step_3-{host}-999999999-ab"  # above the largest process id
    parent = f".writing-step_3-{host}-{os.getppid()}-ab"
    reborn = f".writing-step_3-{host}-{os.getpid()}-ab"  # a restarted container's process id
    young, old = ".writing-step_3-elsewhere-1-ab", ".writing-step_4-elsewhere-1-ab"
    huge = f".writing-step_3-{host}-{10**30}-ab"
    names = [own, dead, parent, reborn, young, old, huge, ".writing-x", "step_3"]
    for name in names:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / old, (0, time.time() - 2 * 24 * 3600))
    assert abandoned_drafts(Folder(tmp_path), names, [own]) == [dead, reborn, old, huge]
