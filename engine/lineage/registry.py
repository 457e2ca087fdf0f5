"""What MLflow knows of artifacts: model versions made of them, and digests of their manifests.

Reads only. MLflow is imported when it is first asked, because that takes two seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import LineageError, TrackingError
from engine.lineage.graph import MODEL_VERSION, ArtifactNode
from engine.storage.manifest import Parent
from engine.tracking.registry import ARTIFACT_TAG, MANIFEST_TAG, ModelVersion, all_pages

if TYPE_CHECKING:
    from engine.tracking import Tracker

PREFIX = "models:/"
PAGE = 1000
MODELS = 100  # the most that MLflow returns at once


def open_registry(needed: bool) -> Tracker | None:
    """Return the tracking store of this machine's settings.

    None where nothing was set up (no MLFLOW_TRACKING_URI and no ./mlflow.db), unless it is
    `needed`: looking at lineage must not create a store.
    """
    from engine.tracking import Tracker
    from engine.tracking.connection import URI_VARIABLE, default_uri

    tracker = Tracker(default_uri())
    if tracker.database is not None and not tracker.database.is_file():
        if needed:
            raise TrackingError(
                f"there is no MLflow store at {tracker.uri}; set {URI_VARIABLE} to the one that "
                "holds the model"
            )
        return None
    return tracker


def version_node(version: ModelVersion) -> ArtifactNode:
    """Return the node of a model version; its facts are its tags."""
    facts = {**version.tags, "run_id": version.run_id}
    if version.aliases:
        facts["aliases"] = ", ".join(version.aliases)
    return ArtifactNode(
        key=f"{MODEL_VERSION}:{version.name}:{version.version}",
        kind=MODEL_VERSION,
        digest=version.tags.get(ARTIFACT_TAG, ""),
        uri=version.source.removeprefix("file://"),
        label=f"{version.name} version {version.version}",
        facts=facts,
    )


def version_parent(node: ArtifactNode) -> Parent:
    """Return the artifact that a model version was registered from, by the version's tags."""
    if not node.digest:
        raise LineageError(
            f"{node.label} has no tag {ARTIFACT_TAG}; register models through engine.tracking, or "
            "give the artifact's folder"
        )
    return Parent(
        name="artifact",
        kind=node.facts.get("artifact_kind") or "model",
        digest=node.digest,
        uri=node.facts.get("artifact_uri", ""),
        manifest=node.facts.get(MANIFEST_TAG, ""),
    )


def all_versions(tracker: Tracker) -> list[ArtifactNode]:
    """Return the nodes of all model versions that lead back to an artifact."""
    client = tracker.client
    with tracker.translated("list the model versions"):
        aliases = _aliases(tracker)
        versions = [
            ModelVersion.of(found, aliases.get((found.name, str(found.version)), ()))
            for found in all_pages(
                lambda token: client.search_model_versions(max_results=PAGE, page_token=token)
            )
        ]
    return [node for node in map(version_node, versions) if node.digest]


def _aliases(tracker: Tracker) -> dict[tuple[str, str], list[str]]:
    """Return the aliases of each model version; a search of versions leaves them out."""
    client = tracker.client
    found: dict[tuple[str, str], list[str]] = {}
    for model in all_pages(
        lambda token: client.search_registered_models(max_results=MODELS, page_token=token)
    ):
        for alias, version in model.aliases.items():
            found.setdefault((model.name, str(version)), []).append(alias)
    return found


def recorded_manifests(tracker: Tracker, digest: str) -> set[str]:
    """Return the digests of manifests that runs have recorded for an artifact's content."""
    with tracker.translated("look up the run of an artifact"):
        experiments = [e.experiment_id for e in tracker.client.search_experiments()]
        clause = f"tags.`{ARTIFACT_TAG}` = '{digest}'"
        runs = tracker.client.search_runs(experiments, clause, max_results=PAGE)
    return {run.data.tags[MANIFEST_TAG] for run in runs if MANIFEST_TAG in run.data.tags}


def is_reference(text: str) -> bool:
    """Tell `models:/NAME@ALIAS` and `models:/NAME/VERSION` from other addresses."""
    return text.startswith(PREFIX)
