"""Samples, their files and writer."""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from s3_server import s3_bucket
from step_batches import step_batch, tokenizer

from engine.batch import Batch
from engine.errors import DataError, StorageError
from engine.samples import writer
from engine.samples.sample_files import (
    PAGE,
    SCHEMA,
    SampleFolder,
    SampleName,
    as_bytes,
    copy_samples,
    find_samples,
)
from engine.samples.viewer import page_of
from engine.samples.writer import RolloutLog, TokenTexts, as_table, pick, prompt_text

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


def test_a_component_that_doesn_t_apply_is_recorded_as_nothing() -> None:
    batch = step_batch({"1+1=": ["2", "3"]}, [1.0, 0.0])
    batch["reward_components"][1, 1] = math.nan
    table = as_table(pick(batch, 1, "train", 2), TokenTexts(tokenizer()))
    assert table["reward.brevity"].to_pylist() == [0.0, None]


EXPECTED = ["train_000001", "train_000010", "train_000020", "train_000025"]


EXPECTED += ["validation_000010", "validation_000020"]


EXPECTED_FILES = [PAGE, *(f"{name}.parquet" for name in EXPECTED)]


def test_the_first_step_every_tenth_and_the_last_are_sampled(tmp_path: Path) -> None:
    with make(tmp_path / "rollouts") as log:
        train(log, range(1, STEPS + 1), [])
    assert files(tmp_path / "rollouts") == EXPECTED_FILES
    assert recorded_steps(tmp_path / "rollouts") == list(range(1, STEPS + 1))
    assert ("validation", 20) in page_steps(tmp_path / "rollouts")


def test_the_page_marks_the_step_of_the_model_until_the_run_goes_on(tmp_path: Path) -> None:
    def model() -> object:
        return re.search(r'"model":([^,]+),', page_of(SampleFolder(tmp_path)))[1]  # type: ignore[index]

    history: list[dict[str, float]] = []
    with make(tmp_path) as log:
        train(log, range(1, 21), history)
    assert model() == "null"
    uploaded: dict[str, bytes] = {}
    for _ in range(2):  # a finished run that is started again
        with make(tmp_path, on_file=lambda p: uploaded.update({p.name: p.read_bytes()})) as log:
            log.resumed(20)
            log.model_step = 10.0
    assert model() == "10.0"
    assert {name: (tmp_path / name).read_bytes() for name in uploaded} == uploaded
    assert '"model":10.0' in (tmp_path / "rollouts.html").read_text()
    assert recorded_steps(tmp_path) == [*range(1, 21), 20], "and metrics stay"
    with make(tmp_path, last_step=30) as log:
        log.resumed(20)
        train(log, range(21, 31), history)
    assert model() == "null"


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


GROUPS = {f"{i}+{i}=": [f"{i}", f"{2 * i}", f"the answer is {2 * i}"] for i in range(6)}


REWARDS = [i / 18 for i in range(18)]


def prompts(batch: Batch) -> list[str]:
    return [messages[-1]["content"] for messages in batch.columns["prompt"]]


def test_groups_stay_whole_and_a_prompt_that_comes_again_is_taken_again() -> None:
    first = pick(step_batch(GROUPS, REWARDS), 1, "train", 6).rows
    assert len(first) == 6
    chosen = set(prompts(first))
    assert sorted(prompts(first)) == sorted(list(chosen) * 3)
    backwards = dict(reversed(GROUPS.items()))
    again = pick(step_batch(backwards, REWARDS), 7, "train", 6).rows
    assert set(prompts(again)) == chosen
    assert len(pick(step_batch(GROUPS, REWARDS), 1, "train", 4).rows) == 4
    assert len(pick(step_batch(GROUPS, REWARDS), 1, "train", 100).rows) == 18


def test_a_sample_is_a_copy_that_draws_no_random_numbers() -> None:
    batch = step_batch(GROUPS, REWARDS)
    before = torch.get_rng_state()
    sample = pick(batch, 1, "train", 3)
    assert torch.equal(before, torch.get_rng_state())
    kept = sample.rows["advantages"].clone()
    batch["advantages"].zero_()
    assert torch.equal(sample.rows["advantages"], kept)


def test_a_row_has_what_each_of_its_tokens_was_given() -> None:
    batch = step_batch({"2+2=": ["4", "the answer is 4"]}, [1.0, 0.0])
    first, second = as_table(pick(batch, 20, "train", 9), TokenTexts(tokenizer())).to_pylist()
    assert (first["step"], first["split"], first["policy_version"]) == (20, "train", 3)
    assert (first["prompt"], first["ground_truth"], first["data_source"]) == ("2+2=", "0", "sums")
    assert (first["completion"], first["tokens"]) == ("4", ["4"])
    assert (first["reward"], first["shaped_reward"], first["correct"]) == (1.0, 0.75, True)
    assert (first["reward.answer"], first["reward.brevity"]) == (1.0, 0.0)
    assert second["correct"] is False
    assert second["has_format"] is None, "this reward knows no format"
    assert "".join(second["tokens"]) == "the answer is 4"
    count = len(second["tokens"])
    assert count > 1
    assert second["advantages"] == [-0.5] * count
    assert second["rollout_log_probs"] == pytest.approx([-0.1 * (i + 1) for i in range(count)])
    assert second["old_log_probs"] == pytest.approx([-0.1 * (i + 1) + 0.01 for i in range(count)])
    assert second["ref_log_probs"] is None
    assert second["values"] is None


def test_every_sample_has_the_same_columns() -> None:
    rich = as_table(pick(step_batch({"a": ["b"]}, [1.0]), 1, "train", 9), TokenTexts(tokenizer()))
    batch = step_batch({"a": ["b"]}, [1.0], components=False)
    plain = Batch(
        {k: v for k, v in batch.as_dict().items() if k not in ("advantages", "old_log_probs")},
        {k: v for k, v in batch.columns.items() if k not in ("ground_truth", "data_source")},
    )
    poor = as_table(pick(plain, 0, "validation", 9), TokenTexts(tokenizer()))
    assert poor.schema.equals(SCHEMA)
    assert rich.select(SCHEMA.names).schema.equals(SCHEMA)
    assert poor.to_pylist()[0]["ground_truth"] == ""


def test_texts_that_utf_8_lacks_are_replaced() -> None:
    batch = step_batch({"a": ["b", "c"]}, [1.0, 0.0])
    odd = {"completion": ["half \ud83d", "\0"], "ground_truth": [{"x": ["\udc00", 1]}, None]}
    rows = as_table(pick(batch | Batch({}, odd), 1, "train", 9), TokenTexts(tokenizer()))
    first, second = rows.to_pylist()
    assert first["completion"] == "half ?"
    assert first["ground_truth"] == '{"x": ["?", 1]}'
    assert (second["completion"], second["ground_truth"]) == ("\0", "")


def test_chats_name_their_roles() -> None:
    assert prompt_text([{"role": "user", "content": "2+2="}]) == "2+2="
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2="}]
    assert prompt_text(chat) == "[system]\nBe short.\n\n[user]\n2+2="


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
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no samples of rollouts.*trainer\.log_rollouts_freq"):
        find_samples(tmp_path / "empty")
    with pytest.raises(DataError, match=r"nowhere does not exist; check the path"):
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
