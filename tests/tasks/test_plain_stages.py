"""Stages without Flyte: plain calls, in a process that never loads flytekit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from engine.stages.stage import execution_tags, host

RUN = """
import json, sys, time
from engine.config import DataConfig, ModelConfig, SFTConfig
from engine.stages.dataset import preprocess
from engine.stages.settings import DatasetSettings, RunContext, SFTSettings
from engine.stages.training import sft
from engine.storage.artifacts import read_manifest
from engine.tracking import Tracker

data = DataConfig(sft_size=32, train_size=8, validation_size=8, test_size=8, max_response_length=8)
run = RunContext(
    run_id="plain", mlflow_run=Tracker().start_pipeline("p"), experiment="hybridflyte",
    started_at=time.time(),
)
dataset = preprocess(run, DatasetSettings(
    data=data, source_digest="", model_path="", model_digest="", context=64, seed=0
))
shape = ModelConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)
config = SFTConfig(max_steps=2, train_batch_size=8)
model = sft(run, SFTSettings(start=shape, start_digest="", config=config, seed=0), dataset)
manifest = read_manifest(model.local())
print(json.dumps({
    "kind": manifest.kind,
    "parent": manifest.parents[0].uri == dataset.uri,
    "execution": manifest.flyte_execution,
    "flytekit": "flytekit" in sys.modules,
}))
"""


def test_stages_run_without_flytekit(tmp_path: Path, mlflow_store: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(mlflow_store.read_bytes())
    places = {
        "HOME": str(tmp_path),
        "HYBRIDFLYTE_HOME": str(tmp_path / "home"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kind": "sft",
        "parent": True,
        "execution": "plain",
        "flytekit": False,
    }


def test_a_plain_host_is_no_cluster() -> None:
    assert host().execution == ""
    assert execution_tags("run-1") == {"flyte.execution": "run-1"}
    assert host().checkpoint_paths() is None
    assert host().has_passed("anything") is False
