"""Task `take_in`: the champion's dataset with a night's new problems in place of its old ones.

Artifact `dataset`, as `tasks.preprocess` makes it, with `arrivals.json`: the ledger of files taken
in. `train` holds the new problems and a replay of the champion's; all else is the champion's own,
unchanged, the test set above all.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, RetrainConfig
from tasks.context import (
    IMAGE,
    SMALL,
    RunContext,
    local_artifact,
    say,
    stage,
    stage_cache,
)
from tasks.new_data_filter import find_news, prompt_keys
from tasks.preprocess import SPLITS, check_contract, write_splits
from tasks.retraining_trigger import NewData, read_ledger, write_ledger

if TYPE_CHECKING:
    import pandas as pd

    from engine.data.sources import Splits


@task(
    cache=stage_cache(),
    requests=SMALL,
    container_image=IMAGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=2),
)
def take_in(
    run: RunContext,
    champion: FlyteDirectory,
    news: NewData,
    data: DataConfig,
    retrain: RetrainConfig,
    seed: int,
) -> FlyteDirectory:
    """Read the new problems, mix in replay, and write the dataset of this night."""
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
        former = local_path(news.dataset)
        manifest = read_manifest(former)
        if manifest.digest != news.dataset_digest:
            raise LineageError(
                f"{news.dataset} is {manifest.digest[:12]}, but the champion was trained on "
                f"{news.dataset_digest[:12]}; restore it, or run the kick-off again"
            )
        this.parents.append(manifest.as_parent("former_dataset", news.dataset))
        model = local_artifact(champion)
        splits = mix(former, news, retrain, seed)
        check_contract(splits)
        tokenizer = load_tokenizer(str(model))
        context = vocabulary_and_context(str(model))[1]
        facts = write_splits(this, splits, tokenizer, data, context)
        write_ledger(this.folder, [*read_ledger(former), *news.files])
        return this.publish(facts)


def mix(former: Path, news: NewData, config: RetrainConfig, seed: int) -> Splits:
    """The champion's splits with `train` anew: what is news to them, and a replay."""
    import pandas as pd

    from engine.data.columns import in_one_form
    from engine.data.incremental_data import Window
    from engine.data.sources import Splits
    from engine.errors import DataError
    from engine.storage.manifest import json_digest

    splits = {name: pd.read_parquet(former / f"{name}.parquet") for name in SPLITS}
    found = find_news(former, Window(news.prefix, tuple(news.files)))
    if found.fresh.empty:
        raise DataError(
            f"none of the {found.arrived} new problems of {news.prefix} is left to train on: they "
            "are in the champion's test and validation sets, or it was trained on them already"
        )
    replay = replayed(splits["train"], found.fresh, config.replay, seed)
    splits["train"] = in_one_form(pd.concat([found.fresh, replay], ignore_index=True))
    say(
        f"dataset: {len(found.fresh)} new problems ({found.left_out} repeated or held out left "
        f"out), {len(replay)} replayed; test set of {len(splits['test'])} unchanged"
    )
    digest = json_digest({file.path: file.sha256 for file in news.files})
    return Splits(**splits, source_digest=digest, source_uri=news.prefix)


def replayed(before: pd.DataFrame, fresh: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Draw from the champion's problems so many that they are `share` of the new `train`."""
    seen = set(prompt_keys(fresh))
    kept = []
    for key in prompt_keys(before):
        kept.append(key not in seen)
        seen.add(key)
    old = before[kept].reset_index(drop=True)
    count = min(len(old), round(len(fresh) * share / (1 - share)))
    return old.sample(n=count, random_state=seed)
