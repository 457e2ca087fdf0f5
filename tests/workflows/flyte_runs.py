"""Running the main job in a place of its own: home, artifacts, MLflow store and working directory.

`Place.pyflyte` is the command line in a process of its own, as a person has it; `Place.invoke` is
the same command in this process, which saves ten seconds of imports.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOW = REPOSITORY / "workflows" / "rlhf.py"
STAGES = ("dataset", "sft", "reward_audit", "rl", "evaluation", "promotion")
PYFLYTE = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"

TINY: dict[str, Any] = {
    "data": {"sft_size": 256, "train_size": 64, "validation_size": 16, "test_size": 32},
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "sft": {"max_steps": 6, "train_batch_size": 32},
    "rl": {
        "rollout": {"n": 4},
        "trainer": {"total_training_steps": 3, "train_batch_size": 8, "placement": "local"},
    },
    "evaluate": {"samples": 2, "k": 2},
    "promote": {"bootstrap": True, "minimum_problems": 32},  # it learns next to nothing
}
SECRET = "hunter2hunter2"
OURS = re.compile(
    r"Running Execution on local\.|run \d{8}-\d{6}-\w{4}: |(dataset|sft|reward_audit|rl|evaluation"
    r"|evaluate|promotion|preprocess|model|report|summary|MLflow (run|UI)|lineage): "
    r"|rl +\d+/\d+ · |RLHF run |[┏┃┡│└]|Both models are near 0|/.*/summary\.json$"
)
BY_DEFAULT = {"rl": {"trainer": {"placement": ""}}}
ON_RAY = {"rl": {"trainer": {"placement": "ray"}}}
ONE_STEP = {"rl": {"trainer": {"total_training_steps": 1}}}
NO_WARM_START = {"sft": {"skip": True}, "model": {"dtype": "bfloat16"}}
REQUIRED = {"promote": {"approval": "required"}}

REWARD = '''
"""A reward that fails as long as a file is there."""
from pathlib import Path
from typing import Any

def score(prompts, completions, *, ground_truth, **columns):
    if Path(__file__).with_name("broken").exists():
        raise RuntimeError("the judge has no quota left")
    return [float(len(text) % 2) for text in completions]
'''


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def error(self) -> str:
        """The text of the error box, unwrapped to one line."""
        lines = [line for line in self.err.splitlines() if line.startswith("│")]
        return " ".join(line.strip("│ ") for line in lines)

    @property
    def foreign(self) -> list[str]:
        """The lines that are not ours."""
        return [line for line in self.text.splitlines() if not OURS.match(line)]

    @property
    def stages(self) -> list[str]:
        """The stages whose body ran, in order."""
        return re.findall(r"^(\w+): starts$", self.out, re.MULTILINE)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, whose path is the last line."""
        values: dict[str, Any] = json.loads(Path(self.out.strip().splitlines()[-1]).read_text())
        return values


@dataclass(frozen=True)
class Place:
    """A folder that holds everything a run reads and writes."""

    root: Path

    @property
    def artifacts(self) -> Path:
        return self.root / "hybridflyte"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def variables(self) -> dict[str, str]:
        for folder in ("home", "work", "tmp"):
            (self.root / folder).mkdir(exist_ok=True)
        return {
            "HOME": str(self.root / "home"),
            "HYBRIDFLYTE_HOME": str(self.artifacts),
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "PYTHONPATH": str(REPOSITORY),
        }

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("FLYTE_", "RAY_", "PYTEST_"))
        }
        # Ray's sockets must fit 107 bytes, so the folder for temporary files is not inside it.
        return {**kept, **self.variables, "TMPDIR": str(self.root / "tmp"), **(more or {})}

    def pyflyte(
        self, *arguments: str, variables: Mapping[str, str] | None = None, timeout: float = 600
    ) -> Outcome:
        """Run `pyflyte …` in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-c", PYFLYTE, *arguments],
            env=self.environment({"RAY_TMPDIR": "/tmp", **(variables or {})}),
            cwd=self.root / "work",
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def run(self, *arguments: str, **variables: str) -> Outcome:
        """Run `pyflyte run workflows/rlhf.py rlhf …` in this process."""
        return self.invoke("run", str(WORKFLOW), "rlhf", *arguments, **variables)

    def invoke(self, *arguments: str, answers: str = "", **variables: str) -> Outcome:
        """Run `pyflyte …` in this process; `answers` is what a person types."""
        from flytekit.clis.sdk_in_container.pyflyte import main

        from tasks.inputs import use_config_param

        use_config_param()  # as when workflows are imported by pyflyte, here perhaps before it
        with self.entered(**variables):
            done = CliRunner().invoke(main, list(arguments), input=answers)
        return Outcome(done.exit_code, done.stdout, done.stderr)

    @contextlib.contextmanager
    def entered(self, **variables: str) -> Iterator[None]:
        """Let this process live here: variables, working directory, Flyte's cache."""
        from flytekit.core.local_cache import LocalTaskCache

        with mock.patch.dict(os.environ, {**self.variables, **variables}):
            LocalTaskCache._initialized = False
            try:
                with contextlib.chdir(self.root / "work"):
                    yield
            finally:
                LocalTaskCache._initialized = False


def settings(*changes: Mapping[str, Any], base: Mapping[str, Any] = TINY) -> str:
    """The tiny configuration, changed, as JSON for `--config`."""
    merged = copy.deepcopy(dict(base))
    for change in changes:
        merge(merged, change)
    return json.dumps(merged)


def merge(into: dict[str, Any], change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


@dataclass(frozen=True)
class Finished:
    """A run through the command line, on Ray, and where it left everything."""

    place: Place
    outcome: Outcome
    config: str
    seconds: float  # that it took

    def artifact(self, stage: str) -> Path:
        return Path(self.outcome.summary["artifacts"][stage])


@dataclass(frozen=True)
class TriedAgain:
    """A run of which a stage failed, and the same command once more."""

    start: Path  # the model that it began with
    failed: Outcome
    tracking_uri: str  # of MLflow's store as it was between them
    half_written: list[Path]  # what was staged then
    again: Outcome


@dataclass(frozen=True)
class Asked:
    """A run that asked a person, who consented."""

    place: Place
    start: Path  # the model that RL began with
    outcome: Outcome
