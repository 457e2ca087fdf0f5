"""Where runs on a person's machine keep checkpoints: a folder for each set of inputs."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attempts import prepared_inputs
from flyte_runs import Place

from engine.stages.stage import Stage
from engine.storage.artifacts import read_manifest


def test_other_start_weights_and_limits_have_folders_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that is started again after it was killed resumes from its own alone."""
    from tasks.stages import rl_stage, sft_stage

    made = prepared_inputs(place)
    monkeypatch.setattr(Stage, "delete_local_checkpoints", lambda self: None)  # as if it was killed
    sft, rl = made.plan.sft, made.plan.rl
    short = sft.config.model_copy(update={"max_steps": 2})
    trainer = rl.config.trainer.model_copy(update={"total_training_steps": 1})
    brief = rl.config.model_copy(update={"trainer": trainer})
    common: dict[str, Any] = {"run": made.plan.run, "dataset": made.dataset}
    with place.entered():
        for content in ("a" * 64, "b" * 64):
            changes = {"start_digest": content, "config": short}
            warm = sft_stage(settings=sft.model_copy(update=changes), **common)
            assert read_manifest(str(warm)).config["start_digest"] == content
        for longest in (8, 4):
            data = rl.data.model_copy(update={"max_response_length": longest})
            settings = rl.model_copy(update={"data": data, "config": brief})
            trained = rl_stage(warm_start=made.warm_start, settings=settings, **common)
            assert read_manifest(str(trained)).config["max_response_length"] == longest
    for kind in ("sft", "rl"):
        assert len(list((place.artifacts / "checkpoints" / kind).iterdir())) == 2, kind


def test_records_of_steps_outlive_the_checkpoints(tmp_path: Path) -> None:
    stage = SimpleNamespace(_local_checkpoints=lambda: tmp_path / "run")
    for name in ("step_20/a", "rollouts/b", "recorded/step_3/step.pt"):
        (tmp_path / "run" / name).parent.mkdir(parents=True)
        (tmp_path / "run" / name).touch()
    (tmp_path / "run" / ".lock-1.json").touch()
    Stage.delete_local_checkpoints(cast(Stage, stage))
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert left == [tmp_path / "run" / "recorded" / "step_3" / "step.pt"]
    shutil.rmtree(tmp_path / "run" / "recorded")
    Stage.delete_local_checkpoints(cast(Stage, stage))
    assert not (tmp_path / "run").exists()
