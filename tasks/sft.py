"""Task `sft`: the warm start, or with `sft.skip` none.

Artifact `sft`: a Hugging Face model folder with its tokenizer. Without a warm start: `start_model`.
On a profile with several GPUs it is a Ray job, whose ranks share the model (`sft.parallel`).
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.types.directory import FlyteDirectory

from engine.config import ModelConfig, SFTConfig
from tasks.context import LARGE, RunContext, echo
from tasks.decks import DECK
from tasks.loggers import open_loggers
from tasks.offline_training import train_on_rows
from tasks.preprocess import log_splits
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES, ray_cluster_of_gpus
from tasks.stage import stage, stage_cache
from tasks.start_model import publish_start_model
from tasks.variants import on_profiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from engine.runtime.save_policy import StartModel
    from engine.trainers.sft import SFTExample


@on_profiles(
    task_config=ray_cluster_of_gpus,
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=12),
    needs=("hub", "loggers"),
    **DECK,
)
def sft(
    run: RunContext,
    dataset: FlyteDirectory,
    start: ModelConfig,
    start_digest: str,
    config: SFTConfig,
    seed: int,
) -> FlyteDirectory:
    """Fine-tune the start model on the dataset's prompt/response pairs, unless `config.skip`."""
    if config.skip:
        return publish_start_model(run, dataset, start, start_digest)
    from engine.controller.ray_session import ray_session, require_shared
    from engine.data.tokenizer import load_tokenizer
    from engine.trainers.offline_ranks import is_on_ray
    from engine.trainers.sft import SFTTrainer

    settings = {
        "model": start.model_dump(mode="json"),
        "start_digest": start_digest,
        "sft": config.model_dump(mode="json"),
        "seed": seed,
    }
    ray = ray_session("ray" if is_on_ray(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("sft", run, settings) as this, open_loggers(run, this) as logs, ray:
        data = this.load_parent("dataset", dataset)
        log_splits(this, data, ("sft_train", "sft_validation"))
        tokenizer = load_tokenizer(data / "tokenizer")
        train, validation = (read_examples(data, n, tokenizer) for n in ("train", "validation"))
        scratch = this.folder / "scratch"
        model = start_model(start, config, tokenizer, seed, scratch)
        if is_on_ray(config):
            own = [start.path] if start.path and Path(start.path).is_dir() else []
            require_shared([str(this.folder), *own])

        def make() -> SFTTrainer:
            return SFTTrainer(model, tokenizer.pad_token_id, config, seed=seed, start=start_digest)

        trained = train_on_rows(this, logs, config, make, train, validation, data / "tokenizer")
        shutil.rmtree(scratch, ignore_errors=True)
        this.tracked.log_folder(this.folder, "checkpoint")
        published = this.publish(trained.metrics, step=trained.steps)
        this.delete_local_checkpoints()
        return published


def start_model(
    start: ModelConfig,
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    scratch: Path,
) -> PreTrainedModel | StartModel:
    """The model that training begins with; where it is on ranks, what they load it from.

    Ranks load one from scratch from the folder `scratch`.
    """
    from engine.models import build_model, load_policy_model, save_model
    from engine.parallel.layout import Layout
    from engine.runtime.save_policy import StartModel
    from engine.trainers.offline_ranks import is_on_ray, offline_dtype

    on_ray = is_on_ray(config)
    dtype = offline_dtype(start.dtype, start.path, config) if start.path else start.dtype
    if on_ray and start.path:
        echo(f"sft: {start.path} on Ray, {Layout.of(config.parallel)}, {dtype}")
        return StartModel(start.path, dtype, start.lora, seed)
    model = (
        load_policy_model(start.path, dtype, start.lora, seed)
        if start.path
        else build_model(start, tokenizer, seed)
    )
    describe(model)
    if not on_ray:
        return model
    save_model(model, tokenizer, scratch)
    return StartModel(str(scratch), dtype, seed=seed)


def describe(model: PreTrainedModel) -> None:
    """Print the model's size."""
    from engine.models import adapter_parameters, has_adapters

    size = sum(p.numel() for p in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    echo(f"sft: {model.config.model_type} model with {size / 1e6:.2f}M parameters, {dtype}")
    if has_adapters(model):  # a model from scratch has none
        size = sum(p.numel() for p in adapter_parameters(model).values())
        echo(f"sft: trains adapters of {size / 1e6:.2f}M parameters")


def read_examples(data: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> list[SFTExample]:
    """Encode the pairs of a split of the dataset."""
    import pandas as pd

    from engine.data.templates import encode_prompts, encode_response
    from engine.trainers.sft import SFTExample

    frame = pd.read_parquet(data / f"sft_{split}.parquet")
    prompts = encode_prompts(tokenizer, frame["prompt"], f"sft_{split}")
    return [
        SFTExample(prompt_ids, encode_response(tokenizer, response))
        for prompt_ids, response in zip(prompts, frame["response"], strict=True)
    ]
