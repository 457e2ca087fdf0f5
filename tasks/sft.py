"""Task `sft`: the warm start, or with `sft.skip` none.

Artifact `sft`: a Hugging Face model folder with its tokenizer. Without a warm start: `start_model`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.types.directory import FlyteDirectory

from engine.config import ModelConfig, SFTConfig
from tasks.context import LARGE, RunContext, echo
from tasks.loggers import open_loggers
from tasks.preprocess import log_splits
from tasks.stage import stage, stage_cache
from tasks.start_model import publish_start_model
from tasks.variants import on_profiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.trainers.sft import SFTExample


@on_profiles(
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=12),
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
    from engine.console import Progress, progress
    from engine.data.tokenizer import load_tokenizer
    from engine.models import (
        adapter_parameters,
        build_model,
        has_adapters,
        load_policy_model,
        save_model,
    )
    from engine.trainers.sft import SFTTrainer

    settings = {
        "model": start.model_dump(mode="json"),
        "start_digest": start_digest,
        "sft": config.model_dump(mode="json"),
        "seed": seed,
    }
    with stage("sft", run, settings) as this, open_loggers(run, this) as logs:
        data = this.load_parent("dataset", dataset)
        log_splits(this, data, ("sft_train", "sft_validation"))
        tokenizer = load_tokenizer(data / "tokenizer")
        model = (
            load_policy_model(start.path, start_dtype(start), start.lora, seed)
            if start.path
            else build_model(start, tokenizer, seed)
        )
        size = sum(p.numel() for p in model.parameters())
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        echo(f"sft: {model.config.model_type} model with {size / 1e6:.2f}M parameters, {dtype}")
        if has_adapters(model):  # a model from scratch has none
            size = sum(p.numel() for p in adapter_parameters(model).values())
            echo(f"sft: trains adapters of {size / 1e6:.2f}M parameters")
        train, validation = (read_examples(data, n, tokenizer) for n in ("train", "validation"))
        trainer = SFTTrainer(model, tokenizer.pad_token_id, config, seed=seed, start=start_digest)
        losses: dict[str, float] = {}
        bar: Progress[None] = progress(trainer.total_steps(len(train)), "sft", unit="step")
        with bar:

            def report(step: int, total: int, metrics: dict[str, float]) -> None:
                losses.update({k: v for k, v in metrics.items() if k.endswith("loss")})
                this.tracked.log_metrics(metrics, step)
                logs.log_metrics(metrics, step)
                bar.update(
                    step - bar.count, **{k.removeprefix("sft/"): v for k, v in losses.items()}
                )

            trainer.on_step = report
            trainer.on_resume = lambda folder, step: echo(
                f"sft: continues from {folder}, step {step}"
            )
            checkpoints = this.checkpoints()
            this.record_origin(checkpoints)
            final = trainer.fit(train, validation, checkpoints.folder, checkpoints.previous)
        save_model(model, tokenizer, this.folder)
        this.tracked.log_folder(this.folder, "checkpoint")
        published = this.publish(final, step=trainer.total_steps(len(train)))
        this.delete_local_checkpoints()
        return published


def start_dtype(start: ModelConfig) -> str:
    """`model.dtype` on this machine."""
    from engine.models import resolve_dtype, text_config

    return resolve_dtype(start.dtype, text_config(start.path).hidden_size)


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
