"""A checkout of the sources, the registration's command in it, and the archive that it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.util import cache_from_source
from pathlib import Path

from flyte_runs import REPOSITORY
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from protobufs import IMAGE, Registered
from test_rlhf import tracked_files

CUDA = f"ghcr.io/x/y-cuda@sha256:{'b' * 64}"
SECRETS = (
    *("--secret", "MLFLOW_TRACKING_TOKEN=team/mlflow"),
    *("--secret", "WANDB_API_KEY=team/wandb"),
)
TIME = "2026-01-01T00:00:00+00:00"
MESSAGES = {1: TaskSpec, 2: WorkflowSpec, 3: LaunchPlan}  # by the number in a file's name


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments],
        env={**os.environ, "GIT_AUTHOR_DATE": TIME, "GIT_COMMITTER_DATE": TIME},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def make_checkout(folder: Path) -> None:
    """Write and commit a copy of the sources, with their bytecode."""
    for name in (*tracked_files(), "Dockerfile", "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
        _copy_compiled(REPOSITORY / name, folder / name)
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")


def _copy_compiled(source: Path, copy: Path) -> None:
    """Take the source's bytecode along, so that no process compiles it once more."""
    if source.suffix == ".py" and (code := Path(cache_from_source(source))).exists():
        copy_of_code = Path(cache_from_source(copy))
        copy_of_code.parent.mkdir(exist_ok=True)
        shutil.copy2(code, copy_of_code)


def run(folder: Path, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLYTE_", "HYBRIDFLYTE_"))}
    own = {"PYTHONPATH": str(folder), "HOME": str(folder.parent), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, **own},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
    )


def register(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "workflows.register", "--image", IMAGE, "--cuda-image", CUDA, *SECRETS]
    return run(folder, [*command, *options], **variables)


def pack(checkout: Path, target: Path, seed: int, umask: int) -> bytes:
    """Pack the workflows of a checkout under a hash seed."""
    before = os.umask(umask)
    try:
        done = register(
            checkout,
            *("--package", str(target)),
            PYTHONHASHSEED=str(seed),
            HYBRIDFLYTE_NOTIFY="night@example.com",
        )
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"flytectl register files --archive {target}" in done.stdout
    return target.read_bytes()


def read_archive(path: Path) -> Registered:
    """The messages of an archive, ours or pyflyte's."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            stem, _, digit = member.name.removesuffix(".pb").rpartition("_")
            if file is None or not (digit.isdigit() and int(digit) in MESSAGES):
                continue
            number, name = int(digit), stem.partition("_")[2]
            message = MESSAGES[number].FromString(file.read())
            found[number, name if number == 3 else name.rsplit(".", 1)[-1]] = message
    return Registered(found)
