"""Task `rl`: GRPO or PPO from the warm start, in this process or on Ray actors.

Artifact `rl`: a Hugging Face model folder with its tokenizer, of the step that
`trainer.final_model` says; `metrics.parquet`, a row a step, with the column `model` for that step;
`rollouts/`, samples of what the policy wrote (also the task's Deck, while it runs); and
with `trainer.timeline_steps` a `timeline.json` for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, LoRAConfig, RLConfig, SamplingConfig
from tasks.context import SMALL, RunContext
from tasks.decks import DECK
from tasks.live_deck import LiveDeck
from tasks.loggers import open_loggers
from tasks.preprocess import log_splits
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES, ray_cluster
from tasks.stage import stage, stage_cache
from tasks.variants import on_profiles

if TYPE_CHECKING:
    from engine.cli.rl_run import WriteModel

# Requests are the submitter's; they are copied to no Ray pod that has a template of its own.


@on_profiles(
    task_config=ray_cluster,
    cache=stage_cache(),
    requests=SMALL,
    retries=5,
    interruptible=True,
    timeout=timedelta(days=3),
    needs=("hub", "loggers"),
    **DECK,
)
def rl(
    run: RunContext,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    data: DataConfig,
    config: RLConfig,
    lora: LoRAConfig,
    seed: int,
    dtype: str = "",
    reward_model: FlyteDirectory | None = None,
) -> FlyteDirectory:
    """Improve the warm start by reinforcement learning on the dataset's prompts.

    dtype: `model.dtype`; empty: that of the warm start's folder, which resolved it. reward_model:
    what rewards in the place of `config.reward`, and what a critic starts from.
    """
    import pandas as pd

    from engine.cli.rl_run import RLRun, RunLog, headline, placed, prompt_room, train_policy
    from engine.controller.ray_session import require_shared
    from engine.data.loader import PromptLoader
    from engine.evaluation.overoptimisation import read_overoptimisation
    from engine.evaluation.policy_steps import FILE, MODEL
    from engine.models import saved_dtype
    from engine.preferences.learned_reward import by_reward_model
    from engine.rollouts.files import FOLDER as ROLLOUTS
    from engine.rollouts.files import copy_samples

    settings = {
        "rl": config.model_dump(mode="json"),
        "max_response_length": data.max_response_length,
        "seed": seed,
    }
    if data.sampling != SamplingConfig():
        settings["sampling"] = data.sampling.model_dump(mode="json")
    if lora.rank or lora.from_folder:
        settings["lora"] = lora.model_dump(mode="json")
    if dtype:
        settings["dtype"] = dtype
    placing = placed(config, LOCAL_OBJECT_STORE_BYTES)
    with stage("rl", run, settings) as this, open_loggers(run, this) as logs, placing as config:
        folder = this.load_parent("dataset", dataset)
        model = this.load_parent("warm_start", warm_start)
        shared = [str(this.folder), str(model)]
        if reward_model is not None:
            scorer = this.load_parent("reward_model", reward_model)
            config = by_reward_model(config, str(scorer))
            shared.append(str(scorer))
        if config.trainer.placement != "local":
            require_shared(shared)
        log_splits(this, folder, ("train", "validation"))
        lengths = json.loads((folder / "dataset.json").read_text())
        train = pd.read_parquet(folder / "train.parquet")
        rows = pd.read_parquet(folder / "validation.parquet").to_dict("records")
        validation = [{str(k): v for k, v in row.items()} for row in rows]

        checkpoints = this.checkpoints()
        this.record_origin(checkpoints)

        def save_model(write: WriteModel, step: int) -> Path:
            write(str(this.folder))
            return this.folder

        training = RLRun(
            model,
            config,
            PromptLoader(train, config.trainer.train_batch_size, seed, sampling=data.sampling),
            validation,
            prompt_room(config, lengths["max_prompt_length"], data.max_prompt_length),
            data.max_response_length,
            this.folder,
            checkpoints.folder,
            save_model,
            previous_checkpoints=checkpoints.previous,
            seed=seed,
            dtype=dtype or saved_dtype(model),
            lora=lora,
            on_page=LiveDeck("Rollouts").show,
        )
        log = RunLog(this.tracked, logs, step_lines="console" in run.logger)
        log.say(headline(config))
        trained = train_policy(training, log)
        steps = pd.DataFrame(trained.history)
        steps[MODEL] = steps["step"] == trained.final.step
        steps.to_parquet(this.folder / FILE, index=False)
        this.tracked.log_folder(this.folder, "checkpoint")
        if config.trainer.log_rollouts_freq:
            copy_samples(f"{checkpoints.folder}/{ROLLOUTS}", this.folder / ROLLOUTS)
        metrics = next(row for row in trained.history if row["step"] == trained.final.step)
        if learned := read_overoptimisation(this.folder):
            log.say(f"rl: {learned.sentence()}")
            metrics = metrics | learned.metrics()
        published = this.publish(metrics | trained.final.metrics(), trained.changed_settings)
        this.delete_local_checkpoints()
        return published
