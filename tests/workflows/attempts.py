"""One attempt at a task through the container's entry point, and what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from flyte_runs import TINY, Place, merge
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from s3_server import ACCESS_KEY, SECRET_KEY, flyte_variables, s3_server

DEADLINE_S = 480.0  # of one attempt; imports alone may take minutes on a busy machine
EXECUTION = "f1a2b3"

CHANGES: dict[str, Any] = {
    # Long enough to be struck in the middle.
    "sft": {"max_steps": 80, "save_freq": 3, "threads": 1, "preemption_grace_s": 60},
    "rl": {
        "trainer": {
            "total_training_steps": 14,
            "save_freq": 2,
            "threads": 1,
            "test_freq": 100,
            "preemption_grace_s": 60,
        }
    },
}


@dataclass(frozen=True)
class Inputs:
    """What the workflow hands to the stages."""

    place: Place
    plan: Any  # engine.stages.settings.Plan
    dataset: FlyteDirectory
    warm_start: FlyteDirectory

    def of(self, stage: str) -> bytes:
        """`inputs.pb` of a stage, as Flyte writes it."""
        from tasks import stages

        values = {"run": self.plan.run, "dataset": self.dataset}
        if stage == "sft":
            task = stages.sft_stage
            values |= {"settings": self.plan.sft}
        else:
            task = stages.rl_stage
            values |= {"settings": self.plan.rl, "warm_start": self.warm_start}
            values |= {"reward_model": None}
        hints = task.python_interface.inputs
        assert set(values) == set(hints)
        context = FlyteContextManager.current_context()
        literals = TypeEngine.dict_to_literal_map(context, values, hints)
        message: bytes = literals.to_flyte_idl().SerializeToString()
        return message


def prepared_inputs(place: Place) -> Inputs:
    """Run the stages before the ones that are attempted, in this process."""
    import copy

    from tasks.inputs import RLHFConfig
    from tasks.stages import plan, preprocess, sft_stage

    values = copy.deepcopy(TINY)
    merge(values, CHANGES)
    with place.entered():
        made = plan(
            config=RLHFConfig.model_validate(values),
            source="",
            path="",
            model="",
            preferences="",
            seed=-1,
            profile="laptop",
            workflow="rlhf",
        )
        dataset = preprocess(run=made.run, settings=made.dataset).dataset
        brief = made.sft.config.model_copy(update={"max_steps": 3})
        warm_start = sft_stage(
            run=made.run, settings=made.sft.model_copy(update={"config": brief}), dataset=dataset
        )
    folders = (FlyteDirectory(str(one), remote_directory=False) for one in (dataset, warm_start))
    return Inputs(place, made, *folders)


@dataclass
class Attempt:
    """A pod's process: its own MLflow store and output folders, checkpoints beside the others'."""

    inputs: Inputs
    stage: str
    args: list[str]  # of the registered container
    where: str  # folder or address
    name: str
    before: str = ""  # name of the attempt before it
    variables: dict[str, str] = field(default_factory=dict)
    text: str = ""  # what it printed

    def __post_init__(self) -> None:
        self.root = self.inputs.place.root / f"{self.stage}-{Path(self.where).name}-{self.name}"
        self.root.mkdir()
        (self.root / "inputs.pb").write_bytes(self.inputs.of(self.stage))
        shutil.copy(self.inputs.place.root / "mlflow.db", self.root / "mlflow.db")

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The process, which has ended when the block has."""
        place = lambda part: f"{self.where}/{self.name}/{part}"  # noqa: E731
        earlier = f"{self.where}/{self.before}/checkpoints" if self.before else '""'
        filled = {
            "{{.input}}": str(self.root / "inputs.pb"),
            "{{.outputPrefix}}": place("out"),
            "{{.rawOutputDataPrefix}}": place("raw"),
            "{{.checkpointOutputPrefix}}": place("checkpoints"),
            "{{.prevCheckpointPrefix}}": earlier,
        }
        assert set(filled) <= set(self.args), self.args
        assert self.args[0] == "pyflyte-execute"
        settings = {
            "FLYTE_INTERNAL_EXECUTION_ID": EXECUTION,
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.root / 'mlflow.db'}",
            "RAY_TMPDIR": "/tmp",
            "OMP_NUM_THREADS": "1",
        }
        (self.root / "work").mkdir()
        with (self.root / "log").open("w") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "flytekit.bin.entrypoint",
                    *(filled.get(argument, argument) for argument in self.args),
                ],
                env=self.inputs.place.environment(settings | self.variables),
                cwd=self.root / "work",
                stdout=log,
                stderr=log,
                text=True,
            )
            try:
                yield process
                process.wait(DEADLINE_S)
            finally:
                process.kill()
                process.wait()
                self.text = (self.root / "log").read_text()

    def wait_for_a_checkpoint(self, process: subprocess.Popen[str]) -> None:
        """Return as soon as this attempt has one that is complete."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(name.endswith("/COMPLETE") for name in self.names("checkpoints")):
            log = (self.root / "log").read_text()
            assert process.poll() is None, f"it ended before its first checkpoint: {log}"
            assert time.monotonic() < deadline, f"no checkpoint in {DEADLINE_S:g} s: {log}"
            time.sleep(0.25)  # an S3 server of the tests lives in this very process

    def names(self, part: str) -> list[str]:
        """Files under one of its prefixes."""
        fs, path = self._fs(part)
        fs.invalidate_cache()
        found = [str(name) for name in fs.find(path)] if fs.exists(path) else []
        return sorted(name.split(f"/{self.name}/{part}/")[1] for name in found)

    def error(self) -> ContainerError:
        """What it told Flyte."""
        document = ErrorDocument()
        document.ParseFromString(self._read("out", "error.pb"))
        return document.error

    def artifact(self) -> Path:
        """A copy of the folder that the task returned."""
        outputs = LiteralMap()
        assert "outputs.pb" in self.names("out"), self.text
        outputs.ParseFromString(self._read("out", "outputs.pb"))
        fs, path = fsspec.core.url_to_fs(outputs.literals["o0"].scalar.blob.uri, **self._options())
        copy = self.root / "artifact"
        if not copy.exists():
            fs.get(path, str(copy), recursive=True)
        return copy

    def digest(self, name: str) -> str:
        """SHA-256 of a file of the result."""
        return hashlib.sha256((self.artifact() / name).read_bytes()).hexdigest()

    def steps(self, metric: str) -> list[int]:
        """Steps at which MLflow has a value of a metric, by this attempt."""
        with contextlib.closing(sqlite3.connect(self.root / "mlflow.db")) as database:
            found = database.execute(
                "select m.step from metrics m join runs r on r.run_uuid = m.run_uuid join tags t"
                " on t.run_uuid = m.run_uuid and t.key = 'flyte.execution'"
                " where m.key = ? and t.value = ? order by m.step",
                (metric, EXECUTION),
            ).fetchall()
        return [step for (step,) in found]

    def _fs(self, part: str) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(f"{self.where}/{self.name}/{part}", **self._options())
        return fs, path

    def _read(self, part: str, name: str) -> bytes:
        fs, path = self._fs(part)
        return bytes(fs.cat_file(f"{path}/{name}"))

    def _options(self) -> dict[str, Any]:
        if not self.variables:
            return {}
        return {
            "key": self.variables["FLYTE_AWS_ACCESS_KEY_ID"],
            "secret": self.variables["FLYTE_AWS_SECRET_ACCESS_KEY"],
            "client_kwargs": {"endpoint_url": self.variables["FLYTE_AWS_ENDPOINT"]},
        }


@contextlib.contextmanager
def s3_variables(bucket: str) -> Iterator[dict[str, str]]:
    """An S3 server with a bucket; its address and keys as Flyte gives them to pods."""
    import s3fs

    with s3_server() as endpoint:
        options = {"endpoint_url": endpoint}
        s3fs.S3FileSystem(key=ACCESS_KEY, secret=SECRET_KEY, client_kwargs=options).mkdir(bucket)
        yield flyte_variables(endpoint)
