"""Tasks `plan` and `plan_preferences`: check all that can be checked, and open the run."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
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
from engine.config.pipeline import RewardModelGateConfig
from engine.storage.digests import PACKAGES, sources_digest
from tasks.context import SHORT, RunContext, echo, execution_tags, user_facing_errors
from tasks.failure import set_current_run
from tasks.flytekit_setup import with_secrets
from tasks.inputs import RLHFConfig, model_digest, pin_model_commit
from tasks.profiles import (
    LAPTOP,
    Profile,
    apply_profile,
    check_memory,
    check_model_layouts,
    read_profile,
)
from tasks.stage import DECK_OF_SETTINGS, library_versions, show_run
from tasks.variants import require_shared_home

# Task `plan`: checks everything that can be checked before compute, and opens the run.
#
# It resolves data and model to digests, so that changed files miss the cache, checks that MLflow
# answers, and gives each stage its section of the configuration. Not cached.

BY_RL = ("rlhf", "agents", "classic_rlhf")  # workflows with a warm start and RL


class Plan(NamedTuple):
    """Each stage's share of the configuration."""

    run: RunContext
    data: DataConfig
    source_digest: str  # what the source holds now
    start: ModelConfig
    model_path: str  # the start model's folder, or owner/name@commit; empty for one from scratch
    start_digest: str  # content of that folder, or owner/name@commit
    context: int  # the model's limit in tokens
    sft: SFTConfig
    rl: RLConfig
    lora: LoRAConfig
    rl_dtype: str  # model.dtype where no warm start resolves it; else empty
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    config_digest: str
    profile: Profile
    needs_approval: bool
    sft_profile: Profile  # without a warm start one without GPUs: the stage copies files


@task(**{**SHORT, **DECK_OF_SETTINGS, **with_secrets("hub")})
def plan(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: str,
    workflow: str = "rlhf",
) -> Plan:
    """Check the inputs, open the MLflow parent run, and split the configuration by stage.

    `source`, `path`, `model` (empty: as configured) and `seed` (negative: as configured) win over
    the configuration; `profile` (`tasks.profiles.read_profile`) fills in layout and GPUs where it
    leaves them open. `workflow` names the run.
    """
    with user_facing_errors():
        set_current_run(None)
        ready = prepare(config, source, path, model, seed, profile, workflow)
        merged = ready.config
        run = open_run(merged, ready.digests, workflow)
        set_current_run(run)
    echo(f"run {run.run_id}: config {digest(merged)[:12]}, data {ready.digests[0][:12]}")
    show_run(run, merged, ready.digests[0], ready.profile)
    return Plan(
        run,
        merged.data,
        ready.digests[0],
        merged.model,
        merged.model.path,
        ready.digests[1],
        ready.context,
        merged.sft,
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
    )


class Prepared(NamedTuple):
    """Settings that have been checked, and what they name."""

    config: RLHFConfig
    digests: tuple[str, str]  # of the data and of the start model
    context: int  # the model's limit in tokens
    profile: Profile


def prepare(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: str,
    workflow: str,
) -> Prepared:
    """Apply the command line and the profile to the settings, and check them; EngineError."""
    from tasks.flytekit_setup import evict_missing

    if evicted := evict_missing():
        echo(f"plan: results that were deleted from the disk are made again ({evicted})")
    machines = read_profile(profile)
    named = with_overrides(config, source, path, model, seed)
    if workflow == "agents":
        require_environment(named)
    data_digest = check_names(named)
    merged = pin_model_commit(apply_profile(named, machines))
    if workflow != "evaluate_only":
        require_shared_home(merged)
    digests = data_digest, check_inputs(merged)
    check_memory(merged, machines, trains=workflow in BY_RL)
    return Prepared(merged, digests, context_length(merged.model), machines)


def with_overrides(config: RLHFConfig, source: str, path: str, model: str, seed: int) -> RLHFConfig:
    """Return the configuration with the command line's scalars applied; ConfigError if invalid."""
    from pydantic import ValidationError

    from engine.config import explain
    from engine.errors import ConfigError

    values = config.model_dump()
    values["data"] |= {k: v for k, v in {"source": source, "path": path}.items() if v}
    values["data"]["plugins"] = values["data"]["plugins"] or values["rl"]["plugins"]
    if model:
        values["model"]["path"] = model
    if seed >= 0:
        values["seed"] = seed
    try:
        return RLHFConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def require_environment(config: RLHFConfig) -> None:
    """Raise ConfigError for settings without episodes."""
    from engine.errors import ConfigError

    if not config.rl.rollout.multi_turn.enable:
        raise ConfigError(
            "the workflow agents plays episodes, and rl.rollout.multi_turn.enable is false; set it "
            "with rl.rollout.agent.environment.name, or run workflows/rlhf.py"
        )


def rl_lora(model: ModelConfig) -> LoRAConfig:
    """RL's LoRA settings: new adapters of the warm start's shape, on its merged model."""
    if not model.lora.from_folder:
        return model.lora
    from engine.models import resolve_lora

    return resolve_lora(model.path, model.lora).model_copy(update={"from_folder": False})


