"""What is registered, as protobufs, and as an archive that is the same byte for byte.

`pyflyte package` writes the time into the archive and into each file's entry, the owner, and files
in the order of the folder; flytekit lists a branch's predecessors in the order of a set, and
protobuf's maps come out in any order. None of that is here.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.models.admin.workflow import WorkflowSpec
from flytekit.models.core.workflow import Node
from flytekit.models.launch_plan import LaunchPlan
from flytekit.models.task import TaskSpec
from flytekit.tools.repo import serialize_get_control_plane_entities
from flytekit.tools.translator import FlyteControlPlaneEntity

from engine.storage.atomic import fsync

if TYPE_CHECKING:
    from google.protobuf.message import Message

PACKAGE = "workflows"
PYTHON = "/opt/venv/bin/python"  # in the images


def serialize(
    root: Path, image: str, project: str = "", domain: str = "", version: str = ""
) -> tuple[list[FlyteControlPlaneEntity], SerializationSettings]:
    """Load all of `workflows/` and return what is to be registered, with the settings used.

    Without project, domain and version these are filled in by who registers the archive
    (`flytectl register files`).
    """
    from flytekit.tools.module_loader import add_sys_path, just_load_modules

    default = Image.look_up_image_info("default", image)
    settings = SerializationSettings(
        image_config=ImageConfig(default_image=default, images=[default]),
        project=project or None,
        domain=domain or None,
        version=version or None,
        python_interpreter=PYTHON,
    )
    with add_sys_path(root):
        just_load_modules([PACKAGE])
    # Without the root, which dynamic tasks would carry: an archive is the same in any folder.
    entities = serialize_get_control_plane_entities(settings)
    for entity in entities:
        if isinstance(entity, WorkflowSpec):
            for template in (entity.template, *entity.sub_workflows):
                _sort_predecessors(template.nodes)
    return entities, settings


def _sort_predecessors(nodes: Iterable[Node]) -> None:
    for node in nodes:
        node._upstream_node_ids = sorted(node.upstream_node_ids)
        if node.branch_node is not None:
            block = node.branch_node.if_else
            cases = [case.then_node for case in (block.case, *(block.other or ()))]
            _sort_predecessors([*cases, block.else_node] if block.else_node else cases)


def kind_of(entity: FlyteControlPlaneEntity) -> tuple[str, str, int]:
    """An entity's kind in words, its name, and the kind's number in Flyte's file names."""
    if isinstance(entity, TaskSpec):
        return "task", str(entity.template.id.name), 1
    if isinstance(entity, WorkflowSpec):
        return "workflow", str(entity.template.id.name), 2
    assert isinstance(entity, LaunchPlan)
    return "launch plan", str(entity.id.name), 3


def write_package(entities: Sequence[FlyteControlPlaneEntity], path: Path) -> None:
    """Write the archive that `flytectl register files --archive` reads, whole or not at all."""
    digits = len(str(len(entities)))
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for index, entity in enumerate(entities):
            _, name, number = kind_of(entity)
            content = message_bytes(entity.to_flyte_idl())
            entry = tarfile.TarInfo(f"{index:0{digits}}_{name}_{number}.pb")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(buffer.getvalue())
        fsync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def message_bytes(message: Message) -> bytes:
    """Serialise a protobuf with its maps in order."""
    return message.SerializeToString(deterministic=True)
