"""Samples while a run goes on: which steps, resumption, and disks and stores that refuse."""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_server import s3_bucket
from step_batches import step_batch, tokenizer

from engine.samples import writer
from engine.samples.sample_files import PAGE, SampleFolder, SampleName, copy_samples, find_samples
from engine.samples.writer import RolloutLog

STEPS = 25


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of these runs take no time, so that all their samples wait at once."""
    monkeypatch.setattr(writer, "MAX_WAITING", 1000)


def make(folder: str | Path, **changes: Any) -> RolloutLog:
    settings: dict[str, Any] = {"every": 10, "rows": 4, "last_step": STEPS} | changes
    return RolloutLog(folder, tokenizer, **settings)


def train(log: RolloutLog, steps: range, history: list[dict[str, float]]) -> None:
    """Steps as the trainer makes them, with a validation every tenth."""
    for step in steps:
        log.rollouts("train", step, step_batch({f"{step}+1=": ["4", "5"]}, [1.0, 0.0]))
        if step % 10 == 0:
            log.rollouts("validation", step, step_batch({"9+9=": ["18"]}, [1.0]))
        history.append({"step": float(step), "reward/mean": step / 100})
        log.step_done(history)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def recorded_steps(folder: Path) -> list[int]:
    """Steps of the metrics in all files, in the order of the files."""
    samples = SampleFolder(folder)
    return [int(row["step"]) for name in samples.names() for row in samples.read(name)[1]]


def page_steps(folder: Path) -> list[tuple[str, int]]:
    page = (folder / PAGE).read_text()
    data = json.loads(re.findall(r'class="data">(.*?)</script>', page, re.DOTALL)[0])
    assert data["curves"]["reward/mean"][0] == recorded_steps(folder)
    return [(sample["split"], sample["step"]) for sample in data["samples"]]


EXPECTED = ["train_000001", "train_000010", "train_000020", "train_000025"]
EXPECTED += ["validation_000010", "validation_000020"]
EXPECTED_FILES = [PAGE, *(f"{name}.parquet" for name in EXPECTED)]


def test_the_first_step_every_tenth_and_the_last_are_sampled(tmp_path: Path) -> None:
    with make(tmp_path / "rollouts") as log:
        train(log, range(1, STEPS + 1), [])
    assert files(tmp_path / "rollouts") == EXPECTED_FILES
    assert recorded_steps(tmp_path / "rollouts") == list(range(1, STEPS + 1))
    assert ("validation", 20) in page_steps(tmp_path / "rollouts")


def test_0_turns_it_off(tmp_path: Path) -> None:
    with make(tmp_path / "rollouts", every=0) as log:
        log.resumed(0)
        train(log, range(1, STEPS + 1), [])
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize("at", [0, 7, 10, 15])
def test_a_resumed_run_doubles_no_step(at: int, tmp_path: Path) -> None:
    """It was killed at step 22 and goes on after step `at`, with another interval."""
    folder, history = tmp_path / "rollouts", list[dict[str, float]]()
    with make(folder, every=2) as log:
        log.resumed(0)
        train(log, range(1, 23), history)
    with make(folder) as log:
        log.resumed(at)
        train(log, range(at + 1, STEPS + 1), history[:at])
    names = [name.step for name in SampleFolder(folder).names() if name.split == "train"]
    assert names == [step for step in (1, *range(2, at + 1, 2)) if step <= at] + [
        step for step in (1, 10, 20, 25) if step > at
    ]
    assert recorded_steps(folder) == list(range(1, STEPS + 1))
    assert [step for split, step in page_steps(folder) if split == "train"] == names


def test_an_attempt_elsewhere_takes_over_what_was_sampled(tmp_path: Path) -> None:
    history: list[dict[str, float]] = []
    with make(tmp_path / "first") as log:
        log.resumed(0)
        train(log, range(1, 23), history)
    seen: list[str] = []
    with make(
        tmp_path / "second",
        previous=tmp_path / "first",
        on_file=lambda path: seen.append(path.name),
    ) as log:
        log.resumed(0)
        log.resumed(15)
        train(log, range(16, STEPS + 1), history[:15])
    assert files(tmp_path / "second") == EXPECTED_FILES
    assert recorded_steps(tmp_path / "second") == list(range(1, STEPS + 1))
    assert sorted(seen) == EXPECTED_FILES, "who tracks this attempt gets all of them, once"


def test_a_file_is_handed_over_whole_under_its_name(tmp_path: Path) -> None:
    seen: dict[str, bytes] = {}
    pages: list[str] = []
    with make(
        tmp_path / "rollouts",
        on_file=lambda path: seen.update({path.name: path.read_bytes()}),
        on_page=pages.append,
    ) as log:
        train(log, range(1, STEPS + 1), [])
    assert seen == {path.name: path.read_bytes() for path in (tmp_path / "rollouts").iterdir()}
    assert pages[-1].encode() == seen[PAGE]


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("broken", ["folder", "tracker"])
def test_what_refuses_costs_one_sentence_and_no_run(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file is no folder")
    place = tmp_path / "file" / "rollouts" if broken == "folder" else tmp_path / "rollouts"
    on_file: Callable[[Path], None] | None = full if broken == "tracker" else None
    with caplog.at_level(logging.WARNING), make(place, on_file=on_file) as log:
        log.resumed(0)
        train(log, range(1, STEPS + 1), [])
    (record,) = caplog.records
    assert record.getMessage().endswith("training continues")
    assert record.exc_info is None


def test_metrics_of_a_sample_that_failed_are_in_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, history = tmp_path / "rollouts", list[dict[str, float]]()
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING), make(folder) as log:
        train(log, range(1, 6), history)
        end = time.monotonic() + 60
        while "training continues" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)
        folder.unlink()
        train(log, range(6, STEPS + 1), history)
    assert SampleFolder(folder).names()[0] == SampleName(10, "train")
    assert recorded_steps(folder) == list(range(1, STEPS + 1))


def test_a_store_that_gives_no_answer_holds_up_neither_a_step_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(writer, "MAX_WAITING", 4)
    answer = threading.Event()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        log = make(tmp_path / "rollouts", every=1, on_file=lambda path: bool(answer.wait(60)))
        train(log, range(1, STEPS + 1), [])
        log.close()
    assert time.monotonic() - started < 30
    answer.set()
    assert "a sample of rollouts is left out" in caplog.text
    assert "may be missing" in caplog.text


def test_samples_in_a_bucket_are_resumed_and_copied_as_on_a_disk(tmp_path: Path) -> None:
    history: list[dict[str, float]] = []
    with s3_bucket("rollouts") as bucket:
        with make(f"{bucket}/first/rollouts") as log:
            log.resumed(0)
            train(log, range(1, 23), history)
        with make(f"{bucket}/second/rollouts", previous=f"{bucket}/first/rollouts") as log:
            log.resumed(15)
            train(log, range(16, STEPS + 1), history[:15])
        copy_samples(find_samples(f"{bucket}/second").uri, tmp_path / "rollouts")
    assert files(tmp_path / "rollouts") == EXPECTED_FILES
    assert recorded_steps(tmp_path / "rollouts") == list(range(1, STEPS + 1))
    assert ("train", 25) in page_steps(tmp_path / "rollouts")
