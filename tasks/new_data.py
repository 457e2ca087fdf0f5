"""Tasks `trigger_retraining` and `ingest`: enough new data, and the dataset with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel, ConfigDict

from engine.config import (
    DataConfig,
    EvaluateConfig,
    LoRAConfig,
    PromoteConfig,
    RetrainConfig,
    RLConfig,
    digest,
)
from engine.data.incremental_data import DataFile
from tasks.context import IMAGE, SMALL, RunContext, echo, local_artifact, user_facing_errors
from tasks.failure import set_current_run
from tasks.flytekit_setup import with_secrets
from tasks.inputs import RLHFConfig
from tasks.plan import check_settings, open_run, rl_lora
from tasks.preprocess import (
    DATASET_TASK,
    SPLITS,
    Dataset,
    check_contract,
    publish_dataset,
    write_splits,
)
from tasks.profiles import Profile, apply_profile, read_profile
from tasks.stage import DECK_OF_SETTINGS, show_run, stage

if TYPE_CHECKING:
    from engine.data.decontamination import NewRows
    from engine.data.incremental_data import NewFiles
    from engine.data.sources import Splits
    from engine.tracking import Tracker
    from engine.tracking.model_versions import ModelVersion


# Task `trigger_retraining`: is there enough new data since the champion to retrain it?
#
# It reads the champion, the ledger of files that its dataset ingested, and the files that arrived
# since. The ledger is `arrivals.json` in a dataset artifact. The champion's own ledger counts, so
# data of a model that was not promoted are new again in the next run. Not cached.

LEDGER = "arrivals.json"
CLOCK_TOLERANCE = timedelta(minutes=10)  # between the scheduler's clock and this one


class NewData(BaseModel):
    """The files that a retraining run adds to the champion's dataset."""

    model_config = ConfigDict(frozen=True)

    prefix: str  # e.g. "s3://bucket/problems"
    files: list[DataFile]
    dataset: str  # address of the champion's dataset artifact
    dataset_digest: str  # its content


class RetrainingPlan(NamedTuple):
    """Each stage's share of the configuration, and whether there is enough new data to train."""

    run: RunContext
    proceed: bool
    skip_reason: str  # empty when `proceed`
    needs_approval: bool
    champion: str  # e.g. "models:/hybridflyte-policy/7"
    new_data: NewData
    data: DataConfig
    retrain: RetrainConfig
    rl: RLConfig
    lora: LoRAConfig
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    config_digest: str
    profile: Profile


@task(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    **with_secrets("hub"),
    retries=2,
    timeout=timedelta(hours=2),
    **DECK_OF_SETTINGS,
)
def trigger_retraining(
    config: RLHFConfig, at: datetime, path: str, seed: int, profile: str
) -> RetrainingPlan:
    """Open the run, and find what arrived until `at` since the champion's data.

    `path` (empty: as configured) and `seed` (negative: as configured) win over the configuration.
    """
    from engine.data.decontamination import find_new_rows
    from engine.data.incremental_data import find_new_files
    from engine.storage.artifacts import local_path
    from engine.tracking import Tracker

    with user_facing_errors():
        set_current_run(None)
        check_kickoff(at, datetime.now(UTC))
        if seed >= 0:
            config = config.model_copy(update={"seed": seed})
        if path:
            retrain = config.retrain.model_copy(update={"path": path})
            config = config.model_copy(update={"retrain": retrain})
        machines = read_profile(profile)
        config = apply_profile(config, machines)
        check_settings(config)
        tracker = Tracker(experiment=config.tracking.experiment)
        champion = require_champion(tracker, config.promote)
        uri, content = training_dataset(champion)
        previous = local_path(uri)
        ledger = read_ledger(previous)
        new_files = find_new_files(config.retrain.path, at, ledger, config.retrain.lookback_days)
        found = find_new_rows(previous, new_files)
        reason = skip_reason(new_files, found, config.retrain, champion)
        run = open_run(config, (content, ""), "retraining")
        set_current_run(run)
        new_data = NewData(
            prefix=new_files.prefix,
            files=list(new_files.files),
            dataset=uri,
            dataset_digest=content,
        )
    echo(
        f"run {run.run_id}: kick-off {at:%Y-%m-%d %H:%M}, champion version {champion.version}, "
        f"{len(found.rows)} new problems in {len(new_files.files)} files ({new_files.late} late, "
        f"{new_files.known} ingested before)"
    )
    show_run(run, config, content, machines, **{"trains": not reason, "why not": reason})
    return RetrainingPlan(
        run,
        not reason,
        reason,
        config.promote.approval == "required",
        f"models:/{champion.name}/{champion.version}",
        new_data,
        config.data,
        config.retrain,
        config.rl,
        rl_lora(config.model),
        config.evaluate,
        config.promote,
        config.seed,
        digest(config),
        machines,
    )


def check_kickoff(at: datetime, now: datetime) -> None:
    """Raise ConfigError for a kick-off time in the future.

    More files may arrive until then, so the same kick-off time could give different data.
    """
    from engine.errors import ConfigError

    moment = "%Y-%m-%dT%H:%M:%S"
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at > now + CLOCK_TOLERANCE:
        raise ConfigError(
            f"kickoff={at.astimezone(UTC):{moment}} is still to come: it is now "
            f"{now.astimezone(UTC):{moment}}, both in UTC; give a moment that has passed, such as "
            f'--kickoff "$(date -u +{moment})"; `now` is local time to pyflyte, and read as UTC'
        )


