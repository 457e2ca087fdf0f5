"""Tasks `reward_model_training` and `reward_model_promotion`: a learned reward."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit.types.directory import FlyteDirectory

from engine.config import RewardModelTrainingConfig
from engine.config.pipeline import RewardModelGateConfig
from engine.errors import LineageError
from tasks.context import LARGE, RunContext, echo
from tasks.policy_training import open_loggers, train_on_rows
from tasks.preference_training import SPLITS, has_rows
from tasks.preprocess import log_splits
from tasks.stage import DECK, Stage, show_facts, stage, stage_cache
from tasks.variants import LOCAL_OBJECT_STORE_BYTES, on_profiles, ray_cluster_of_gpus

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from engine.promotion import Champions, Decision
    from engine.tracking import Tracker
    from engine.tracking.model_versions import ModelVersion


# Task `reward_model_training`: a reward model from pairs, by Bradley-Terry's loss.
#
# Artifact `reward_model`: a sequence-classification folder with one label and its tokenizer, which
# the reward `reward_model` loads, or with `head=likelihood` a language model's, for the reward
# `likelihood`; PPO's critic starts from either. And `metrics.parquet`, a row a step. Accuracy on
# held-out pairs with its interval and calibration error are its metrics. On a profile with several
# GPUs it is a Ray job (`reward_model.parallel`).


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
    from engine.controller.launch import ray_session, require_shared
    from engine.data.tokenizer import load_tokenizer
    from engine.data.training_examples import read_preferences, read_reward_pairs
    from engine.evaluation.policy_steps import FILE
    from engine.models import saved_dtype, vocabulary_and_context
    from engine.runtime.policy_runtime import StartModel
    from engine.trainers.offline import is_on_ray
    from engine.trainers.reward_training import LikelihoodRewardTrainer, RewardModelTrainer

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


# Task `reward_model_promotion`: registers a reward model, and moves the champion's alias.
#
# Artifact `reward_model_promotion`: `decision.json` (promoted or not, why, each rule's outcome,
# against which champion) and `rows.parquet`, a row a held-out pair with who ranked it right. The
# rules are `engine.promotion.reward_models`; as for policies, anything missing, unreadable or
# tampered with promotes nothing. Not cached: the champion may have changed. Running it again for
# the
# same model changes nothing.

ROWS = "rows.parquet"
HELD_OUT = "validation"


# Not interruptible: it may be moving an alias. Running it again changes nothing. On the profile's
# machine, as two reward models score the held-out pairs.
@on_profiles(cache=False, requests=LARGE, retries=2, timeout=timedelta(hours=6), **DECK)
def reward_model_promotion(
    run: RunContext,
    pairs: FlyteDirectory,
    reward_model: FlyteDirectory,
    config: RewardModelGateConfig,
    seed: int,
) -> FlyteDirectory:
    """Register the reward model; make it champion if it ranks held-out pairs by the rules."""
    from engine.preferences import ranked_right
    from engine.promotion import Champions
    from engine.promotion.champions import require_intact_copy, require_unmodified
    from engine.storage.artifacts import read_manifest
    from engine.tracking import Tracker

    settings = {"reward_model_gate": config.model_dump(mode="json"), "seed": seed}
    with stage("reward_model_promotion", run, settings) as this:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("reward_model", reward_model)
        manifest = read_manifest(model)
        trained_on = {parent.name: parent.digest for parent in manifest.parents}.get("pairs")
        if trained_on != this.parent("pairs").digest:
            raise LineageError(
                f"the reward model {manifest.digest[:12]} was trained on pairs "
                f"{str(trained_on)[:12]}, and pairs={this.parent('pairs').digest[:12]} were given; "
                "give the artifacts of one run"
            )
        require_unmodified([this.parent("reward_model").uri])
        tracker = Tracker(experiment=run.experiment)
        tags = {
            "artifact_uri": this.parent("reward_model").uri,
            "pairs_uri": this.parent("pairs").uri,
            "hybridflyte.run": run.run_id,
            "flyte.execution": this.execution,
        }
        owner = tracker.active_run(manifest.mlflow_run, run.mlflow_run)
        number = tracker.register_model(model, config.model_name, owner, tags)
        version = tracker.model_version(f"models:/{config.model_name}/{number}")
        require_intact_copy(tracker, version)
        held_out = read_held_out(rows)
        right = ranked_right(model, held_out)
        case = Case(this, tracker, version, held_out, right, config, seed)
        champions = Champions(tracker, config.model_name, config.alias)
        return publish_decision(case, *pass_gate(case, champions, run.run_id))


@dataclass(frozen=True, slots=True)
class Case:
    """What one decision is made of."""

    this: Stage
    tracker: Tracker
    version: ModelVersion
    held_out: pd.DataFrame
    right: np.ndarray  # [N] bool, of the new reward model
    config: RewardModelGateConfig
    seed: int


def read_held_out(pairs: Path) -> pd.DataFrame:
    """The held-out pairs of an artifact; without any, an empty table."""
    import pandas as pd

    if has_rows(pairs, HELD_OUT):
        return pd.read_parquet(pairs / f"{HELD_OUT}.parquet")
    return pd.DataFrame({"prompt": [], "chosen": [], "rejected": []})


def pass_gate(
    case: Case, champions: Champions, run_id: str
) -> tuple[Decision, ModelVersion | None]:
    """Decide against the present champion, which is returned, and move the alias if the rules
    allow."""
    from engine.promotion.gate import decide_and_move, decide_reward_model

    def judge(former: ModelVersion | None) -> Decision:
        before = champion_ranking(case, former)
        write_rows(case, before)
        return decide_reward_model(case.right, before, case.config, case.seed)

    return decide_and_move(
        case.tracker,
        champions,
        case.version,
        judge,
        request=f"{run_id}:{case.this.parent('reward_model').digest[:16]}",
        by=run_id,
        notify=lambda text: echo(f"reward_model_promotion: {text}"),
    )


def champion_ranking(case: Case, champion: ModelVersion | None) -> np.ndarray | None:
    """Which of the held-out pairs the champion's registered copy ranks right; None without one.

    Raises LineageError for a copy that is not what the version's tags name.
    """
    from engine.preferences import ranked_right
    from engine.tracking.model_versions import intact_copy

    if champion is None:
        return None
    with tempfile.TemporaryDirectory(dir=case.this.folder.parent) as scratch:
        return ranked_right(intact_copy(case.tracker, champion, Path(scratch)), case.held_out)


def write_rows(case: Case, champion: np.ndarray | None) -> None:
    """Write who ranked which held-out pair right."""
    found = case.held_out[["chosen", "rejected"]].assign(right=case.right)
    if champion is not None:
        found = found.assign(champion_right=champion)
    found.to_parquet(case.this.folder / ROWS, index=False)


def publish_decision(case: Case, decision: Decision, former: ModelVersion | None) -> FlyteDirectory:
    """Write the decision with the champion that it was made against, and publish the artifact."""
    from engine.tracking.model_versions import version_parent

    this, version = case.this, case.version
    parent = version_parent(former, "champion") if former else None
    if parent is not None and parent.digest != this.parent("reward_model").digest:
        this.parents.append(parent)
    measured = {outcome.rule: outcome.value for outcome in decision.outcomes}
    record: dict[str, Any] = {
        "promoted": decision.promote,
        "reason": decision.reason,
        "model_name": version.name,
        "model_version": version.version,
        "alias": case.config.alias,
        "previous_champion": former.version if former else None,
        "accuracy": measured.get("accuracy"),
        "gain": measured.get("gain"),
        "held_out_pairs": len(case.held_out),
    }
    this.tracked.set_tags({key: str(value) for key, value in record.items()})
    text = json.dumps({**record, "outcomes": decision.to_dict()["outcomes"]}, indent=2)
    (this.folder / "decision.json").write_text(text)
    show_facts("Decision", record)
    return this.publish({"promoted": float(decision.promote)})
