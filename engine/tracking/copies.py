"""The registry's own files of a version, which are what is used: on this machine, and checked."""

from __future__ import annotations

from pathlib import Path

from engine.errors import LineageError
from engine.tracking.registry import (
    ARTIFACT_TAG,
    ModelRegistry,
    ModelVersion,
    require_tagged_content,
)


def intact_copy(registry: ModelRegistry, version: ModelVersion, scratch: Path) -> Path:
    """Return a folder with a version's files, re-hashed: those that the version's tags name.

    It is MLflow's own folder where that lies on this machine, else a download, `scratch/model`.
    Raises LineageError for other content and for a version without tags to hold it against, and
    TrackingError where MLflow doesn't answer.
    """
    if not version.tags.get(ARTIFACT_TAG):
        raise LineageError(
            f"{version.name} version {version.version} has no tag {ARTIFACT_TAG} to hold its "
            "files against; register the model through engine.tracking, or choose another version"
        )
    place = Path(version.source.removeprefix("file://"))
    if place.is_absolute() and place.is_dir():
        require_tagged_content(place, version)
        return place
    return registry.download_model(version.name, version.version, scratch / "model")