def check_settings(config: RLHFConfig) -> None:
    """Raise ConfigError for settings that can't work with any data or model.

    The checks load torch, seconds that a rerun with unchanged settings and sources does not spend.
    """
    from engine.evaluation.lm_eval import require_lm_eval
    from engine.tracking.metric_logs import require_packages
    from tasks.flytekit_setup import has_passed, remember_passed

    require_packages(config.tracking.logger, "tracking.logger")
    require_lm_eval(config.evaluate.lm_eval)
    key = checks_key(config)
    if key and has_passed(key):
        return
    from engine.evaluation.decode import check_evaluation_layout
    from engine.rollout.protocol import check_engine
    from engine.trainers.offline import check_offline_layout
    from engine.trainers.run_plan import check_config
    from engine.trainers.run_spec import check_lora

    check_config(config.rl, config.data.max_response_length)
    check_lora(config.model.lora, config.rl)
    if not config.sft.skip:
        check_offline_layout(config.sft, config.model.lora)
    check_engine(config.evaluate.engine)
    check_evaluation_layout(config.evaluate)
    if key:
        remember_passed(key)


def checks_key(config: RLHFConfig) -> str:
    """What the checks of the settings depend on, as a digest; empty where it isn't all known.

    That is so with a user's modules, a model behind an address, a teacher and a critic's own model.
    """
    rl, evaluation = config.rl, config.evaluation()
    named = json.dumps(config.model_dump(mode="json"), separators=(",", "="))  # colons are values'
    plugins = {*config.data.plugins, *rl.plugins, *evaluation.plugins}
    others = rl.algorithm.teachers or rl.critic.model_path or ":" in named
    if others or any(module.partition(".")[0] not in PACKAGES for module in plugins):
        return ""
    parts = (digest(config), sources_digest(), library_versions(), str(os.cpu_count()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_names(config: RLHFConfig) -> str:
    """Check that model, reward and data are there, before seconds go into loading torch.

    Returns the data's digest.
    """
    from engine.data.sources import source_digest
    from engine.errors import ConfigError
    from engine.registry import import_plugins
    from engine.rewards import require_rewards
    from engine.storage.filesystem import require_model_name

    require_model_name(config.model.path)
    if config.sft.skip and not config.model.path:
        raise ConfigError(
            "sft.skip=true leaves RL without a model: one from scratch needs the warm start; give "
            "model.path (--model), or set sft.skip=false"
        )
    for setting, teacher in config.rl.algorithm.teacher_models.items():
        require_model_name(teacher, f"rl.{setting}")
    require_model_name(config.rl.critic.model_path, "rl.critic.model_path")
    evaluation = config.evaluation()
    import_plugins([*config.data.plugins, *config.rl.plugins, *evaluation.plugins])
    require_rewards(config.rl.reward)
    require_rewards(evaluation.scorer)
    return source_digest(config.data, config.seed)


def check_inputs(config: RLHFConfig) -> str:
    """Check settings, the model's folder and the tracking server; return the model's digest."""
    from engine.tracking import Tracker

    check_settings(config)
    model = ""
    if config.model.path:
        from engine.models import require_model_folder

        require_model_folder(config.model.path)
        check_model_layouts(config)
        model = model_digest(config.model.path)
    Tracker(experiment=config.tracking.experiment).check()
    return model


def context_length(model: ModelConfig) -> int:
    """Longest prompt plus completion that the model can read, in tokens."""
    if not model.path:
        return model.max_position_embeddings
    from engine.models import vocabulary_and_context

    return vocabulary_and_context(model.path)[1]


def open_run(config: RLHFConfig, digests: tuple[str, str], workflow: str = "rlhf") -> RunContext:
    """Start the parent run in MLflow."""
    from engine.storage.digests import code_version
    from engine.tracking import Tracker

    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", run_id)
    tracker = Tracker(experiment=config.tracking.experiment)
    parent = tracker.start_pipeline(
        f"{workflow}-{run_id}",
        config.model_dump(mode="json"),
        {
            "hybridflyte.run": run_id,
            **execution_tags(execution),
            "code_version": code_version(),
            "config_digest": digest(config),
            "data_digest": digests[0],
        },
        key=execution,
    )
    return RunContext(
        run_id=run_id,
        mlflow_run=parent,
        experiment=config.tracking.experiment,
        started_at=time.time(),
        mlflow_url=tracker.run_url(parent),
        logger=config.tracking.logger,
    )


# Task `plan_preferences`: what `plan` does for `rlhf`, for the workflows of preferences.
#
# It also checks where preferences come from, and what is trained on them. Not cached.


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
    from engine.data.row_files import address_digest, data_files
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
    from engine.evaluation.decode import check_evaluation_layout
    from engine.preferences import layout_of
    from engine.rewards import require_rewards
    from engine.rollout.protocol import check_engine
    from engine.trainers.offline import check_offline_layout
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
