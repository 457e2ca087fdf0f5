"""The Parquet files of a run's samples."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pandas as pd
import pytest
from step_batches import step_batch, tokenizer

from engine.errors import DataError, StorageError
from engine.samples.sample_files import (
    PAGE,
    SampleFolder,
    SampleName,
    as_bytes,
    copy_samples,
    find_samples,
)
from engine.samples.writer import TokenTexts, as_table, pick

FIRST, TENTH, VALIDATED = (
    SampleName(1, "train"),
    SampleName(10, "train"),
    SampleName(10, "validation"),
)


def content(name: SampleName, *metrics: dict[str, float]) -> bytes:
    sample = pick(step_batch({"2+2=": ["4"]}, [1.0]), name.step, name.split, 9)
    return as_bytes(as_table(sample, TokenTexts(tokenizer())), metrics)


def write(folder: Path, *names: SampleName) -> SampleFolder:
    samples = SampleFolder(folder)
    for name in names:
        samples.write_bytes(name.file, content(name))
    return samples


def test_a_sample_and_its_metrics_come_back(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path / "new" / "folder")
    rows = [{"step": 1.0, "reward/mean": 0.5, "actor/kl": math.nan}, {"step": 2.0}]
    folder.write_bytes(FIRST.file, content(FIRST, *rows))
    table, metrics = folder.read(FIRST)
    assert table.to_pylist()[0]["completion"] == "4"
    assert metrics == [{"step": 1.0, "reward/mean": 0.5}, {"step": 2.0}]
    frame = pd.read_parquet(tmp_path / "new" / "folder" / FIRST.file)  # as anybody reads it
    assert list(frame["tokens"][0]) == ["4"]


def test_samples_are_listed_by_step(tmp_path: Path) -> None:
    folder = write(tmp_path, VALIDATED, TENTH, FIRST)
    (tmp_path / "metrics.parquet").write_bytes(b"")
    (tmp_path / ".train_000011.parquet.77").write_bytes(b"")  # of a process that was killed
    assert folder.names() == [FIRST, TENTH, VALIDATED]
    folder.remove(TENTH)
    folder.remove(TENTH)
    assert folder.names() == [FIRST, VALIDATED]
    assert SampleFolder(tmp_path / "nowhere").names() == []


def test_a_run_s_folder_leads_to_its_samples(tmp_path: Path) -> None:
    write(tmp_path / "rollouts", FIRST)
    assert find_samples(tmp_path).uri == find_samples(tmp_path / "rollouts").uri
    with pytest.raises(DataError, match=r"no samples of rollouts.*trainer\.log_rollouts_freq"):
        find_samples(tmp_path / "nowhere")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, FIRST)
    (tmp_path / FIRST.file).write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"train_000001\.parquet is no readable sample"):
        folder.read(FIRST)


def test_copies_stop_at_a_step_or_take_the_page_too(tmp_path: Path) -> None:
    write(tmp_path / "old", FIRST, TENTH).write_bytes(PAGE, b"<page>")
    copy_samples(tmp_path / "old", tmp_path / "part", up_to=5)
    assert [path.name for path in (tmp_path / "part").iterdir()] == [FIRST.file]
    copy_samples(tmp_path / "old", tmp_path / "all")
    assert {path.name for path in (tmp_path / "all").iterdir()} == {FIRST.file, TENTH.file, PAGE}
    copy_samples(tmp_path / "nowhere", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_refused_write_is_one_sentence_and_leaves_the_file_before(tmp_path: Path) -> None:
    folder = write(tmp_path, FIRST)
    before = (tmp_path / FIRST.file).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            StorageError, match=r"can't write .*train_000001\.parquet: File too large"
        ):
            folder.write_bytes(FIRST.file, bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [FIRST.file]
    assert (tmp_path / FIRST.file).read_bytes() == before
