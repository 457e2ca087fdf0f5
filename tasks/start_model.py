"""The start model as it is: what `sft.skip` has in the place of the warm start.

Artifact `start_model`: the files of the folder or hub id, and the dataset's tokenizer where
`data.apply_chat_template_kwargs` gave that another chat template.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flytekit.types.directory import FlyteDirectory

from engine.config import ModelConfig
from tasks.context import RunContext, echo
from tasks.fetch import HUB_FILES, HUB_SECONDS
from tasks.stage import stage

if TYPE_CHECKING:
    from engine.storage.manifest import Parent

START_MODEL: Literal["start_model"] = "start_model"  # kind of the artifact


def publish_start_model(
    run: RunContext, dataset: FlyteDirectory, start: ModelConfig, start_digest: str
) -> FlyteDirectory:
    """Make the start model an artifact, nothing of it changed; an EngineError where it is away."""
    from engine.data.tokenizer import load_tokenizer
    from engine.storage.hashing import MANIFEST
    from engine.storage.manifest import read_manifest

    settings = {"model": start.model_dump(mode="json"), "start_digest": start_digest}
    with stage(START_MODEL, run, settings) as this:
        data = this.load_parent("dataset", dataset)
        source = model_files(start.path)
        if (source / MANIFEST).is_file():  # of ours, so that its lineage goes on
            this.parents.append(read_manifest(source).as_parent("start", str(source.absolute())))
        left_out = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(source, this.folder, ignore=left_out, dirs_exist_ok=True)
        asked = load_tokenizer(data / "tokenizer")
        if load_tokenizer(this.folder).chat_template != asked.chat_template:
            asked.save_pretrained(this.folder)
        echo(f"start_model: no warm start (sft.skip): RL begins with {start.path} as it is")
        return this.publish({})


def first_model(parents: Iterable[Parent]) -> Literal["warm_start", "start_model"]:
    """What RL began with, by the parents of its policy or evaluation."""
    kinds = {parent.name: parent.kind for parent in parents}
    return START_MODEL if kinds.get("warm_start") == START_MODEL else "warm_start"


def trained_by(parents: Iterable[Parent]) -> Literal["", "preference"]:
    """What trained an evaluation's policy, where it was not RL."""
    kinds = {parent.name: parent.kind for parent in parents}
    return "preference" if kinds.get("policy") == "preference" else ""


def model_files(path: str) -> Path:
    """A model's folder; for a hub id that in the hub's cache. ModelError where the hub is away."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    from engine.errors import ModelError
    from engine.storage.hub import is_hub_id, split_revision

    if not is_hub_id(path):
        return Path(path)
    name, revision = split_revision(path)
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=HUB_FILES, etag_timeout=HUB_SECONDS
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"model.path={path!r} can't be downloaded from the hub ({reason}); check the network, "
            "or give a folder"
        ) from error
    return Path(found)
