"""The champion's evaluation on the new model's problems: as recorded, or made now."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from engine.config import DataConfig, EvaluateConfig
from engine.errors import EngineError, LineageError
from engine.evaluation.rows import prompt_digest
from engine.evaluation.settings import comparable_settings, recorded_settings
from engine.promotion.checks import require_intact_copy
from engine.storage.artifacts import local_path
from engine.storage.manifest import Parent, verify

if TYPE_CHECKING:
    from engine.promotion.champions import Champions
    from engine.tracking import Tracker
    from engine.tracking.registry import ModelVersion


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation of the new model, which the champion's must match."""

    dataset: Path  # folder with test.parquet
    rows: pd.DataFrame  # of the new model
    data: DataConfig
    evaluate: EvaluateConfig
    seed: int


@dataclass(frozen=True, slots=True)
class ChampionEvaluation:
    """The champion's rows for the same problems."""

    rows: pd.DataFrame
    recorded: Parent | None  # the evaluation artifact that they were read from; None: made now


def champion_to_compare(
    tracker: Tracker, champions: Champions, request: str
) -> ModelVersion | None:
    """The present champion; for a retry that has already moved the alias, the one before it."""
    move = champions.find(request)
    if move is None:
        return tracker.champion(champions.model_name, champions.alias)
    if move.replaced is None:
        return None
    return tracker.model_version(f"models:/{champions.model_name}/{move.replaced}")


def version_parent(version: ModelVersion, name: str) -> Parent | None:
    """The artifact that a version was registered from, as a parent; None when it has no tags."""
    tags = version.tags
    if not tags.get("artifact_digest"):
        return None
    return Parent(
        name=name,
        kind=tags.get("artifact_kind") or "model",
        digest=tags["artifact_digest"],
        uri=tags.get("artifact_uri", ""),
        manifest=tags.get("manifest_digest", ""),
    )


def champion_evaluation(
    tracker: Tracker,
    champion: ModelVersion,
    alias: str,
    new: Evaluated,
    *,
    scratch: Path,
    notify: Callable[[str], None],
) -> ChampionEvaluation:
    """Read the champion's recorded evaluation, or evaluate it now in the folder `scratch`.

    A recorded evaluation counts only when its artifact is intact, is the recorded one, is of this
    champion, and has the same problems and settings. MLflow's copy of the champion must match its
    tags in both cases; LineageError otherwise.
    """
    try:
        require_intact_copy(tracker, champion)
    except LineageError as error:
        raise LineageError(
            f"the present {alias} can't be compared with: {error}; to put a whole version in its "
            f"place: python -m engine.promotion rollback --model {champion.name} --to VERSION "
            "--reason …"
        ) from error
    try:
        found = _recorded(champion, new)
        if found is not None:
            return found
    except (EngineError, OSError) as error:
        notify(f"the champion's recorded evaluation can't be used ({error})")
    notify(f"evaluating the champion (version {champion.version}) on these problems")
    from engine.evaluation.evaluate import evaluate_model  # torch takes seconds

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        model = tracker.download_model(champion.name, champion.version, Path(folder) / "champion")
        rows = evaluate_model(
            model,
            pd.read_parquet(new.dataset / "test.parquet"),
            "champion",
            new.evaluate,
            max_response_length=new.data.max_response_length,
            seed=new.seed,
        )
    return ChampionEvaluation(rows, None)


def _recorded(champion: ModelVersion, new: Evaluated) -> ChampionEvaluation | None:
    """The champion's own evaluation; None when it is of other problems or settings.

    Raises LineageError or StorageError when it is gone, not what was recorded, or has no record of
    its settings.
    """
    uri = champion.tags.get("evaluation_uri", "")
    if not uri:
        return None
    folder = local_path(uri)
    manifest = verify(folder)
    if manifest.own_digest != champion.tags.get("evaluation_manifest"):
        raise LineageError(f"{uri} is not the evaluation that its version's tags name")
    of = {parent.name: parent.digest for parent in manifest.parents}
    if of.get("policy") != champion.tags.get("artifact_digest"):
        raise LineageError(f"{uri} is of another model")
    if recorded_settings(manifest) != comparable_settings(new.data, new.evaluate):
        return None
    rows = pd.read_parquet(folder / "rows_rl.parquet")
    if prompt_digest(rows) != prompt_digest(new.rows):
        return None
    return ChampionEvaluation(rows, manifest.as_parent("champion_evaluation", uri))
