"""Task `fetch` makes a model from elsewhere, or the start model, an artifact of this run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from engine.config import ModelConfig
from engine.console import display_path
from tasks.context import IMAGE, SMALL, RunContext, as_output, echo, user_facing_errors
from tasks.flytekit_setup import with_secrets
from tasks.stage import DECK, show_facts, stage

if TYPE_CHECKING:
    from engine.storage.artifacts import Parent
    from engine.tracking.model_versions import ModelVersion


# Task `fetch`: makes a model from elsewhere an artifact of this run.
#
# Artifact: the model's own (`rl`, `sft`) where it has a manifest, else `model`, a copy of the
# folder.

REGISTERED = "models:/"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HUB_SECONDS = 10.0


# Not cached: an alias may point to another version tomorrow.
@task(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    **with_secrets("hub"),
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=2),
    **DECK,
)
def fetch(run: RunContext, reference: str, name: str) -> FlyteDirectory:
    """Download a model.

    Args:
        run: The pipeline run.
        reference: `models:/NAME@ALIAS` or `models:/NAME/VERSION` of the MLflow registry, or a
            folder, address (s3://…) or hub id of an artifact or a Hugging Face model.
        name: The input that it came from, for messages.
    """
    with user_facing_errors():
        folder = resolve(reference, name, run.experiment)
        echo(f"fetch: {name} {reference} → {display_path(folder)}")
        show_facts("Model", {"input": name, "model": reference, "folder": folder})
        return as_output(folder)


def resolve(reference: str, name: str, experiment: str) -> Path:
    """Return the artifact folder of a model; an EngineError says why there is none."""
    from engine.errors import ConfigError
    from engine.models import require_model_folder
    from engine.storage.artifacts import local_path, verify
    from engine.storage.digests import MANIFEST
    from engine.tracking import Tracker

    if not reference:
        raise ConfigError(f"{name} is empty; give models:/NAME@ALIAS, a folder or an s3:// address")
    if reference.startswith(REGISTERED):
        tracker = Tracker(experiment=experiment)
        return _from_registry(tracker, tracker.model_version(reference))
    if "://" not in reference and not Path(reference).exists():
        require_model_folder(reference, name)  # says what is wrong, unless it looks like a hub id
        return _from_hub(reference, name)
    folder = local_path(reference)
    require_model_folder(str(folder), name)
    if (folder / MANIFEST).is_file():
        verify(folder)
        return folder
    return _publish_copy(folder, reference)


def _from_registry(tracker: object, version: ModelVersion) -> Path:
    """The artifact that a version was registered from, or MLflow's copy of it.

    Both are checked against the version's tags. A model that another tool registered has no tags
    and is used as it is, with a notice.
    """
    import contextlib

    from engine.errors import LineageError, StorageError
    from engine.storage.artifacts import local_path, read_manifest, staging
    from engine.storage.digests import MANIFEST
    from engine.storage.filesystem import fsync_tree
    from engine.tracking import Tracker
    from engine.tracking.model_versions import ARTIFACT_TAG, require_tagged_content

    assert isinstance(tracker, Tracker)
    for place in _candidate_paths(version):
        with contextlib.suppress(LineageError, StorageError, OSError):
            require_tagged_content(folder := local_path(place), version)
            return folder
    if not version.tags.get(ARTIFACT_TAG):
        echo(
            f"fetch: {version.name} version {version.version} has no tag {ARTIFACT_TAG}: whether "
            "its files are those that were registered can't be checked"
        )
    with staging("download") as draft:
        folder = tracker.download_model(version.name, version.version, draft / "model")
        if not (folder / MANIFEST).is_file():
            return _publish_copy(folder, f"{REGISTERED}{version.name}/{version.version}")
        manifest = read_manifest(folder)
        target, alternative = _artifact_paths(manifest.kind, manifest.digest, manifest.own_digest)
        present = _verified_manifest_digest(target)
        if present == manifest.own_digest:
            return target
        if present:  # its children refer to that manifest
            target = alternative
        fsync_tree(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _candidate_paths(version: ModelVersion) -> list[Path | str]:
    """Paths where a version's artifact may be; empty for models that another tool registered."""
    from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG

    wanted = ("artifact_kind", ARTIFACT_TAG, MANIFEST_TAG)
    kind, digest, manifest = (version.tags.get(tag, "") for tag in wanted)
    if not (kind and digest and manifest):
        return []
    uri = version.tags.get("artifact_uri")
    return [*([uri] if uri else []), *_artifact_paths(kind, digest, manifest)]


def _artifact_paths(kind: str, digest: str, manifest: str) -> tuple[Path, Path]:
    """An artifact's path, and the path for equal content with another manifest."""
    from engine.storage.filesystem import artifact_path

    path = artifact_path(kind, digest)
    return path, path.with_name(f"{path.name}-{manifest[:8]}")


def _verified_manifest_digest(folder: Path) -> str:
    """Digest of an intact artifact's manifest; empty where it is missing or damaged."""
    from engine.errors import LineageError
    from engine.storage.artifacts import verify

    try:
        return verify(folder).own_digest
    except LineageError:
        return ""


def _from_hub(hub_id: str, name: str) -> Path:
    """Fetch a model from the Hugging Face hub; ModelError where that fails."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    from engine.errors import ModelError
    from engine.storage.artifacts import staging

    with staging("download") as draft:
        try:
            huggingface_hub.snapshot_download(
                hub_id,
                local_dir=draft / "model",
                allow_patterns=HUB_FILES,
                etag_timeout=HUB_SECONDS,
            )
        except (OSError, ValueError, HfHubHTTPError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"{name}={hub_id!r} is no folder here and can't be downloaded from the hub "
                f"({reason}); check the name and the network"
            ) from error
        shutil.rmtree(draft / "model" / ".cache", ignore_errors=True)
        return _publish_copy(draft / "model", hub_id)


def _publish_copy(folder: Path, source: str) -> Path:
    """Publish a copy of a folder without a manifest."""
    from engine.storage.artifacts import Draft, Parent, publish, staging
    from engine.storage.digests import tree_digest

    with staging("model") as draft:
        shutil.copytree(folder, draft, dirs_exist_ok=True)
        digest = tree_digest(draft)
        parent = Parent(name="source", kind="source", digest=digest, uri=source)
        return publish(draft, Draft(kind="model", parents=(parent,), config={"source": source}))


# The start model as it is: what `sft.skip` has in the place of the warm start.
#
# Artifact `start_model`: the files of the folder or hub id, and the dataset's tokenizer where
# `data.apply_chat_template_kwargs` gave that another chat template.

START_MODEL: Literal["start_model"] = "start_model"  # kind of the artifact


def publish_start_model(
    run: RunContext, dataset: FlyteDirectory, start: ModelConfig, start_digest: str
) -> FlyteDirectory:
    """Make the start model an artifact, nothing of it changed; an EngineError where it is away."""
    from engine.data.tokenizer import load_tokenizer
    from engine.storage.artifacts import read_manifest
    from engine.storage.digests import MANIFEST

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
    from engine.storage.filesystem import is_hub_id, split_revision

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
