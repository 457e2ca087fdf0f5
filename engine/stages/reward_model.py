"""Stages `reward_model_training` and `reward_model_promotion`: a learned reward."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from engine.console import say
from engine.controller.launch import ray_session, require_shared
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import read_preferences, read_reward_pairs
from engine.errors import LineageError
from engine.evaluation.policy_steps import FILE
from engine.models import saved_dtype, vocabulary_and_context
from engine.preferences import ranked_right
from engine.promotion import Champions, Decision
from engine.promotion.champions import require_intact_copy, require_unmodified
from engine.promotion.gate import decide_and_move, decide_reward_model
from engine.runtime.policy_runtime import StartModel
from engine.stages.preferences import SPLITS, has_rows
from engine.stages.promotion import publish_decision
from engine.stages.report import ranking
from engine.stages.settings import RewardModelGateSettings, RewardModelSettings, RunContext
from engine.stages.stage import LOCAL_OBJECT_STORE_BYTES, Artifact, stage
from engine.stages.training import open_loggers, publish_trained, train_on_rows
from engine.storage.artifacts import read_manifest
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelVersion, intact_copy, version_parent
from engine.trainers.offline import is_on_ray
from engine.trainers.preference_learning import LikelihoodRewardTrainer, RewardModelTrainer

ROWS = "rows.parquet"
HELD_OUT = "validation"


def reward_model_training(
    run: RunContext, settings: RewardModelSettings, pairs: Artifact, policy: Artifact
) -> Artifact:
    """Train a reward model from pairs by Bradley-Terry's loss, from the policy's backbone.

    Artifact `reward_model`: a sequence-classification folder with one label and its tokenizer,
    which the reward `reward_model` loads, or with `head=likelihood` a language model's, for the
    reward `likelihood`; PPO's critic starts from either. And `metrics.parquet`, a row a step.
    Accuracy on held-out pairs with its interval and calibration error are its metrics. On a profile
    with several GPUs ranks share the model (`reward_model.parallel`).
    """
    config, seed = settings.config, settings.seed
    recorded: dict[str, object] = {"reward_model": config.model_dump(mode="json"), "seed": seed}
    if settings.dtype:
        recorded["dtype"] = settings.dtype
    ray = ray_session("ray" if is_on_ray(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("reward_model", run, recorded) as this, open_loggers(run, this) as logs, ray:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        this.log_splits(rows, SPLITS, this.parent("pairs").uri)
        if is_on_ray(config):
            require_shared([str(this.folder), str(model)])
        tokenizer, context = load_tokenizer(model), vocabulary_and_context(model)[1]
        by_log_prob = config.head == "likelihood"
        read: Callable[..., Sequence[Any]] = read_preferences if by_log_prob else read_reward_pairs
        limits: dict[str, Any] = {"max_length": context, "too_long": settings.too_long}
        train, validation = (
            read(str(rows / f"{split}.parquet"), tokenizer, **limits)
            if has_rows(rows, split)
            else []
            for split in SPLITS
        )
        start = StartModel(str(model), settings.dtype or saved_dtype(model), seed=seed)
        pad, digest = int(tokenizer.pad_token_id or 0), this.parent("policy").digest

        def make() -> RewardModelTrainer | LikelihoodRewardTrainer:
            kind = LikelihoodRewardTrainer if by_log_prob else RewardModelTrainer
            return kind(start, pad, config, seed=seed, start=digest)

        trained = train_on_rows(this, logs, config, make, train, validation, model)
        trained.write_history(this.folder / FILE)
        say(f"reward_model: {ranking(trained.metrics)}")
        return publish_trained(this, trained)


def reward_model_promotion(
    run: RunContext, settings: RewardModelGateSettings, pairs: Artifact, reward_model: Artifact
) -> Artifact:
    """Register the reward model; make it champion if it ranks held-out pairs by the rules.

    Artifact `reward_model_promotion`: `decision.json` (promoted or not, why, each rule's outcome,
    against which champion) and `rows.parquet`, a row a held-out pair with who ranked it right. The
    rules are `engine.promotion.gate`'s; as for policies, anything missing, unreadable or
    tampered with promotes nothing. Running it again for the same model changes nothing.
    """
    config = settings.config
    recorded = {"reward_model_gate": config.model_dump(mode="json"), "seed": settings.seed}
    with stage("reward_model_promotion", run, recorded) as this:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("reward_model", reward_model)
        require_trained_on(model, this.parent("pairs").digest)
        require_unmodified([this.parent("reward_model").uri])
        tracker = Tracker(experiment=run.experiment)
        tags = {
            "artifact_uri": this.parent("reward_model").uri,
            "pairs_uri": this.parent("pairs").uri,
            "hybridflyte.run": run.run_id,
            "flyte.execution": this.execution,
        }
        owner = tracker.active_run(read_manifest(model).mlflow_run, run.mlflow_run)
        number = tracker.register_model(model, config.model_name, owner, tags)
        version = tracker.model_version(f"models:/{config.model_name}/{number}")
        require_intact_copy(tracker, version)
        held_out = read_held_out(rows)
        right = ranked_right(model, held_out)

        def judge(former: ModelVersion | None) -> Decision:
            """Write who ranked which held-out pair right, and decide."""
            table, before = held_out[["chosen", "rejected"]].assign(right=right), None
            if former is not None:
                with tempfile.TemporaryDirectory(dir=this.folder.parent) as scratch:
                    before = ranked_right(intact_copy(tracker, former, Path(scratch)), held_out)
                table = table.assign(champion_right=before)
            table.to_parquet(this.folder / ROWS, index=False)
            return decide_reward_model(right, before, config, settings.seed)

        decision, former = decide_and_move(
            tracker,
            Champions(tracker, config.model_name, config.alias),
            version,
            judge,
            request=f"{run.run_id}:{this.parent('reward_model').digest[:16]}",
            by=run.run_id,
            notify=lambda text: say(f"reward_model_promotion: {text}"),
        )
        parent = version_parent(former, "champion") if former else None
        if parent is not None and parent.digest != this.parent("reward_model").digest:
            this.parents.append(parent)
        measured = {outcome.rule: outcome.value for outcome in decision.outcomes}
        facts = {
            "accuracy": measured.get("accuracy"),
            "gain": measured.get("gain"),
            "held_out_pairs": len(held_out),
        }
        return publish_decision(this, version, former, decision, config.alias, facts)


def require_trained_on(model: Path, pairs: str) -> None:
    """Raise LineageError for a reward model that was trained on other pairs than of this digest."""
    manifest = read_manifest(model)
    trained_on = {parent.name: parent.digest for parent in manifest.parents}.get("pairs")
    if trained_on != pairs:
        raise LineageError(
            f"the reward model {manifest.digest[:12]} was trained on pairs "
            f"{str(trained_on)[:12]}, and pairs={pairs[:12]} were given; "
            "give the artifacts of one run"
        )


def read_held_out(pairs: Path) -> pd.DataFrame:
    """Return the held-out pairs of an artifact; without any, an empty table."""
    if has_rows(pairs, HELD_OUT):
        return pd.read_parquet(pairs / f"{HELD_OUT}.parquet")
    return pd.DataFrame({"prompt": [], "chosen": [], "rejected": []})
