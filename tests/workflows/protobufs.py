"""What is registered, as protobufs by short name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from flyteidl.admin.launch_plan_pb2 import LaunchPlanSpec
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.workflow_pb2 import WorkflowTemplate
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from engine.stages.profiles import Profile
from engine.stages.settings import RunContext

IMAGE = f"ghcr.io/x/y@sha256:{'a' * 64}"
PYTHON = "/opt/venv/bin/python"


@dataclass(frozen=True)
class Registered:
    """Messages by kind and last part of the name; a workflow's own launch plan has all parts."""

    messages: dict[tuple[int, str], Any]

    def task(self, name: str) -> TaskTemplate:
        return self.messages[1, name].template

    def workflow(self, name: str) -> WorkflowTemplate:
        return self.messages[2, name].template

    def launch_plan(self, name: str) -> LaunchPlanSpec:
        return self.messages[3, name].spec


def as_on(stage: Any, profile: Profile, folder: Path) -> TaskTemplate:
    """The template that a stage's dynamic task writes in its container, for this profile.

    `folder` is any that exists, for the inputs that are folders.
    """
    context = FlyteContextManager.current_context()
    image = Image.look_up_image_info("default", IMAGE)
    settings = SerializationSettings(
        ImageConfig(image, [image]), project="p", domain="d", version="v", python_interpreter=PYTHON
    )
    mode = ExecutionState.Mode.TASK_EXECUTION
    running = context.new_execution_state().with_params(mode=mode)
    inside = context.with_serialization_settings(settings).with_execution_state(running)
    stage._wf = None  # flytekit keeps the workflow of the first call, the only one of a container
    try:
        with FlyteContextManager.with_context(inside):
            spec = stage.execute(profile=profile, **any_inputs(stage, folder))
    finally:
        stage._wf = None
    (template,) = spec.tasks
    (node,) = spec.nodes
    assert node.task_node.reference_id.name == template.id.name
    written: TaskTemplate = template.to_flyte_idl()
    return written


def any_inputs(stage: Any, folder: Path) -> dict[str, Any]:
    """Some value of each input's type, but of the profile."""
    some: dict[Any, Any] = {
        FlyteDirectory | None: None,
        str: "",
        int: 0,
        bool: False,
        FlyteDirectory: FlyteDirectory(str(folder), remote_directory=False),
        RunContext: RunContext(run_id="r", mlflow_run="m", experiment="e", started_at=0.0),
    }
    kinds = dict(stage.python_interface.inputs)
    del kinds["profile"]

    def value(kind: Any) -> Any:
        if kind in some:
            return some[kind]
        if get_origin(kind) is Literal:
            return get_args(kind)[0]
        if get_origin(kind) in (dict, tuple):
            return get_origin(kind)()
        fields = kind.model_fields.items()
        return kind(**{name: value(f.annotation) for name, f in fields if f.is_required()})

    return {name: value(kind) for name, kind in kinds.items()}
