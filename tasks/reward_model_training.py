"""Task `reward_model_training`: a reward model from pairs, by Bradley-Terry's loss.

Artifact `reward_model`: a sequence-classification folder with one label and its tokenizer, which
the reward `reward_model` loads, or with `head=likelihood` a language model's, for the reward
`likelihood`; PPO's critic starts from either. And `metrics.parquet`, a row a step. Accuracy on
held-out pairs with its interval and calibration error are its metrics. On a profile with several
GPUs it is a Ray job (`reward_model.parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from flytekit.types.directory import FlyteDirectory

from engine.config import RewardModelTrainingConfig
from tasks.context import LARGE, RunContext, echo
from tasks.decks import DECK
from tasks.loggers import open_loggers
from tasks.offline_training import train_on_rows
from tasks.pairs import SPLITS, has_rows
from tasks.preprocess import log_splits
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES, ray_cluster_of_gpus
from tasks.stage import stage, stage_cache
from tasks.variants import on_profiles


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
def reward_model_training(
    run: RunContext,
    pairs: FlyteDirectory,
    policy: FlyteDirectory,
    config: RewardModelTrainingConfig,
    dtype: str,
    too_long: str,
    seed: int,
) -> FlyteDirectory:
    """Train a reward model that starts from the policy's backbone.

    dtype: of the weights; empty: the folder's.
    """
    from engine.controller.ray_session import ray_session, require_shared
    from engine.data.preference_examples import read_preferences, read_reward_pairs
    from engine.data.tokenizer import load_tokenizer
    from engine.evaluation.policy_steps import FILE
    from engine.models import saved_dtype, vocabulary_and_context
    from engine.runtime.save_policy import StartModel
    from engine.trainers.likelihood_reward import LikelihoodRewardTrainer
    from engine.trainers.offline_ranks import is_on_ray
    from engine.trainers.reward_model import RewardModelTrainer

    settings: dict[str, object] = {"reward_model": config.model_dump(mode="json"), "seed": seed}
    if dtype:
        settings["dtype"] = dtype
    ray = ray_session("ray" if is_on_ray(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("reward_model", run, settings) as this, open_loggers(run, this) as logs, ray:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        log_splits(this, rows, SPLITS, this.parent("pairs").uri)
        if is_on_ray(config):
            require_shared([str(this.folder), str(model)])
        tokenizer, context = load_tokenizer(model), vocabulary_and_context(model)[1]
        by_log_prob = config.head == "likelihood"
        read: Callable[..., Sequence[Any]] = read_preferences if by_log_prob else read_reward_pairs
        train, validation = (
            read(str(rows / f"{split}.parquet"), tokenizer, max_length=context, too_long=too_long)
            if has_rows(rows, split)
            else []
            for split in SPLITS
        )
        start = StartModel(str(model), dtype or saved_dtype(model), seed=seed)
        pad, digest = int(tokenizer.pad_token_id or 0), this.parent("policy").digest

        def make() -> RewardModelTrainer | LikelihoodRewardTrainer:
            kind = LikelihoodRewardTrainer if by_log_prob else RewardModelTrainer
            return kind(start, pad, config, seed=seed, start=digest)

        trained = train_on_rows(this, logs, config, make, train, validation, model)
        trained.write_history(this.folder / FILE)
        this.tracked.log_folder(this.folder, "checkpoint")
        echo(f"reward_model: {ranking(trained.metrics)}")
        published = this.publish(trained.metrics, step=trained.steps)
        this.delete_local_checkpoints()
        return published


def ranking(metrics: dict[str, float]) -> str:
    """How well it ranks held-out pairs, in words."""
    found = {key.removeprefix("reward_model/validation_"): value for key, value in metrics.items()}
    if "accuracy" not in found:
        return "no pairs are held out, so how well it ranks is not known"
    return (
        f"ranks {found['accuracy']:.1%} of held-out pairs right "
        f"[{found['accuracy_low']:.1%}, {found['accuracy_high']:.1%}], calibration error "
        f"{found['calibration_error']:.3f}"
    )
