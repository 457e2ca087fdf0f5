"""Task `plan_preferences`: what `plan` does for `rlhf`, for the workflows of preferences.

It also checks where preferences come from, and what is trained on them. Not cached.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from flytekit import task

from engine.config import (
    DataConfig,
    EvaluateConfig,
    LoRAConfig,
    ModelConfig,
    PairsConfig,
    PreferenceTrainingConfig,
    PromoteConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
    digest,
)
from engine.config.promotion import RewardModelGateConfig
from tasks.context import SHORT, RunContext, echo, user_facing_errors
from tasks.credentials import with_secrets
from tasks.decks import DECK_OF_SETTINGS, show_run
from tasks.failure import set_current_run
from tasks.inputs import RLHFConfig
from tasks.plan import open_run, prepare, rl_lora
from tasks.profiles import LAPTOP, Profile


class PreferencePlan(NamedTuple):
    """Each stage's share of the configuration."""

    run: RunContext
    data: DataConfig
    source_digest: str  # what the source holds now
    start: ModelConfig
    model_path: str  # the start model's folder, or owner/name@commit; empty for one from scratch
    start_digest: str  # content of that folder, or owner/name@commit
    context: int  # the model's limit in tokens
    sft: SFTConfig
    pairs: PairsConfig
    pairs_digest: str  # what the files of preferences hold now; empty for rollouts
    too_long: str  # pairs.too_long
    kind: str  # "pairs", or "labels" for KTO
    reference: PreferenceTrainingConfig  # what the reference's log-probs depend on
    preference: PreferenceTrainingConfig
    reward_model: RewardModelTrainingConfig
    rl: RLConfig
    lora: LoRAConfig
    dtype: str  # model.dtype where no warm start resolves it; else empty
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    config_digest: str
    profile: Profile
    needs_approval: bool
    sft_profile: Profile  # without a warm start one without GPUs: the stage copies files
    reward_model_gate: RewardModelGateConfig


@task(**{**SHORT, **DECK_OF_SETTINGS, **with_secrets("hub")})
def plan_preferences(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    preferences: str,
    seed: int,
    profile: str,
    workflow: str,
) -> PreferencePlan:
    """Check the inputs, open the MLflow parent run, and split the configuration by stage.

    `preferences` (empty: as configured) is `pairs.path`; the others are as `plan` takes them.
    """
    from tasks.preference_training import reference_settings

    with user_facing_errors():
        set_current_run(None)
        config = with_preferences(config, preferences)
        pairs_digest = preferences_digest(config.pairs)
        ready = prepare(config, source, path, model, seed, profile, workflow)
        merged = ready.config
        check_stages(merged, workflow)
        reference = reference_settings(merged.preference)
        run = open_run(merged, ready.digests, workflow)
        set_current_run(run)
    made = f"{pairs_digest[:12]} in {merged.pairs.path}" if pairs_digest else "of rollouts"
    echo(
        f"run {run.run_id}: config {digest(merged)[:12]}, data {ready.digests[0][:12]}, "
        f"preferences {made}"
    )
    show_run(run, merged, ready.digests[0], ready.profile, preferences=made)
    labels = merged.preference.loss == "kto" and workflow == "preference"
    return PreferencePlan(
        run,
        merged.data,
        ready.digests[0],
        merged.model,
        merged.model.path,
        ready.digests[1],
        ready.context,
        merged.sft,
        merged.pairs,
        pairs_digest,
        merged.pairs.too_long,
        "labels" if labels else "pairs",
        reference,
        merged.preference,
        merged.reward_model,
        merged.rl,
        merged.model.lora if merged.sft.skip else rl_lora(merged.model),
        merged.model.dtype if merged.sft.skip else "",
        merged.evaluate,
        merged.promote,
        merged.seed,
        digest(merged),
        ready.profile,
        merged.promote.approval == "required",
        LAPTOP if merged.sft.skip else ready.profile,
        merged.promote.reward_model,
    )


def with_preferences(config: RLHFConfig, preferences: str) -> RLHFConfig:
    """The configuration with the command line's preferences; ConfigError if they contradict."""
    from pydantic import ValidationError

    from engine.config import explain
    from engine.errors import ConfigError

    if not preferences:
        return config
    values = config.model_dump()
    values["pairs"]["path"] = preferences
    try:
        return RLHFConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def preferences_digest(pairs: PairsConfig) -> str:
    """SHA-256 (hex) of the files of preferences; empty for rollouts.

    Raises DataError where they are not there.
    """
    from engine.data.row_files import data_files
    from engine.data.split_names import address_digest
    from engine.errors import DataError
    from engine.storage.filesystem import as_path, is_remote

    if not pairs.path:
        return ""
    if not is_remote(pairs.path) and not as_path(pairs.path).exists():
        raise DataError(f"pairs.path={pairs.path!r} does not exist; check the path")
    found = "\n".join(map(address_digest, data_files(pairs.path)))
    return hashlib.sha256(found.encode()).hexdigest()


def check_stages(config: RLHFConfig, workflow: str) -> None:
    """Raise ConfigError for settings of these workflows' own stages that can't work."""
    from engine.errors import ConfigError
    from engine.evaluation.layout import check_evaluation_layout
    from engine.preferences.from_rollouts import layout_of
    from engine.rewards import require_rewards
    from engine.rollout.protocol import check_engine
    from engine.trainers.offline_ranks import check_offline_layout
    from engine.workers.algorithm_options import check_preference_training

    if not config.pairs.path:
        require_rewards(config.pairs.scorer)
        check_engine(config.pairs.engine)
        check_evaluation_layout(layout_of(config.pairs))
    if workflow == "preference":
        check_preference_training(config.preference)
        check_offline_layout(config.preference, config.model.lora)
        return
    if config.reward_model.head == "token":
        raise ConfigError(
            f"reward_model.head={config.reward_model.head} learns from steps, not pairs; train "
            "it by ProcessRewardTrainer or python -m engine.main_reward_model"
        )
    check_offline_layout(config.reward_model, LoRAConfig())
    if workflow == "classic_rlhf" and config.rl.reward.name == "reward_model":
        raise ConfigError(
            "rl.reward.name=reward_model in classic_rlhf, which trains one and sets it; rl.reward "
            "is the true reward there, which pairs are ranked by and over-optimisation is measured "
            "with"
        )
