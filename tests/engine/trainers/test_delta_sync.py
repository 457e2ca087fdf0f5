"""Deltas of the weights in real runs: every worker has the actor's, whatever happens on the way."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import sync_probe
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.controller.async_rollout import AsyncRollout, PublishedWeights, WeightPublisher
from engine.controller.placement import Placement
from engine.controller.worker_host import RoleSpec
from engine.data.loader import PromptLoader
from engine.errors import ConfigError
from engine.trainers import rollout_modes, run_spec
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config

pytestmark = pytest.mark.usefixtures("one_thread", "ray_cluster")
STEPS = 6
Loads = list[dict[str, Any]]


class Run:
    """A run whose rollout workers note their loads, and whose published weights are kept."""

    def __init__(self, patch: pytest.MonkeyPatch, notes: Path, faults: dict[str, str]) -> None:
        self.patch, self.notes = patch, notes
        self.extra = {"notes": str(notes), "faults": faults}
        self.published: dict[int, str] = {}
        real_spec, real_publish = run_spec.rollout_worker_spec, WeightPublisher.publish
        real_placement = run_spec.rollout_worker_placement

        def spec(name: str, build: Any) -> RoleSpec:
            found = real_spec(name, build)
            options = found.options | self.extra
            return replace(found, worker_class=sync_probe.NotingStream, options=options)

        def publish(publisher: WeightPublisher, version: int) -> PublishedWeights:
            made, Patient.publisher = real_publish(publisher, version), publisher
            if publisher._deltas:
                self.published[version] = sync_probe.weights_digest(made.full.result())
            return made

        def placement(name: str, build: Any) -> Placement:
            found = real_placement(name, build)
            pools = tuple(replace(pool, cpus=0.25) for pool in found.pools)
            return replace(found, pools=pools)  # two workers and a trainer on Ray's two CPUs

        patch.setattr(run_spec, "rollout_worker_spec", spec)
        patch.setattr(run_spec, "rollout_worker_placement", placement)
        patch.setattr(rollout_modes, "AsyncRollout", Patient)
        patch.setattr(WeightPublisher, "publish", publish)

    def fit(self, folder: Path, mode: str, placement: str, **changes: Any) -> Any:
        settings: dict[str, Any] = {
            "actor": {"optim": {"lr": 1e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
            "rollout": {"n": 4} | changes.pop("rollout", {}),
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {
                "mode": mode,
                "total_training_steps": STEPS,
                "train_batch_size": 4,
                "placement": placement,
                "threads": 2,
                "delta_sync": True,
            }
            | changes,
        }
        config = RLConfig.model_validate(settings)
        loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
        history: list[dict[str, float]] = []
        with RLTrainer(folder, config, loader, max_response_length=6, max_model_len=64) as trainer:
            trainer.on_step = lambda step, total, metrics: history.append(dict(metrics))
            trainer.fit()
        assert len(history) == STEPS
        return history

    def loads(self, role: str) -> Loads:
        """What a worker loaded, in order; each is checked against what was published."""
        lines = (self.notes / f"{role}.jsonl").read_text().splitlines()
        found: Loads = [json.loads(line) for line in lines]
        for load in found:
            if load["version"] is not None:
                assert load["digest"] == self.published[load["version"]], load
        return found


class Patient(AsyncRollout):
    """Each update waits until all workers have it, so that none misses one on a busy machine.

    Before it closes, they get the weights of the last update too.
    """

    publisher: WeightPublisher

    def update_weights(self, weights: PublishedWeights) -> None:
        super().update_weights(weights)
        deadline = time.monotonic() + 90
        while self._error is None and not self._closing:
            workers = self.fleet.workers.values()
            if all(worker.version == self.fleet.version for worker in workers):
                break
            assert time.monotonic() < deadline, workers
            time.sleep(0.02)

    def close(self) -> None:
        if self._error is None and not self._closing:
            self.update_weights(self.publisher.publish(STEPS))
        super().close()


@pytest.mark.parametrize(
    ("placement", "workers", "dtype"),
    [("local", 1, ""), pytest.param("ray", 2, "bfloat16", marks=pytest.mark.slow)],
)
def test_workers_follow_the_actor_by_deltas(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    workers: int,
    dtype: str,
) -> None:
    run = Run(monkeypatch, tmp_path, {})
    history = run.fit(
        tiny_folder, "async", placement, rollout_workers=workers, rollout={"dtype": dtype}
    )
    assert history[-1]["async/resyncs"] == 0
    assert history[-1]["async/restarts"] == 0
    for number in range(workers):
        loads = run.loads(f"sampler{number}")
        assert loads[0]["kind"] == "whole"
        assert loads[-1]["version"] == STEPS, "it ends with the actor's last weights"
        assert any(load["kind"] == "delta" for load in loads)
    assert len(set(run.published.values())) == STEPS + 1, "every update moved the weights"


@pytest.mark.slow
def test_workers_to_whom_things_happen_end_with_the_right_weights(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, tmp_path, {"sampler0": "flip", "sampler1": "exit"})
    history = run.fit(tiny_folder, "async", "ray", rollout_workers=2)
    assert len(history) == STEPS
    damaged, restarted = run.loads("sampler0"), run.loads("sampler1")
    [at] = [i for i, load in enumerate(damaged) if load["version"] is None]
    assert "damaged on its way" in damaged[at]["error"]
    assert damaged[at + 1]["kind"] == "whole", "it is repaired at once"
    assert len({load["pid"] for load in damaged}) == 1, "in the same process"
    assert damaged[-1]["version"] == restarted[-1]["version"] == STEPS
    processes = list(dict.fromkeys(load["pid"] for load in restarted))
    assert len(processes) == 2
    first = next(load for load in restarted if load["pid"] == processes[1])
    assert first["kind"] == "whole", "a new process has no weights to put a delta on"


@pytest.mark.parametrize(
    ("fault", "placement"),
    [("flip", "local"), ("stale", "local"), pytest.param("flip", "ray", marks=pytest.mark.slow)],
)
def test_a_repaired_sampler_changes_nothing_in_one_step_off(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    placement: str,
) -> None:
    run = Run(monkeypatch, tmp_path, {"sampler": fault})
    wanted = run.fit(tiny_folder, "one_step_off", "local", delta_sync=False)
    real = run_spec.role_specs

    def specs(build: Any) -> list[RoleSpec]:
        return [
            replace(s, worker_class=sync_probe.NotingRollout, options=s.options | run.extra)
            if s.name == "sampler"
            else s
            for s in real(build)
        ]

    monkeypatch.setattr("engine.trainers.run_spec.role_specs", specs)
    found = run.fit(tiny_folder, "one_step_off", placement)
    kinds = [load["kind"] for load in run.loads("sampler")]
    assert kinds == ["whole", fault, "whole", *["delta"] * (STEPS - 3)]
    for step, metrics in enumerate(wanted):
        for name in ("reward/mean", "response/length_mean", "actor/grad_norm"):
            assert found[step][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), (
                step,
                name,
            )


def test_settings_that_have_no_effect_are_refused() -> None:
    for section, key, value in (("trainer", "delta_sync", True), ("rollout", "dtype", "bfloat16")):
        config = RLConfig.model_validate({section: {key: value}})
        with pytest.raises(ConfigError, match=rf"{section}\.{key}=.*with trainer.mode=sync"):
            check_config(config)
