"""Episodes of `harbor` (0.26) task folders: a program for the Python (3.12) that has it.

    VENV/bin/python examples/harbor_episode.py TASKS --rows > rows.jsonl
    rl.rollout.agent.play.name="VENV/bin/python examples/harbor_episode.py TASKS --agent terminus-2"

TASKS is a task's folder, or one of such folders. The trial is harbor's: its agent asks the policy,
and the task's own tests give the reward. It runs where `--environment` says: docker, podman, or
what else harbor has; `process` (`ProcessEnvironment`) where there is no container runtime. Nothing
of this project is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.task.task import Task
from harbor.models.trial import config as trial_config
from harbor.trial.trial import Trial

_SHARED = ("bin", "etc", "lib", "lib32", "lib64", "opt", "sbin", "usr", "dev")  # of the machine
_OUTPUT = 1 << 26  # bytes of a command's output
# A root of its own: the machine's programs, read-only, and folders that are the episode's.
_NAMESPACES = """set -e
for folder in $SHARED; do
  [ -e "/$folder" ] || continue
  mkdir -p "$ROOT/$folder"
  mount --rbind "/$folder" "$ROOT/$folder"
  [ "$folder" = dev ] || mount -o remount,bind,ro "$ROOT/$folder"
done
mkdir -p "$ROOT/proc"
mount -t proc proc "$ROOT/proc" 2>/dev/null || mount --rbind /proc "$ROOT/proc"
echo ready
exec sleep infinity
"""


class ProcessEnvironment(BaseEnvironment):
    """A task's environment as processes of this machine, in namespaces of their own.

    They have the machine's programs and network; files that they write are the episode's. Of a
    Dockerfile only WORKDIR, ENV and COPY from its folder are followed: no image is built.
    """

    @staticmethod
    def type() -> str:
        return "process"

    def _validate_definition(self) -> None:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            raise RuntimeError("tasks run as processes by unshare and nsenter; install util-linux")

    async def start(self, force_build: bool) -> None:
        """Make the root and the process that holds its namespaces."""
        self._root = Path(tempfile.mkdtemp(prefix="harbor-"))
        self._workdir, self._variables = self.task_env_config.workdir or "/", dict[str, str]()
        for folder in ("tmp", "root", "home", "var/tmp", "logs/agent", "logs/verifier",
                       "logs/artifacts", "tests", "solution"):  # fmt: skip
            (self._root / folder).mkdir(parents=True)
        self._holder = await asyncio.create_subprocess_exec(
            *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"),
            *("--kill-child", "sh", "-c", _NAMESPACES),
            env={"PATH": os.environ["PATH"], "ROOT": str(self._root), "SHARED": " ".join(_SHARED)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        started: Any = self._holder.stdout
        line = await asyncio.wait_for(started.readline(), 30.0)
        if line.strip() != b"ready":
            raise RuntimeError(
                f"tasks can't run as processes here ({line.decode().strip()}): the system refuses "
                "namespaces to users; install docker or podman"
            )
        number = self._holder.pid
        self._inside = Path(f"/proc/{number}/task/{number}/children").read_text().split()[0]
        await self._follow(self.environment_dir / "Dockerfile")

    async def _follow(self, dockerfile: Path) -> None:
        """Do what a Dockerfile says of folders, files and variables."""
        text = dockerfile.read_text() if dockerfile.is_file() else ""
        for line in text.replace("\\\n", " ").splitlines():
            word, _, rest = line.strip().partition(" ")
            if word.upper() == "WORKDIR" and self.task_env_config.workdir is None:
                self._workdir = os.path.join(self._workdir, rest.strip())
            elif word.upper() == "ENV":
                name, _, value = rest.strip().partition("=" if "=" in rest.split()[0] else " ")
                self._variables[name] = " ".join(shlex.split(value))
            elif word.upper() == "COPY" and "--from" not in rest:
                *sources, target = [part for part in shlex.split(rest) if part[:2] != "--"]
                place = os.path.join(self._workdir, target)
                for source in (self.environment_dir / name for name in sources):
                    if source.is_dir():
                        await self.upload_dir(source, place)
                    else:
                        into = target.endswith(("/", ".")) or len(sources) > 1
                        await self.upload_file(source, os.path.join(place, source.name * into))
        self._here(self._workdir).mkdir(parents=True, exist_ok=True)

    async def stop(self, delete: bool) -> None:
        """End all processes, and remove the files."""
        if self._holder.returncode is None:
            self._holder.kill()
            await self._holder.wait()
        if delete:
            shutil.rmtree(self._root, ignore_errors=True)

    def _here(self, path: Path | str) -> Path:
        """Return where a path of the environment lies on the machine, within its root."""
        place = (self._root / str(path).lstrip("/")).resolve()
        if not place.is_relative_to(self._root.resolve()):
            raise PermissionError(f"{path} leads out of the environment")
        return place

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._here(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True, symlinks=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command; all users are the one that the run has."""
        where = shlex.quote(cwd or self._workdir)
        enter = ["nsenter", f"--target={self._inside}", "--user", "--mount", "--pid"]
        enter += ["--preserve-credentials", "chroot", str(self._root)]
        limit = [] if timeout_sec is None else ["timeout", "--kill-after=2", str(timeout_sec)]
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "xterm"}
        # In files, as what a command leaves in the background would keep pipes open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *(*enter, *limit, "/bin/bash", "-c", f"cd {where} || exit 1\n{command}"),
                env=variables | self._variables | (self._merge_env(env) or {}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
            code = await process.wait()
            if limit and code in (124, 137):
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
            texts = [os.pread(file.fileno(), _OUTPUT, 0) for file in (output, errors)]
        stdout, stderr = (text.decode(errors="replace") for text in texts)
        return ExecResult(stdout=stdout, stderr=stderr, return_code=code)


def available_environment() -> str:
    """The container runtime that answers, or `process`, which it says so."""
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            continue
        if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    print(
        "no container runtime answers (docker, podman): tasks run as processes of this machine, "
        "with its programs and network, and the images of their Dockerfiles are not built",
        file=sys.stderr,
    )
    return "process"


async def play(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run one trial with the model that the environment's variables name; its rewards."""
    this: Any = asyncio.current_task()  # whose environment goes, too, where the run ends it
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    where = options.environment or available_environment()
    own = f"{Path(__file__).stem}:{ProcessEnvironment.__name__}"
    key = "import_path" if ":" in options.agent else "name"
    agent = {key: options.agent, "model_name": "openai/policy", "kwargs": options.agent_options}
    with tempfile.TemporaryDirectory(prefix="trials-") as trials:
        config = trial_config.TrialConfig(
            task=trial_config.TaskConfig(path=folder),
            trials_dir=Path(trials),
            agent=trial_config.AgentConfig(**agent),
            environment=trial_config.EnvironmentConfig(
                **({"import_path": own} if where == "process" else {"type": where})
            ),
        )
        result = await (await Trial.create(config)).run()
    if result.verifier_result is None or not result.verifier_result.rewards:
        error = result.exception_info
        why = f"{error.exception_type}: {error.exception_message}" if error else "no reward"
        raise SystemExit(f"task {folder.name}: {why}")
    rewards: dict[str, Any] = dict(result.verifier_result.rewards)
    failed = result.exception_info is not None  # harbor has the tests' word for it all the same
    return {"reward": sum(rewards.values()) / len(rewards), **rewards, "agent_failed": failed}


def task_folders(path: Path) -> list[Path]:
    """The folders of tasks at or below `path`; SystemExit without any."""
    folders = (
        [path] if Task.is_valid_dir(path) else sorted(filter(Task.is_valid_dir, path.iterdir()))
    )
    if not folders:
        raise SystemExit(f"{path} has no task of harbor: a folder with task.toml and tests")
    return folders


def row(folder: Path) -> dict[str, object]:
    """The row of RL data of a task."""
    task = Task(folder)
    return {
        "data_source": task.name,
        "prompt": [{"role": "user", "content": task.instruction}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"task": folder.name},
    }


def main() -> None:
    """Print rows, or play the episode of the row that the run asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("tasks", type=Path, help="a task's folder, or the folder of several")
    parser.add_argument("--rows", action="store_true", help="print the row of each task")
    parser.add_argument("--agent", default="terminus-2", help="a name of harbor, or module:Class")
    parser.add_argument("--agent-options", type=json.loads, default={}, help="of the agent, JSON")
    parser.add_argument("--environment", default="", help="docker, podman, process, …")
    options = parser.parse_args()
    folders = task_folders(options.tasks)
    if options.rows:
        for folder in folders:
            print(json.dumps(row(folder), ensure_ascii=False))
        return
    asked = json.loads(Path(os.environ["HYBRIDFLYTE_ROW"]).read_text())["extra_info"]["task"]
    [folder] = [folder for folder in folders if folder.name == asked]
    result = asyncio.run(play(folder, options))
    Path(os.environ["HYBRIDFLYTE_REWARD"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
