"""Stages that make a run's dataset: `preprocess` from a source, `ingest` from a champion's.

Artifact `dataset`: `sft_train`, `sft_validation`, `train`, `validation`, `test` (`.parquet`, in the
data contract of `engine.data.contract`), `test_<name>.parquet` of each evaluation set, `tokenizer/`
(Hugging Face), `dataset.json` (lengths in tokens), `README.md` (the card), and after `ingest` the
ledger of all files that were ingested, `arrivals.json`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from engine.config import DataConfig, PipelineConfig, RetrainConfig, digest
from engine.console import say
from engine.data import contract, prepare, sources
from engine.data.incremental_data import (
    DataFile,
    NewFiles,
    NewRows,
    find_new_files,
    find_new_rows,
    sample_replay,
)
from engine.data.sources import SPLITS, Splits
from engine.errors import ConfigError, DataError, LineageError, TrackingError, counted, first_line
from engine.models import vocabulary_and_context
from engine.runtime.policy_runtime import open_tokenizer
from engine.stages import plan
from engine.stages.profiles import apply_profile, read_profile
from engine.stages.row_checks import apply_control_tokens, choose_tokenizer, fit_to_context
from engine.stages.settings import (
    DatasetSettings,
    EvaluationSettings,
    IngestSettings,
    NewData,
    RetrainingPlan,
    RLSettings,
    RunContext,
)
from engine.stages.stage import Artifact, Stage, host, show_run, stage
from engine.storage.artifacts import Parent, json_digest, local_path, read_manifest, verify
from engine.storage.digests import hash_file
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelVersion

LEDGER = "arrivals.json"
CLOCK_TOLERANCE = timedelta(minutes=10)  # between the scheduler's clock and this one


def preprocess(run: RunContext, settings: DatasetSettings) -> Artifact:
    """Read, check and write the data; train a tokenizer where `model_path` is empty."""
    data, seed = settings.data, settings.seed
    recorded = settings.model_dump(mode="json", include={"data", "model_path", "seed"})
    with stage("dataset", run, recorded) as this:
        splits = prepare.read_splits(data, seed, say)
        tokenizer = choose_tokenizer(splits, data, settings.model_path)
        facts = write_splits(this, splits, tokenizer, data, settings.context)
        say(
            f"dataset: {data.source}, "
            + ", ".join(f"{name} {facts[f'rows_{name}']:.0f}" for name in splits.tables())
            + f" rows; longest prompt {facts['max_prompt_length']:.0f} tokens"
        )
        return this.publish(facts)


def write_splits(
    this: Stage, splits: Splits, tokenizer: PreTrainedTokenizerBase, data: DataConfig, context: int
) -> dict[str, float]:
    """Write checked splits, their tokenizer and their card into the stage's folder; metrics."""
    splits, spelled = apply_control_tokens(splits, tokenizer, data.control_tokens)
    splits, tokens = fit_to_context(splits, tokenizer, data, context)
    tables, digest, uri = splits.tables(), splits.source_digest, splits.source_uri
    longest = max(max(tokens[name]) for name in SPLITS)
    for name, frame in tables.items():
        write_split(frame, this.folder / f"{name}.parquet")
    write_card(this.folder, data.source, digest, tables, tokens, splits.notes)
    tokenizer.save_pretrained(this.folder / "tokenizer")
    (this.folder / "dataset.json").write_text(json.dumps({"max_prompt_length": longest}, indent=2))
    this.parents.append(Parent(name="source", kind="source", digest=digest, uri=uri))
    this.log_splits(this.folder, list(tables), uri)
    rows = {f"rows_{name}": float(len(frame)) for name, frame in tables.items()}
    return rows | {"control_token_rows": float(spelled), "max_prompt_length": float(longest)}


def write_card(
    folder: Path,
    source: str,
    made_of: str,
    tables: Mapping[str, pd.DataFrame],
    tokens: Mapping[str, Sequence[int]],
    notes: Sequence[str],
) -> None:
    """Write and show the card of a folder with `<name>.parquet` of each table.

    source: kind or address of what the rows are from, not its place, so that equal data make an
    equal artifact; `made_of` is its digest. tokens: lengths of each table's prompts.
    """
    cards = []
    for name, frame in tables.items():
        card = prepare.SplitCard(name, "tokens", digest=hash_file(folder / f"{name}.parquet"))
        for row, length in zip(frame.to_dict("records"), tokens[name], strict=True):
            card.add({str(column): cell for column, cell in row.items()}, length)
        cards.append(card)
    markdown = prepare.card_markdown(source, made_of, cards, notes)
    (folder / prepare.CARD).write_text(markdown, encoding="utf-8")
    host().show("Data", prepare.card_html(markdown))


def write_split(frame: pd.DataFrame, path: Path) -> None:
    """Write a split as Parquet; DataError where a column is not of one type in all rows.

    A split that was read from such a file gives the same bytes again, whatever pandas' dtypes are.
    """
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        text = {pa.large_string(): pa.string()}
        fields = [field.with_type(text.get(field.type, field.type)) for field in table.schema]
        pq.write_table(table.cast(pa.schema(fields)), path)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        words = first_line(error)
        raise DataError(
            f"{path.stem} can't be written as Parquet ({words}); give each column, and each field "
            "of its dictionaries, values of one type in all rows"
        ) from error


