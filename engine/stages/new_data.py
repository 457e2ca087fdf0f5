"""Retraining: tell whether enough new data arrived, and make the dataset with it.

The ledger of files that a dataset ingested is `arrivals.json` in its artifact. The champion's own
ledger counts, so data of a model that was not promoted are new again in the next run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import PipelineConfig, PromoteConfig, RetrainConfig, digest
from engine.console import say
from engine.data.contract import uniform_columns
from engine.data.incremental_data import (
    DataFile,
    NewFiles,
    NewRows,
    find_new_files,
    find_new_rows,
    sample_replay,
)
from engine.data.sources import Splits, evaluation_files
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError, LineageError, TrackingError
from engine.models import vocabulary_and_context
from engine.stages.dataset import SPLITS, check_contract, write_splits
from engine.stages.plan import (
    Digests,
    check_settings,
    open_run,
    rl_lora,
    with_overrides,
)
from engine.stages.profiles import apply_profile, read_profile
from engine.stages.settings import (
    EvaluationSettings,
    IngestSettings,
    NewData,
    PromotionSettings,
    RetrainingPlan,
    RLSettings,
    RunContext,
)
from engine.stages.stage import Artifact, show_run, stage
from engine.storage.artifacts import json_digest, local_path, read_manifest, verify
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelVersion

LEDGER = "arrivals.json"
CLOCK_TOLERANCE = timedelta(minutes=10)  # between the scheduler's clock and this one


def trigger_retraining(
    config: PipelineConfig, at: datetime, path: str, seed: int, profile: str
) -> RetrainingPlan:
    """Open the run, and find what arrived until `at` since the champion's data.

    `path` (empty: as configured) and `seed` (negative: as configured) win over the configuration.
    """
    check_kickoff(at, datetime.now(UTC))
    machines = read_profile(profile)
    config = apply_profile(with_overrides(config, seed=seed, new_data=path), machines)
    check_settings(config)
    tracker = Tracker(experiment=config.tracking.experiment)
    champion = require_champion(tracker, config.promote)
    uri, content = training_dataset(champion)
    previous = local_path(uri)
    ledger = read_ledger(previous)
    new_files = find_new_files(config.retrain.path, at, ledger, config.retrain.lookback_days)
    new_rows = find_new_rows(previous, new_files)
    reason = skip_reason(new_files, new_rows, config.retrain, champion)
    lora = rl_lora(config.model)
    run = open_run(config, Digests(content), "retraining")
    say(
        f"run {run.run_id}: kick-off {at:%Y-%m-%d %H:%M}, champion version {champion.version}, "
        f"{len(new_rows.rows)} new problems in {len(new_files.files)} files ({new_files.late} "
        f"late, {new_files.known} ingested before)"
    )
    show_run(run, config, content, machines, **{"trains": not reason, "why not": reason})
    new_data = NewData(
        prefix=new_files.prefix, files=list(new_files.files), dataset=uri, dataset_digest=content
    )
    data, seed = config.data, config.seed
    return RetrainingPlan(
        run,
        machines,
        not reason,
        reason,
        f"models:/{champion.name}/{champion.version}",
        IngestSettings(new_data=new_data, data=data, retrain=config.retrain, seed=seed),
        RLSettings(data=data, config=config.rl, lora=lora, seed=seed),
        EvaluationSettings(data=data, config=config.evaluate, seed=seed),
        PromotionSettings(data=data, evaluate=config.evaluate, config=config.promote, seed=seed),
        config.promote.approval == "required",
        digest(config),
    )


def check_kickoff(at: datetime, now: datetime) -> None:
    """Raise ConfigError for a kick-off time in the future.

    More files may arrive until then, so the same kick-off time could give different data.
    """
    moment = "%Y-%m-%dT%H:%M:%S"
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at > now + CLOCK_TOLERANCE:
        raise ConfigError(
            f"kickoff={at.astimezone(UTC):{moment}} is still to come: it is now "
            f"{now.astimezone(UTC):{moment}}, both in UTC; give a moment that has passed, such as "
            f'--kickoff "$(date -u +{moment})"; `now` is local time to pyflyte, and read as UTC'
        )


def require_champion(tracker: Tracker, config: PromoteConfig) -> ModelVersion:
    """Return the champion; TrackingError where MLflow does not answer or has none."""
    champion = tracker.champion(config.model_name, config.alias)
    if champion is None:
        raise TrackingError(
            f"MLflow {tracker.uri} has no {config.alias} of {config.model_name!r} to start from; "
            "promote a first model with the workflow rlhf, or correct promote.model_name"
        )
    return champion


def training_dataset(champion: ModelVersion) -> tuple[str, str]:
    """Return address and content digest of the dataset that a champion was trained on.

    Raises LineageError when its manifest is not the one that was registered, or names none.
    """
    name = f"{champion.name} version {champion.version}"
    address = champion.tags.get("artifact_uri", "")
    if not champion.tags.get("manifest_digest"):
        raise LineageError(
            f"{name} was registered without a manifest, so its data are unknown; retraining starts "
            "from a model that a workflow has made"
        )
    manifest = read_manifest(address)
    if manifest.own_digest != champion.tags["manifest_digest"]:
        raise LineageError(
            f"the manifest in {address} is not the one that {name} was registered with; run "
            f"python -m engine.lineage verify models:/{champion.name}/{champion.version}"
        )
    for parent in manifest.parents:
        if parent.kind == "dataset":
            return parent.uri, parent.digest
    raise LineageError(
        f"the manifest of {name} names no dataset; retraining can't tell what is new"
    )


def read_ledger(dataset: Path) -> list[DataFile]:
    """Return the files that a dataset and its predecessors ingested; empty for a first dataset.

    Raises LineageError where the dataset was changed.
    """
    verify(dataset)
    path = dataset / LEDGER
    if not path.is_file():
        return []
    return [DataFile(**entry) for entry in json.loads(path.read_text())["files"]]


def write_ledger(folder: Path, ledger: Sequence[DataFile]) -> None:
    """Write all files ingested so far, by path."""
    entries = [arrival.model_dump() for arrival in sorted(ledger, key=lambda a: (a.path, a.sha256))]
    (folder / LEDGER).write_text(json.dumps({"files": entries}, indent=1) + "\n")


def skip_reason(
    new_files: NewFiles, new_rows: NewRows, config: RetrainConfig, champion: ModelVersion
) -> str:
    """Say why there is too little new data to train on; empty when there is enough."""
    since = f"since version {champion.version} became champion"
    waiting = {0: "", 1: "; 1 file written after the kick-off waits for a later one"}.get(
        new_files.waiting,
        f"; {new_files.waiting} files written after the kick-off wait for a later one",
    )
    if not new_files.files:
        return f"nothing new in {new_files.prefix} {since}{waiting}"
    count = len(new_rows.rows)
    if count >= config.minimum_rows:
        return ""
    left_out = f" ({new_rows.dropped} more are repeated, held out, or trained on already)"
    return (
        f"{count} new problems {since}{left_out if new_rows.dropped else ''}, fewer than "
        f"retrain.minimum_rows={config.minimum_rows}"
        + ("; they wait for the next run" if count else "")
        + waiting
    )


def ingest(run: RunContext, settings: IngestSettings, champion: Artifact) -> Artifact:
    """Read the new problems, add the replay, and write the dataset of this run.

    Artifact `dataset`, as `preprocess` makes it, with the ledger of ingested files. `train` is the
    new problems and a replay of the champion's; all other splits are the champion's own, byte for
    byte.
    """
    new_data = settings.new_data
    recorded = {
        "data": settings.data.model_dump(mode="json"),
        "retrain": settings.retrain.model_dump(mode="json"),
        "seed": settings.seed,
    }
    with stage("dataset", run, recorded) as this:
        previous = local_path(new_data.dataset)
        manifest = read_manifest(previous)
        if manifest.digest != new_data.dataset_digest:
            raise LineageError(
                f"{new_data.dataset} is {manifest.digest[:12]}, but the champion was trained on "
                f"{new_data.dataset_digest[:12]}; restore it, or start the retraining again"
            )
        this.parents.append(manifest.as_parent("former_dataset", new_data.dataset))
        model = str(champion.local())
        splits = with_new_rows(previous, new_data, settings.retrain, settings.seed)
        check_contract(splits)
        context = vocabulary_and_context(model)[1]
        facts = write_splits(this, splits, load_tokenizer(model), settings.data, context)
        write_ledger(this.folder, [*read_ledger(previous), *new_data.files])
        return this.publish(facts)


def with_new_rows(previous: Path, new_data: NewData, config: RetrainConfig, seed: int) -> Splits:
    """Return the splits of the dataset `previous`, with new rows and a replay as `train`.

    Raises DataError where no row of the new files is left to train on.
    """
    splits: dict[str, Any] = {n: pd.read_parquet(previous / f"{n}.parquet") for n in SPLITS}
    new = find_new_rows(previous, NewFiles(new_data.prefix, tuple(new_data.files)))
    if new.rows.empty:
        raise DataError(
            f"none of the {new.total} new problems of {new_data.prefix} is left to train on: "
            "they are in the champion's test and validation sets, or it was trained on them already"
        )
    replay = sample_replay(splits["train"], new.rows, config.replay, seed)
    splits["train"] = uniform_columns(pd.concat([new.rows, replay], ignore_index=True))
    say(
        f"dataset: {len(new.rows)} new problems ({new.dropped} repeated or held out left "
        f"out), {len(replay)} replayed; test set of {len(splits['test'])} unchanged"
    )
    digest = json_digest({file.path: file.sha256 for file in new_data.files})
    sets = {
        name: pd.read_parquet(path)
        for name, path in evaluation_files(previous).items()
        if name != "test"
    }
    return Splits(**splits, source_digest=digest, source_uri=new_data.prefix, evaluation=sets)
