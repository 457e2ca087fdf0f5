"""The pipelines of `workflows.pipelines` as flytekit's workflows."""

from pathlib import Path
from typing import Any

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from engine.stages.stage import Artifact
from tasks import stages
from tasks.inputs import RLHFConfig
from workflows.approval import gate
from workflows.launching import settings
from workflows.pipelines import Pipeline

TYPES = {Path: FlyteFile, Artifact: FlyteDirectory}


class Flytekit:
    """The stages as a pipeline calls them: flytekit's tasks, which return promises."""

    gate = staticmethod(gate)

    def __getattr__(self, stage: str) -> Any:
        return getattr(stages, stage)

    def in_order(self, earlier: Any, later: Any) -> None:
        """Let a stage wait for one whose artifact it doesn't get."""
        earlier >> later


FRONT = Flytekit()


def workflow_of(pipeline: Pipeline, module: str, on_failure: object) -> Any:
    """Return the workflow `<module>.<pipeline>`, whose inputs are those of a plan."""

    def composed(**inputs: object) -> Any:
        plan, run = pipeline.bind(FRONT, inputs)
        return run(plan())

    config = settings(pipeline.preset) if pipeline.preset else RLHFConfig()
    return workflow(pipeline.declare(composed, module, config, TYPES), on_failure=on_failure)
