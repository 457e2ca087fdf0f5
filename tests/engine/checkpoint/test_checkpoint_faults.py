"""Whole runs whose storage fails or changes under them: training continues, no checkpoint is lost.

The run is the warm start, on a disk and on a real S3 server that refuses or delays writes. Faults
of single files and commits are in `test_checkpoint_store`, of full disks in
`test_checkpoint_saver`.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_s3 import Faults, faulty_s3
from refused_commits import refuse_commits
from tiny_engine import random_completions, tiny_model
from transformers import PreTrainedModel

from engine.checkpoint import CheckpointStore, find_latest
from engine.config import SFTConfig
from engine.errors import CheckpointError, DamagedCheckpointError, PreemptedError
from engine.storage.folder import Folder
from engine.trainers.offline import SFTExample, SFTTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8


def run(
    root: str | Path | None,
    at: dict[int, Callable[[], Any]] | None = None,
    family: str = "qwen2",
    **changes: Any,
) -> tuple[torch.Tensor, list[int]]:
    """Train, or resume; have the calls in `at` done after their steps. The weights, and the steps
    that were done."""
    values = {"threads": 1, "train_batch_size": 8, "max_steps": STEPS, "save_freq": 1}
    values |= {"optim": {"lr": 1e-2}} | changes
    model = tiny_model(family)
    done: list[int] = []

    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        done.append(step)
        if at and step in at:
            at[step]()

    trainer = SFTTrainer(model, 0, SFTConfig.model_validate(values), seed=0, on_step=on_step)
    rows = [SFTExample(p, r) for p, r in zip(*random_completions(16, 0), strict=True)]
    trainer.fit(rows, [], root)
    return weights(model), done


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    """The weights of a run that nothing happens to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    final, _ = run(None)
    torch.set_num_threads(threads)
    return final


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_s3("faulty") as made:
        yield made


def test_s3_that_fails_for_a_while_costs_checkpoints_and_no_training(
    faults: Faults, undisturbed: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"s3://faulty/{tmp_path.name}"
    kept: list[int] = []

    def fail() -> None:
        faults.part, faults.status = "/step_", 403

    def heal() -> None:
        found = find_latest(root)
        assert found is not None
        kept.append(found.step)
        faults.part = ""

    with caplog.at_level(logging.WARNING):
        final, _ = run(root, {4: fail, 6: heal})
    assert faults.refused
    assert torch.equal(final, undisturbed)
    assert kept[0] in (2, 3), "what was durable when S3 failed must stay"
    assert "no checkpoint at step" in caplog.text
    assert "can't be written: Not now; check the address, the endpoint" in caplog.text
    found = find_latest(root)
    assert found is not None
    assert found.step == STEPS
    torn = [n for n in Folder(root).folders() if "COMPLETE" not in (Folder(root) / n).sizes()]
    assert torn == []


def test_s3_that_is_busy_is_asked_again(
    faults: Faults, undisturbed: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def busy() -> None:
        faults.part, faults.status, faults.times = "/step_", 503, 1

    with caplog.at_level(logging.WARNING):
        final, _ = run(f"s3://faulty/{tmp_path.name}", {2: busy}, save_freq=STEPS // 2)
    assert faults.refused == 1
    assert "no checkpoint" not in caplog.text
    assert torch.equal(final, undisturbed)


def test_s3_that_fails_to_the_end_costs_the_last_checkpoints_and_no_training(
    faults: Faults, undisturbed: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"s3://faulty/{tmp_path.name}"

    def fail() -> None:
        faults.part, faults.status = "/step_", 403

    with caplog.at_level(logging.WARNING):
        final, _ = run(root, {5: fail}, save_freq=2)
    assert torch.equal(final, undisturbed)
    assert f"the last step, {STEPS}, has NO CHECKPOINT: its save failed twice" in caplog.text
    assert "can't be written: Not now" in caplog.text
    faults.part = ""
    found = find_latest(root)
    assert found is not None
    final, done = run(root, save_freq=STEPS)
    assert found.step in (2, 4)
    assert done == list(range(found.step + 1, STEPS + 1))
    assert torch.equal(final, undisturbed)


def test_a_last_save_that_fails_once_is_tried_again(
    undisturbed: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_commits(monkeypatch, [STEPS])
    final, _ = run(tmp_path, save_freq=STEPS)
    assert torch.equal(final, undisturbed)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == STEPS


def test_a_failed_save_before_the_last_one_costs_not_the_last(
    undisturbed: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_commits(monkeypatch, [STEPS // 2])
    final, _ = run(tmp_path, save_freq=STEPS // 2)
    assert torch.equal(final, undisturbed)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == STEPS


def test_a_slow_s3_delays_no_step(
    faults: Faults, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    root = f"s3://faulty/{tmp_path.name}"
    at_step: list[object] = []

    def look() -> None:
        at_step.append(find_latest(root))

    faults.pause_s = 0.5
    final, _ = run(root, {7: look}, save_freq=6)
    assert at_step == [None], "step 7 waited for the save of step 6"
    assert torch.equal(final, undisturbed)
    found = find_latest(root)
    assert found is not None
    assert found.step == STEPS


def flip(folder: Path) -> None:
    shard = folder / "state.model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 16
    shard.write_bytes(bytes(data))


def delete(folder: Path) -> None:
    (folder / "state.moments.safetensors").unlink()


@pytest.mark.parametrize("damage", [flip, delete])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    damage: Callable[[Path], None],
    undisturbed: torch.Tensor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop_after(tmp_path, 5)
    damage(tmp_path / "step_5")
    with caplog.at_level(logging.WARNING):
        final, done = run(tmp_path)
    assert f"checkpoint {tmp_path}/step_5 is passed over for an older one" in caplog.text
    assert done == list(range(5, STEPS + 1))
    assert torch.equal(final, undisturbed)


def test_a_run_whose_checkpoints_are_all_damaged_stops_unless_told(tmp_path: Path) -> None:
    stop_after(tmp_path, 2)
    for folder in tmp_path.iterdir():
        flip(folder)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    with pytest.raises(DamagedCheckpointError, match=f"every checkpoint in {tmp_path} is damaged"):
        run(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    _, done = run(tmp_path, on_damaged_checkpoints="restart", max_steps=STEPS)
    assert done[0] == 1


def stop_after(root: Path, step: int) -> None:
    """A run that is pre-empted after a step, which is saved."""
    with pytest.raises(PreemptedError):
        run(root, {step: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert (root / f"step_{step}" / "COMPLETE").exists()


def test_a_checkpoint_of_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    stop_after(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"step_3: .* is of another model: .*; resume"):
        run(tmp_path, family="llama")
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert found.step == 3


def test_a_disk_that_fills_up_costs_checkpoints_and_no_training(
    undisturbed: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on file sizes, of which writes fail just as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full() -> None:
        # More than a log file, less than the model's tensors.
        size = (tmp_path / "step_3" / "state.model.safetensors").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))

    def freed() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        with caplog.at_level(logging.WARNING):
            final, _ = run(tmp_path, {5: full, 7: freed})
    finally:
        freed()
    assert "no checkpoint at step" in caplog.text
    assert "can't be written: File too large; raise the limit on file sizes" in caplog.text
    assert torch.equal(final, undisturbed)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == STEPS
