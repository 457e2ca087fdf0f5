"""What is registered, as protobufs by short name, serialised in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flyte_runs import REPOSITORY
from flyteidl.admin.launch_plan_pb2 import LaunchPlanSpec
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.workflow_pb2 import WorkflowTemplate

IMAGE = f"ghcr.io/x/y@sha256:{'a' * 64}"


@dataclass(frozen=True)
class Registered:
    """Messages by kind and last part of the name."""

    messages: dict[tuple[int, str], Any]

    def task(self, name: str) -> TaskTemplate:
        return self.messages[1, name].template

    def workflow(self, name: str) -> WorkflowTemplate:
        return self.messages[2, name].template

    def launch_plan(self, name: str) -> LaunchPlanSpec:
        return self.messages[3, name].spec


def serialised() -> Registered:
    """Serialise all of `workflows/`; a workflow's own launch plan has its dotted name."""
    from workflows.packaging import kind_of, serialize

    entities, _ = serialize(REPOSITORY, IMAGE, "p", "d", "v")
    messages = {}
    for entity in entities:
        _, name, number = kind_of(entity)
        messages[number, name if number == 3 else name.rsplit(".", 1)[-1]] = entity.to_flyte_idl()
    return Registered(messages)
