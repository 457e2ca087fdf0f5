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
from engine.evaluation.sets import read_problems
from engine.evaluation.settings import incomparable
from engine.promotion.checks import require_intact_copy
from engine.storage.artifacts import local_path
from engine.storage.code_version import sources_digest
from engine.storage.manifest import Manifest, Parent, verify

if TYPE_CHECKING:
    from engine.promotion.champions import Champions
    from engine.tracking import Tracker
    from engine.tracking.registry import ModelVersion


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation of the new model, which the champion's must match."""

    dataset: Path  # folder with the evaluation sets
    rows: pd.DataFrame  # of the new model
    manifest: Manifest  # of its evaluation
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
    champion, has the same problems, and was made as the new model's was. MLflow's copy of the
    champion must match its tags in both cases, and what is evaluated now needs an evaluation of
    the new model by this code; LineageError otherwise.
    """
    try:
        require_intact_copy(tracker, champion)
    except LineageError as error:
        raise LineageError(
            f"the present {alias} can't be compared with: {error}; to put a whole version in its "
            f"place: python -m engine.promotion rollback --model {champion.name} --to VERSION "
            "--reason … (and --force for one that never was champion)"
        ) from error
    try:
        return _recorded(champion, new)
    except (EngineError, OSError) as error:
        notify(f"the champion's recorded evaluation can't be used ({error})")
    if new.manifest.sources_digest != sources_digest():
        raise LineageError(
            f"the evaluation {new.manifest.digest[:12]} was made by other code "
            f"({new.manifest.code_version}) than would evaluate the champion now; nothing was "
            "moved; evaluate the model again with this code, then promote it"
        )
    notify(f"evaluating the champion (version {champion.version}) on these problems")
    from engine.evaluation.evaluate import evaluate_model  # torch takes seconds

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        model = tracker.download_model(champion.name, champion.version, Path(folder) / "champion")
        rows = evaluate_model(
            model,
            read_problems(new.dataset),
            "champion",
            new.evaluate,
            max_response_length=new.data.max_response_length,
            max_prompt_length=new.data.max_prompt_length,
            seed=new.seed,
        )
    return ChampionEvaluation(rows, None)


def _recorded(champion: ModelVersion, new: Evaluated) -> ChampionEvaluation:
    """The champion's own evaluation.

    Raises LineageError or StorageError when there is none, it is gone, not what was recorded, of
    other problems, or made in another way.
    """
    uri = champion.tags.get("evaluation_uri", "")
    if not uri:
        raise LineageError("its version has no tag evaluation_uri")
    folder = local_path(uri)
    manifest = verify(folder)
    if manifest.own_digest != champion.tags.get("evaluation_manifest"):
        raise LineageError(f"{uri} is not the evaluation that its version's tags name")
    of = {parent.name: parent.digest for parent in manifest.parents}
    if of.get("policy") != champion.tags.get("artifact_digest"):
        raise LineageError(f"{uri} is of another model")
    if different := incomparable(manifest, new.manifest):
        raise LineageError(f"it differs from the new model's in {', '.join(different)}")
    rows = pd.read_parquet(folder / "rows_rl.parquet")
    if prompt_digest(rows) != prompt_digest(new.rows):
        raise LineageError("it is of other problems")
    return ChampionEvaluation(rows, manifest.as_parent("champion_evaluation", uri))
