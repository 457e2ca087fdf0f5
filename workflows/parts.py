"""The pipelines of `workflows.pipelines` as flytekit's workflows."""

from __future__ import annotations

import inspect
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


def workflow_of(pipeline: Pipeline, module: str, on_failure: Any) -> Any:
    """Return the workflow `<module>.<pipeline>`, whose inputs are those of a plan."""
    own = {parameter.name for parameter in pipeline.own_inputs}

    def composed(**inputs: Any) -> Any:
        others = {name: inputs.pop(name) for name in own}
        return pipeline.body(FRONT, stages.plan(**inputs, workflow=pipeline.name), **others)

    config = settings(pipeline.preset) if pipeline.preset else RLHFConfig()
    signature, texts = pipeline.signature(config, TYPES), pipeline.input_help()
    description, _, returns = (inspect.getdoc(pipeline.body) or "").partition("\n\nReturns:")
    lines = [f"    {name}: {texts[name]}" for name in signature.parameters]
    composed.__name__ = composed.__qualname__ = pipeline.name
    composed.__module__ = module
    composed.__doc__ = "\n".join([f"{description}\n\nArgs:", *lines, f"\nReturns:{returns}"])
    composed.__signature__ = signature  # type: ignore[attr-defined]
    composed.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    composed.__annotations__["return"] = signature.return_annotation
    return workflow(composed, on_failure=on_failure)
