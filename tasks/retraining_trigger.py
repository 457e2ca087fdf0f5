"""Task `kickoff`: what a night of retraining has to work with, and whether it is worth a run.

It looks at the champion, at the data that its lineage has taken in, and at what has arrived since.
The ledger of files taken in is `arrivals.json` in a dataset artifact; the champion's own is the one
that counts, so data of a model that was not promoted are new again the next night. Not cached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flytekit import task
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
from engine.data.incremental_data import Arrival
from tasks.context import IMAGE, SMALL, RunContext, failures_as_sentences, say
from tasks.failure import note_opened
from tasks.inputs import RLHFConfig
from tasks.new_data_filter import News, find_news
from tasks.placement import fit
from tasks.plan import adapters, check_settings, open_run
from tasks.profiles import ProfileName

if TYPE_CHECKING:
    from engine.data.incremental_data import Window
    from engine.tracking import Tracker
    from engine.tracking.registry import ModelVersion

LEDGER = "arrivals.json"
EARLY = timedelta(minutes=10)  # that a clock may be behind the one that set the kick-off


class NewData(BaseModel):
    """What a night takes in, on top of the champion's dataset."""

    model_config = ConfigDict(frozen=True)

    prefix: str  # e.g. "s3://bucket/problems"
    files: list[Arrival]
    dataset: str  # address of the champion's dataset artifact
    dataset_digest: str  # its content


class Kickoff(NamedTuple):
    """Each stage's share, and whether there is to be any."""

    run: RunContext
    go: bool
    reason: str  # why not
    needs_approval: bool
    champion: str  # e.g. "models:/hybridflyte-policy/7"
    news: NewData
    data: DataConfig
    retrain: RetrainConfig
    rl: RLConfig
    lora: LoRAConfig
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    config_digest: str
    profile: str


@task(cache=False, requests=SMALL, container_image=IMAGE, retries=2, timeout=timedelta(hours=2))
def kickoff(
    config: RLHFConfig, at: datetime, path: str, seed: int, profile: ProfileName
) -> Kickoff:
    """Open the run of a night, and find what arrived up to `at` since the champion's data.

    `path` (empty: as configured) and `seed` (negative: as configured) win over the configuration.
    """
    from engine.data.incremental_data import open_window
    from engine.storage.artifacts import local_path
    from engine.tracking import Tracker

    with failures_as_sentences():
        note_opened(None)
        check_kickoff(at, datetime.now(UTC))
        if seed >= 0:
            config = config.model_copy(update={"seed": seed})
        if path:
            retrain = config.retrain.model_copy(update={"path": path})
            config = config.model_copy(update={"retrain": retrain})
        config = fit(config, profile.value)
        check_settings(config)
        tracker = Tracker(experiment=config.tracking.experiment)
        champion = require_champion(tracker, config.promote)
        uri, content = dataset_of(champion)
        former = local_path(uri)
        ledger = read_ledger(former)
        window = open_window(config.retrain.path, at, ledger, config.retrain.lookback_days)
        found = find_news(former, window)
        reason = why_not(window, found, config.retrain, champion)
        run = open_run(config, (content, ""), "retraining")
        note_opened(run)
        news = NewData(
            prefix=window.prefix, files=list(window.new), dataset=uri, dataset_digest=content
        )
    say(
        f"run {run.run_id}: kick-off {at:%Y-%m-%d %H:%M}, champion version {champion.version}, "
        f"{len(found.fresh)} new problems in {len(window.new)} files ({window.late} late, "
        f"{window.known} taken before)"
    )
    return Kickoff(
        run,
        not reason,
        reason,
        config.promote.approval == "required",
        f"models:/{champion.name}/{champion.version}",
        news,
        config.data,
        config.retrain,
        config.rl,
        adapters(config.model),
        config.evaluate,
        config.promote,
        config.seed,
        digest(config),
        profile.value,
    )


def check_kickoff(at: datetime, now: datetime) -> None:
    """Raise ConfigError for a kick-off that is still to come.

    What arrives until then would be another night's each time that this one is run.
    """
    from engine.errors import ConfigError

    moment = "%Y-%m-%dT%H:%M:%S"
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at > now + EARLY:
        raise ConfigError(
            f"kickoff={at.astimezone(UTC):{moment}} is still to come: it is now "
            f"{now.astimezone(UTC):{moment}}, both in UTC; give a moment that has passed, such as "
            f'--kickoff "$(date -u +{moment})"; `now` is local time to pyflyte, and read as UTC'
        )


def require_champion(tracker: Tracker, config: PromoteConfig) -> ModelVersion:
    """The model that training starts from; TrackingError where MLflow can't tell or has none."""
    from engine.errors import TrackingError

    found = tracker.champion(config.model_name, config.alias)
    if found is None:
        raise TrackingError(
            f"MLflow {tracker.uri} has no {config.alias} of {config.model_name!r} to start from; "
            "promote a first model with the workflow rlhf, or correct promote.model_name"
        )
    return found


def dataset_of(champion: ModelVersion) -> tuple[str, str]:
    """Address and content digest of the dataset that a champion was trained on.

    Raises LineageError when its manifest is not the one that was registered, or names none.
    """
    from engine.errors import LineageError
    from engine.storage.manifest import read_manifest

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


def read_ledger(dataset: Path) -> list[Arrival]:
    """The files that a dataset and those before it took in; none where it is a first one.

    Raises LineageError where the dataset was changed.
    """
    from engine.storage.manifest import verify

    verify(dataset)
    path = dataset / LEDGER
    if not path.is_file():
        return []
    return [Arrival(**entry) for entry in json.loads(path.read_text())["files"]]


def write_ledger(folder: Path, ledger: Sequence[Arrival]) -> None:
    """Write all files that were taken in up to now, by path."""
    entries = [arrival.model_dump() for arrival in sorted(ledger, key=lambda a: (a.path, a.sha256))]
    (folder / LEDGER).write_text(json.dumps({"files": entries}, indent=1) + "\n")


def why_not(window: Window, news: News, config: RetrainConfig, champion: ModelVersion) -> str:
    """Why this night has nothing to do; empty when it has."""
    since = f"since version {champion.version} became champion"
    if not window.new:
        return f"nothing new in {window.prefix} {since}"
    count = len(news.fresh)
    if count >= config.minimum_rows:
        return ""
    left_out = f" ({news.left_out} more are repeated, held out, or trained on already)"
    return (
        f"{count} new problems {since}{left_out if news.left_out else ''}, fewer than "
        f"retrain.minimum_rows={config.minimum_rows}"
        + ("; they wait for the next night" if count else "")
    )
