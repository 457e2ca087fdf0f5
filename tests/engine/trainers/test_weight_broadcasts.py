"""Broadcasts of weights in real runs: samplers serve the actor's, whoever is lost on the way."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import sync_probe
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder

from engine.batch import Batch
from engine.config import RLConfig
from engine.controller.async_rollout import AsyncRollout, PublishedWeights, WeightBroadcasts
from engine.controller.placement import Placement
from engine.controller.worker_host import RoleSpec
from engine.data.loader import PromptLoader
from engine.trainers import rollout_modes, run_spec
from engine.trainers.rl import RLTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread", "ray_cluster"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEPS = 5


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM on CPU has attention for heads of 32 and more."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return write_tiny_folder(folder, TINY_MODEL.model_copy(update={"hidden_size": 128}))


class Patient(AsyncRollout):
    """Each step waits until all workers have the actor's weights, so that none misses a round."""

    def take(self) -> tuple[Batch, Batch]:
        deadline = time.monotonic() + 120
        with self._changed:
            while self._error is None:
                workers = self.fleet.workers.values()
                if all(worker.version == self.fleet.version for worker in workers):
                    break
                assert time.monotonic() < deadline, workers
                self._broadcast()
                self._changed.wait(0.05)
        return super().take()


class Run:
    """A run on two vLLM samplers that note what they serve; `published` has the actor's."""

    def __init__(self, patch: pytest.MonkeyPatch, notes: Path, faults: dict[str, str]) -> None:
        self.notes, self.published = notes, dict[int, str]()
        extra: dict[str, Any] = {"notes": str(notes), "faults": faults}
        real_spec, real_publish = run_spec.rollout_worker_spec, WeightBroadcasts.publish
        real_placement = run_spec.rollout_worker_placement

        def spec(name: str, build: Any) -> RoleSpec:
            found = real_spec(name, build)
            worker = sync_probe.ReceivingStream
            return replace(found, worker_class=worker, options=dict(found.options) | extra)

        def publish(publisher: WeightBroadcasts, version: int) -> PublishedWeights:
            if version not in self.published:
                whole = publisher._actor.weights().result()
                self.published[version] = sync_probe.bytes_digest(whole)
            return real_publish(publisher, version)

        def placement(name: str, build: Any) -> Placement:
            found = real_placement(name, build)
            pools = tuple(replace(pool, cpus=0.25) for pool in found.pools)
            return replace(found, pools=pools)

        patch.setattr(run_spec, "rollout_worker_spec", spec)
        patch.setattr(run_spec, "rollout_worker_placement", placement)
        patch.setattr(WeightBroadcasts, "publish", publish)
        patch.setattr(rollout_modes, "AsyncRollout", Patient)

    def fit(self, folder: Path, **changes: Any) -> list[dict[str, float]]:
        settings: dict[str, Any] = {
            "actor": {"optim": {"lr": 1e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
            "rollout": {"n": 4, "engine": "vllm", "kv_cache_memory_mb": 64, "max_num_seqs": 8},
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {
                "mode": "async",
                "total_training_steps": STEPS,
                "train_batch_size": 4,
                "threads": 2,
                "rollout_workers": 2,
                "weight_transfer": "gloo",
            }
            | changes,
        }
        loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
        history: list[dict[str, float]] = []
        config = RLConfig.model_validate(settings)
        with RLTrainer(folder, config, loader, max_response_length=6, max_model_len=64) as trainer:
            trainer.on_step = lambda step, total, metrics: history.append(dict(metrics))
            trainer.fit()
        return history

    def loads(self, role: str) -> list[dict[str, Any]]:
        lines = (self.notes / f"{role}.jsonl").read_text().splitlines()
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return found


@pytest.mark.parametrize("lost", [False, True])
def test_samplers_serve_the_actors_weights_bit_for_bit(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Also where one's process ends while a round waits for it, and another takes its place."""
    run = Run(monkeypatch, tmp_path, {"sampler1": "exit"} if lost else {})
    history = run.fit(wide_folder)
    assert len(history) == STEPS
    assert history[-1]["async/restarts"] == (1 if lost else 0)
    assert history[-1]["async/resyncs"] == 0
    for name in ("sampler0", "sampler1"):
        loads = run.loads(name)
        assert [load["version"] for load in loads] == list(range(STEPS))
        assert all(load["digest"] == run.published[load["version"]] for load in loads)
    assert len(set(run.published.values())) == STEPS, "every update moved the weights"
