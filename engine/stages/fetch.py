"""Stage `fetch` makes a model from elsewhere, or the start model, an artifact of this run.

It is the model's own artifact (`rl`, `sft`) where that has a manifest, else `model`, a copy.
"""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from engine.config import ModelConfig
from engine.console import display_path, say
from engine.errors import ConfigError, LineageError, StorageError
from engine.lineage.lookup import PREFIX, is_reference
from engine.stages.settings import RunContext
from engine.stages.stage import Artifact, shared, show_facts, stage
from engine.storage import artifacts
from engine.storage.digests import MANIFEST, tree_digest
from engine.storage.filesystem import artifact_path, fsync_tree, hub_folder, is_hub_id
from engine.tracking import Tracker
from engine.tracking.model_versions import (
    ARTIFACT_TAG,
    MANIFEST_TAG,
    ModelVersion,
    require_tagged_content,
)

START_MODEL: Literal["start_model"] = "start_model"  # kind of the artifact without a warm start


def fetch(run: RunContext, reference: str, name: str) -> Artifact:
    """Download a model; `name` is the input that it came from, for messages.

    reference: `models:/NAME@ALIAS` or `models:/NAME/VERSION` of the MLflow registry, or a folder,
    address (s3://…) or hub id of an artifact or a Hugging Face model.
    """
    folder = resolve(reference, name, run.experiment)
    say(f"fetch: {name} {reference} → {display_path(folder)}")
    show_facts("Model", {"input": name, "model": reference, "folder": folder})
    return shared(folder)


def resolve(reference: str, name: str, experiment: str) -> Path:
    """Return the artifact folder of a model; an EngineError says why there is none."""
    from engine.models import require_model_folder  # torch takes seconds; names need none

    if not reference:
        raise ConfigError(f"{name} is empty; give models:/NAME@ALIAS, a folder or an s3:// address")
    if is_reference(reference):
        tracker = Tracker(experiment=experiment)
        return _from_registry(tracker, tracker.model_version(reference))
    if "://" not in reference and not Path(reference).exists():
        require_model_folder(reference, name)  # says what is wrong, unless it looks like a hub id
        return _publish_copy(hub_folder(reference, name), reference)
    folder = artifacts.local_path(reference)
    require_model_folder(str(folder), name)
    if (folder / MANIFEST).is_file():
        artifacts.verify(folder)
        return folder
    return _publish_copy(folder, reference)


def _from_registry(tracker: Tracker, version: ModelVersion) -> Path:
    """Return the artifact that a version was registered from, or MLflow's copy, as tagged."""
    tags, names = version.tags, ("artifact_kind", ARTIFACT_TAG, MANIFEST_TAG)
    kind, digest, own_digest = (tags.get(name, "") for name in names)
    if kind and digest and own_digest:
        uri = tags.get("artifact_uri")
        here = _artifact_paths(kind, digest, own_digest)
        for path in (uri, *here) if uri else here:
            with contextlib.suppress(LineageError, StorageError, OSError):
                require_tagged_content(folder := artifacts.local_path(path), version)
                return folder
    if not digest:
        say(
            f"fetch: {version.name} version {version.version} has no tag {ARTIFACT_TAG}: whether "
            "its files are those that were registered can't be checked"
        )
    with artifacts.staging("download") as draft:
        folder = tracker.download_model(version, draft / "model")
        if not (folder / MANIFEST).is_file():
            return _publish_copy(folder, f"{PREFIX}{version.name}/{version.version}")
        manifest = artifacts.read_manifest(folder)
        target, alternative = _artifact_paths(manifest.kind, manifest.digest, manifest.own_digest)
        with contextlib.suppress(LineageError):  # missing or damaged
            if artifacts.verify(target).own_digest == manifest.own_digest:
                return target
            target = alternative  # the children of what is there refer to that manifest
        fsync_tree(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _artifact_paths(kind: str, digest: str, manifest: str) -> tuple[Path, Path]:
    """Return an artifact's path, and the path for equal content with another manifest."""
    path = artifact_path(kind, digest)
    return path, path.with_name(f"{path.name}-{manifest[:8]}")


def _publish_copy(folder: Path, source: str) -> Path:
    """Publish a copy of a folder without a manifest."""
    with artifacts.staging("model") as draft:
        shutil.copytree(folder, draft, dirs_exist_ok=True)
        digest = tree_digest(draft)
        parent = artifacts.Parent(name="source", kind="source", digest=digest, uri=source)
        return artifacts.publish(
            draft, artifacts.Draft(kind="model", parents=(parent,), config={"source": source})
        )


def publish_start_model(
    run: RunContext, dataset: Artifact, start: ModelConfig, start_digest: str
) -> Artifact:
    """Make the start model an artifact, with the dataset's chat template, for `sft.skip`."""
    from engine.data.tokenizer import load_tokenizer

    settings = {"model": start.model_dump(mode="json"), "start_digest": start_digest}
    with stage(START_MODEL, run, settings) as this:
        data = this.load_parent("dataset", dataset)
        path = start.path
        source = hub_folder(path) if is_hub_id(path) else Path(path)
        if (source / MANIFEST).is_file():  # of ours, so that its lineage goes on
            this.parents.append(
                artifacts.read_manifest(source).as_parent("start", str(source.absolute()))
            )
        left_out = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(source, this.folder, ignore=left_out, dirs_exist_ok=True)
        tokenizer = load_tokenizer(data / "tokenizer")
        if load_tokenizer(this.folder).chat_template != tokenizer.chat_template:
            tokenizer.save_pretrained(this.folder)
        say(f"start_model: no warm start (sft.skip): RL begins with {start.path} as it is")
        return this.publish({})


def first_model(parents: Iterable[artifacts.Parent]) -> Literal["warm_start", "start_model"]:
    """Return what RL started from, by the parents of its policy or evaluation."""
    kinds = {parent.name: parent.kind for parent in parents}
    return START_MODEL if kinds.get("warm_start") == START_MODEL else "warm_start"


def trained_by(parents: Iterable[artifacts.Parent]) -> Literal["", "preference"]:
    """Return what trained an evaluation's policy, where it was not RL."""
    kinds = {parent.name: parent.kind for parent in parents}
    return "preference" if kinds.get("policy") == "preference" else ""
