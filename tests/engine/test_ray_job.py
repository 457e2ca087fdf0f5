"""`ray job submit` with images/runtime_env.yaml, for real: a head and a second node, both here."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import yaml
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM

from engine.console import SILENCE
from engine.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
RUNTIME_ENV = ROOT / "images" / "runtime_env.yaml"
RAY = Path(sys.executable).with_name("ray")


def test_runtime_env_says_what_it_should() -> None:
    settings = yaml.safe_load(RUNTIME_ENV.read_text())
    assert settings["working_dir"] == "."
    assert {".git/", ".venv/", "outputs/", "mlflow.db"} <= set(settings["excludes"])
    assert "pip" not in settings
    assert "conda" not in settings
    # Workers on a cluster don't get the driver's environment, so what `quiet` sets is said again.
    silent = settings["env_vars"]
    assert silent.items() <= SILENCE.items()
    assert silent["TOKENIZERS_PARALLELISM"] == "false"


@dataclass
class Cluster:
    """A Ray cluster of this test's own."""

    home: Path
    environment: dict[str, str]
    gcs: str  # host:port
    dashboard: str  # URL

    def ray(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run a `ray` command against the cluster and return its output."""
        done = subprocess.run(
            [RAY, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def listed(self, what: str) -> list[dict[str, Any]]:
        """The state API's answer to `ray list nodes` or `ray list actors`."""
        output = self.ray("list", what, "--address", self.dashboard, "--format", "json")
        return list(json.loads(output)) if output.lstrip().startswith("[") else []  # "No resource"

    def processes(self) -> list[psutil.Process]:
        """All living processes of the cluster, which inherit its RAY_TMPDIR."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("RAY_TMPDIR") == str(self.home)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, as in production, and one node with a CPU; both end with the test."""
    # A short path, because Ray's sockets lie below it; a token, so that no other cluster's is read.
    home = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))
    gcs, dashboard, *agents = free_ports(4)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        "RAY_TMPDIR": str(home),
        # The job's command says `python`, as in an activated environment.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",  # the job must find our code in its working directory
    }
    subject = Cluster(home, environment, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}")
    common = ["--block", "--object-store-memory", "100000000", "--disable-usage-stats"]
    head = ["--head", "--port", str(gcs), "--num-cpus", "0", "--dashboard-host", "127.0.0.1"]
    head += ["--dashboard-port", str(dashboard)]
    node = ["--address", subject.gcs, "--num-cpus", "1"]
    started = []
    try:
        for name, own, agent in (("a", head, agents[0]), ("b", node, agents[1])):
            log = (home / f"{name}.log").open("w")
            folder = ["--temp-dir", str(home / name), "--dashboard-agent-listen-port", str(agent)]
            started.append(
                subprocess.Popen(
                    [RAY, "start", *own, *common, *folder],
                    cwd="/",
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
            wait_for_nodes(subject, len(started), log.name)
        yield subject
    finally:
        for process in reversed(started):
            process.terminate()
        psutil.wait_procs(subject.processes(), timeout=10)
        for left in subject.processes():
            left.kill()
        for process in started:
            process.wait(10)
        shutil.rmtree(home, ignore_errors=True)


def wait_for_nodes(cluster: Cluster, count: int, log: str) -> None:
    deadline = time.monotonic() + 240
    while True:
        with contextlib.suppress(AssertionError):
            alive = [n for n in cluster.listed("nodes") if n["state"] == "ALIVE"]
            if len(alive) == count:
                return
        assert time.monotonic() < deadline, Path(log).read_text()
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_submitted_job_runs_across_both_nodes(
    cluster: Cluster, tiny_folder: Path, tmp_path: Path
) -> None:
    rows = [{**row, "extra_info": {"index": i}} for i, row in enumerate(arithmetic_rows(8))]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    reward = tmp_path / "digits.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))\n"
    )
    arguments = [
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={tiny_folder}",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.rollout.n=4",
        f"custom_reward_function.path={reward}",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "trainer.threads=1",
    ]
    submit = ["job", "submit", "--address", cluster.dashboard, "--submission-id", "tiny"]
    submit += ["--runtime-env", "images/runtime_env.yaml", "--"]
    entry = ["python", "-m", "engine.main_ppo", *arguments]
    output = cluster.ray(*submit, *entry, timeout=600)
    assert "rl    2/2 · reward" in output
    status = cluster.ray("job", "status", "--address", cluster.dashboard, "tiny")
    assert "succeeded" in status.lower()

    model = tmp_path / "out" / "step_2"
    assert f"model       {model}" in output
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    assert len(load_tokenizer(model)) == len(load_tokenizer(tiny_folder))

    actors = {actor["name"]: actor for actor in cluster.listed("actors")}
    ours = {name.split("/", 1)[1]: a for name, a in actors.items() if name.startswith("hybridfly")}
    assert set(ours) == {"actor+rollout+reference/0", "reward/0"}
    # The controller runs on the head, which has no CPU for the policy: they met over the network.
    (driver,) = (a for name, a in actors.items() if "raysubmit" in name or name.endswith("tiny"))
    assert ours["actor+rollout+reference/0"]["node_id"] != driver["node_id"]
    assert {a["state"] for a in ours.values()} == {"DEAD"}, "workers outlived their job"
