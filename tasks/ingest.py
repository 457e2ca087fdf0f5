"""Task `ingest`: the champion's dataset with new problems in its training split.

Artifact `dataset`, as `tasks.preprocess` makes it, with `arrivals.json`, the ledger of ingested
files. `train` is the new problems and a replay of the champion's; all other splits are the
champion's own, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, RetrainConfig
from tasks.context import RunContext, echo, local_artifact
from tasks.preprocess import (
    DATASET_TASK,
    SPLITS,
    Dataset,
    check_contract,
    publish_dataset,
    write_splits,
)
from tasks.retraining_trigger import NewData, read_ledger, write_ledger
from tasks.stage import stage

if TYPE_CHECKING:
    from engine.data.sources import Splits


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
    from engine.storage.artifacts import local_path
    from engine.storage.manifest import read_manifest

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

    from engine.data.columns import uniform_columns
    from engine.data.evaluation_sets import evaluation_files
    from engine.data.incremental_data import NewFiles
    from engine.data.new_rows import find_new_rows, sample_replay
    from engine.data.sources import Splits
    from engine.errors import DataError
    from engine.storage.manifest import json_digest

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