def trigger_retraining(
    config: PipelineConfig, at: datetime, path: str, seed: int, profile: str
) -> RetrainingPlan:
    """Open the run, and find what arrived until `at` since the champion's data.

    `path` and `seed` win over the configuration, unless empty and negative.
    """
    check_kickoff(at, datetime.now(UTC))
    machines = read_profile(profile)
    config = plan.pin_named_content(plan.with_overrides(config, seed=seed, new_data=path))
    config = apply_profile(config, machines)
    plan.check_settings(config)
    plan.check_signatures(config)
    tracker = Tracker(experiment=config.tracking.experiment)
    model_name, alias = config.promote.model_name, config.promote.alias
    champion = tracker.champion(model_name, alias)
    if champion is None:
        raise TrackingError(
            f"MLflow {tracker.uri} has no {alias} of {model_name!r} to start from; promote a first "
            "model with the workflow rlhf, or correct promote.model_name"
        )
    uri, content = training_dataset(champion)
    previous = local_path(uri)
    ledger = read_ledger(previous)
    new_files = find_new_files(config.retrain.path, at, ledger, config.retrain.lookback_days)
    new_rows = find_new_rows(previous, new_files, config.data)
    for note in new_rows.notes:
        say(f"retraining: {note}")
    reason = skip_reason(new_files, new_rows, config.retrain, champion)
    lora = plan.rl_lora(config.model)
    run = plan.open_run(config, content, "retraining")
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
        plan.audit_profile(config, machines),
        plan.reward_audit_settings(config),
        RLSettings(data=data, config=config.rl, lora=lora, seed=seed),
        EvaluationSettings(data=data, config=config.evaluate, seed=seed),
        plan.promotion_settings(config),
        config.promote.approval == "required",
        digest(config),
    )


def check_kickoff(at: datetime, now: datetime) -> None:
    """Raise ConfigError for a kick-off in the future, until which more files may arrive."""
    moment = "%Y-%m-%dT%H:%M:%S"
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at > now + CLOCK_TOLERANCE:
        raise ConfigError(
            f"kickoff={at.astimezone(UTC):{moment}} is still to come: it is now "
            f"{now.astimezone(UTC):{moment}}, both in UTC; give a moment that has passed, such as "
            f'--kickoff "$(date -u +{moment})"; `now` is local time to pyflyte, and read as UTC'
        )


def training_dataset(champion: ModelVersion) -> tuple[str, str]:
    """Return address and content digest of a champion's dataset; LineageError if not known."""
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
    """Return the files that an unchanged dataset ingested; empty for a first one."""
    verify(dataset)
    path = dataset / LEDGER
    entries = json.loads(path.read_text())["files"] if path.is_file() else []
    return [DataFile(**entry) for entry in entries]


def skip_reason(
    new_files: NewFiles, new_rows: NewRows, config: RetrainConfig, champion: ModelVersion
) -> str:
    """Say why there is too little new data to train on; empty when there is enough."""
    since, later = f"since version {champion.version} became champion", new_files.waiting
    files, wait = counted(later, "file"), "waits" if later == 1 else "wait"
    written = f"{files} written after the kick-off {wait} for a later one"
    waiting = f"; {written}" if later else ""
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
    """Read the new problems, and write a dataset of them and a replay of the champion's.

    `train` is made of both; all other splits are the champion's own, byte for byte.
    """
    new_data = settings.new_data
    recorded = settings.model_dump(mode="json", include={"data", "retrain", "seed"})
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
        splits = with_new_rows(previous, settings)
        prepare.check_contract(splits)
        context = vocabulary_and_context(model)[1]
        facts = write_splits(this, splits, open_tokenizer(model), settings.data, context)
        ledger = [*read_ledger(previous), *new_data.files]
        entries = [f.model_dump() for f in sorted(ledger, key=lambda f: (f.path, f.sha256))]
        (this.folder / LEDGER).write_text(json.dumps({"files": entries}, indent=1) + "\n")
        return this.publish(facts)


def with_new_rows(previous: Path, settings: IngestSettings) -> Splits:
    """Return the splits of the dataset `previous`, with new rows and a replay as `train`."""
    new_data = settings.new_data
    splits: dict[str, Any] = {n: pd.read_parquet(previous / f"{n}.parquet") for n in SPLITS}
    new_files = NewFiles(new_data.prefix, tuple(new_data.files))
    new = find_new_rows(previous, new_files, settings.data)
    if new.rows.empty:
        raise DataError(
            f"none of the {new.total} new problems of {new_data.prefix} is left to train on: "
            "they are in the champion's test and validation sets, or it was trained on them already"
        )
    replay = sample_replay(splits["train"], new.rows, settings.retrain.replay, settings.seed)
    splits["train"] = contract.uniform_columns(pd.concat([new.rows, replay], ignore_index=True))
    say(
        f"dataset: {len(new.rows)} new problems ({new.dropped} repeated or held out left "
        f"out), {len(replay)} replayed; test set of {len(splits['test'])} unchanged"
    )
    digest = json_digest({file.path: file.sha256 for file in new_data.files})
    files = sources.evaluation_files(previous).items()
    sets = {name: pd.read_parquet(path) for name, path in files if name != "test"}
    return Splits(
        **splits,
        source_digest=digest,
        source_uri=new_data.prefix,
        notes=tuple(new.notes),
        evaluation=sets,
    )
