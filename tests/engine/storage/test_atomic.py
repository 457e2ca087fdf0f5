"""Every file and folder below a tree reaches the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.storage.filesystem import fsync, fsync_tree


def test_nothing_of_a_tree_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b/c", "b/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    forced: set[int] = set()
    real = os.fsync

    def record(descriptor: int) -> None:
        forced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    fsync_tree(tmp_path)
    assert forced == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fsync(tmp_path / "nothing")