def require_champion(tracker: Tracker, config: PromoteConfig) -> ModelVersion:
    """The champion; TrackingError where MLflow does not answer or has none."""
    from engine.errors import TrackingError

    found = tracker.champion(config.model_name, config.alias)
    if found is None:
        raise TrackingError(
            f"MLflow {tracker.uri} has no {config.alias} of {config.model_name!r} to start from; "
            "promote a first model with the workflow rlhf, or correct promote.model_name"
        )
    return found


def training_dataset(champion: ModelVersion) -> tuple[str, str]:
    """Address and content digest of the dataset that a champion was trained on.

    Raises LineageError when its manifest is not the one that was registered, or names none.
    """
    from engine.errors import LineageError
    from engine.storage.artifacts import read_manifest

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
    """The files that a dataset and its predecessors ingested; empty for a first dataset.

    Raises LineageError where the dataset was changed.
    """
    from engine.storage.artifacts import verify

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
    new_files: NewFiles, found: NewRows, config: RetrainConfig, champion: ModelVersion
) -> str:
    """Why there is too little new data to train on; empty when there is enough."""
    since = f"since version {champion.version} became champion"
    waiting = {0: "", 1: "; 1 file written after the kick-off waits for a later one"}.get(
        new_files.waiting,
        f"; {new_files.waiting} files written after the kick-off wait for a later one",
    )
    if not new_files.files:
        return f"nothing new in {new_files.prefix} {since}{waiting}"
    count = len(found.rows)
    if count >= config.minimum_rows:
        return ""
    left_out = f" ({found.dropped} more are repeated, held out, or trained on already)"
    return (
        f"{count} new problems {since}{left_out if found.dropped else ''}, fewer than "
        f"retrain.minimum_rows={config.minimum_rows}"
        + ("; they wait for the next run" if count else "")
        + waiting
    )


# Task `ingest`: the champion's dataset with new problems in its training split.
#
# Artifact `dataset`, as `tasks.preprocess` makes it, with `arrivals.json`, the ledger of ingested
# files. `train` is the new problems and a replay of the champion's; all other splits are the
# champion's own, byte for byte.


@task(**DATASET_TASK)
def ingest(
    run: RunContext,
    champion: FlyteDirectory,
    new_data: NewData,
    data: DataConfig,
    retrain: RetrainConfig,
    seed: int,
) -> Dataset:
    """Read the new problems, add the replay, and write the dataset of this run."""
    from engine.data.tokenizer import load_tokenizer
    from engine.errors import LineageError
    from engine.models import vocabulary_and_context
    from engine.storage.artifacts import local_path, read_manifest

    settings = {
        "data": data.model_dump(mode="json"),
        "retrain": retrain.model_dump(mode="json"),
        "seed": seed,
    }
    with stage("dataset", run, settings) as this:
        previous = local_path(new_data.dataset)
        manifest = read_manifest(previous)
        if manifest.digest != new_data.dataset_digest:
            raise LineageError(
                f"{new_data.dataset} is {manifest.digest[:12]}, but the champion was trained on "
                f"{new_data.dataset_digest[:12]}; restore it, or start the retraining again"
            )
        this.parents.append(manifest.as_parent("former_dataset", new_data.dataset))
        model = local_artifact(champion)
        splits = with_new_rows(previous, new_data, retrain, seed)
        check_contract(splits)
        tokenizer = load_tokenizer(str(model))
        context = vocabulary_and_context(str(model))[1]
        facts = write_splits(this, splits, tokenizer, data, context)
        write_ledger(this.folder, [*read_ledger(previous), *new_data.files])
        return publish_dataset(this, facts)


def with_new_rows(previous: Path, new_data: NewData, config: RetrainConfig, seed: int) -> Splits:
    """The splits of the dataset `previous`, with new rows and a replay as `train`.

    Raises DataError where no row of the new files is left to train on.
    """
    import pandas as pd

    from engine.data.contract import uniform_columns
    from engine.data.decontamination import find_new_rows, sample_replay
    from engine.data.incremental_data import NewFiles
    from engine.data.sources import Splits, evaluation_files
    from engine.errors import DataError
    from engine.storage.artifacts import json_digest

    splits: dict[str, Any] = {n: pd.read_parquet(previous / f"{n}.parquet") for n in SPLITS}
    found = find_new_rows(previous, NewFiles(new_data.prefix, tuple(new_data.files)))
    if found.rows.empty:
        raise DataError(
            f"none of the {found.total} new problems of {new_data.prefix} is left to train on: "
            "they are in the champion's test and validation sets, or it was trained on them already"
        )
    replay = sample_replay(splits["train"], found.rows, config.replay, seed)
    splits["train"] = uniform_columns(pd.concat([found.rows, replay], ignore_index=True))
    echo(
        f"dataset: {len(found.rows)} new problems ({found.dropped} repeated or held out left "
        f"out), {len(replay)} replayed; test set of {len(splits['test'])} unchanged"
    )
    digest = json_digest({file.path: file.sha256 for file in new_data.files})
    sets = {
        name: pd.read_parquet(path)
        for name, path in evaluation_files(previous).items()
        if name != "test"
    }
    return Splits(**splits, source_digest=digest, source_uri=new_data.prefix, evaluation=sets)
