"""Checks all that can be checked before compute, opens the run, and splits its settings by stage.

Data and model are resolved to digests, so that changed files miss the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from engine.config import LoRAConfig, ModelConfig, PairsConfig, PipelineConfig, digest, explain
from engine.console import say
from engine.data.sources import source_digest
from engine.errors import ConfigError, DataError
from engine.registry import import_plugins
from engine.rewards import require_rewards
from engine.stages.pinning import model_digest, pin_model_commit, pinned_evaluation
from engine.stages.profiles import (
    LAPTOP,
    apply_profile,
    check_memory,
    check_model_layouts,
    read_profile,
    require_shared_home,
)
from engine.stages.settings import (
    DatasetSettings,
    EvaluationSettings,
    PairsSettings,
    Plan,
    PreferenceSettings,
    PromotionPlan,
    PromotionSettings,
    RewardModelGateSettings,
    RewardModelSettings,
    RLSettings,
    RunContext,
    SFTSettings,
)
from engine.stages.stage import Artifact, execution_tags, host, library_versions, show_run
from engine.storage.digests import PACKAGES, code_version, sources_digest
from engine.storage.filesystem import as_path, is_remote, require_model_name
from engine.tracking import Tracker

BY_RL = ("rlhf", "agents", "classic_rlhf")  # workflows with a warm start and RL
BY_PREFERENCES = ("preference", "reward_model", "classic_rlhf", "make_pairs")

C = TypeVar("C", bound=PipelineConfig)


class Digests(NamedTuple):
    """Digests of a run's inputs as they are now."""

    data: str
    model: str = ""  # content of the start model's folder, or owner/name@commit


def plan(
    config: PipelineConfig,
    source: str,
    path: str,
    model: str,
    preferences: str,
    seed: int,
    profile: str,
    workflow: str,
) -> Plan:
    """Check the inputs, open the MLflow parent run, and split the configuration by stage.

    `source`, `path`, `model`, `preferences` (which is `pairs.path`; empty: as configured) and
    `seed` (negative: as configured) win over the configuration; `profile` fills in layout and GPUs
    where it leaves them open. `workflow` names the run.
    """
    machines = read_profile(profile)
    config = with_overrides(config, source, path, model, preferences, seed)
    if workflow == "agents" and not config.rl.rollout.multi_turn.enable:
        raise ConfigError(
            "the workflow agents plays episodes, and rl.rollout.multi_turn.enable is false; set it "
            "with rl.rollout.agent.environment.name, or run workflows/rlhf.py"
        )
    pairs_digest = preferences_digest(config.pairs) if workflow in BY_PREFERENCES else ""
    data_digest = check_names(config)
    config = pin_model_commit(apply_profile(config, machines))
    if workflow != "evaluate_only":
        require_shared_home(config)
    digests = Digests(data_digest, check_inputs(config))
    check_memory(config, machines, trains=workflow in BY_RL)
    context = context_length(config.model)
    if workflow in BY_PREFERENCES:
        check_preference_stages(config, workflow)
    settings = stage_settings(config, digests, context, pairs_digest, workflow)
    run = open_run(config, digests, workflow)
    facts: dict[str, object] = {}
    if workflow in BY_PREFERENCES:
        source = f"{pairs_digest[:12]} in {config.pairs.path}" if pairs_digest else "of rollouts"
        facts["preferences"] = source
    more = "".join(f", {name} {text}" for name, text in facts.items())
    say(f"run {run.run_id}: config {digest(config)[:12]}, data {digests.data[:12]}{more}")
    show_run(run, config, digests.data, machines, **facts)
    return Plan(
        run=run,
        profile=machines,
        sft_profile=LAPTOP if config.sft.skip else machines,
        **settings,
        needs_approval=config.promote.approval == "required",
        config_digest=digest(config),
    )


def stage_settings(
    config: PipelineConfig, digests: Digests, context: int, pairs_digest: str, workflow: str
) -> dict[str, Any]:
    """Split checked settings by stage, as the fields of a plan."""
    data, seed, skip = config.data, config.seed, config.sft.skip
    lora = config.model.lora if skip else rl_lora(config.model)
    dtype = config.model.dtype if skip else ""  # a warm start resolves it
    too_long = config.pairs.too_long
    labels = config.preference.loss == "kto" and workflow == "preference"
    return {
        "dataset": DatasetSettings(
            data=data,
            source_digest=digests.data,
            model_path=config.model.path,
            model_digest=digests.model,
            context=context,
            seed=seed,
        ),
        "sft": SFTSettings(
            start=config.model, start_digest=digests.model, config=config.sft, seed=seed
        ),
        "rl": RLSettings(data=data, config=config.rl, lora=lora, seed=seed, dtype=dtype),
        "pairs": PairsSettings(
            data=data,
            config=config.pairs,
            source_digest=pairs_digest,
            kind="labels" if labels else "pairs",
            seed=seed,
        ),
        "preference": PreferenceSettings(
            config=config.preference, lora=lora, dtype=dtype, too_long=too_long, seed=seed
        ),
        "reward_model": RewardModelSettings(
            config=config.reward_model, dtype=dtype, too_long=too_long, seed=seed
        ),
        "reward_model_gate": RewardModelGateSettings(config=config.promote.reward_model, seed=seed),
        "evaluation": EvaluationSettings(data=data, config=config.evaluate, seed=seed),
        "promotion": PromotionSettings(
            data=data, evaluate=config.evaluate, config=config.promote, seed=seed
        ),
    }


def plan_promotion(
    config: PipelineConfig,
    dataset: Artifact,
    policy: Artifact,
    evaluation: Artifact,
    seed: int,
    profile: str,
) -> PromotionPlan:
    """Check that the evaluation is of this model on this data, as configured; open the run."""
    from engine.evaluation.comparability import require_same_settings
    from engine.promotion.champions import check_evidence
    from engine.storage.artifacts import read_manifest

    machines = read_profile(profile)
    folders = [artifact.local() for artifact in (dataset, policy, evaluation)]
    digests = Digests(check_evidence(*folders))
    settings = PromotionSettings(
        data=config.data,
        evaluate=pinned_evaluation(config),
        config=config.promote,
        seed=seed if seed >= 0 else config.seed,
    )
    evidence = read_manifest(folders[2])
    require_same_settings(evidence, settings.data, settings.evaluate, settings.seed)
    Tracker(experiment=config.tracking.experiment).check()
    run = open_run(config, digests, "promote_only")
    return PromotionPlan(run, machines, settings, config.promote.approval == "required")


def with_overrides(
    config: C,
    source: str = "",
    path: str = "",
    model: str = "",
    preferences: str = "",
    seed: int = -1,
    new_data: str = "",
) -> C:
    """Return the configuration with the command line's scalars applied; ConfigError if invalid."""
    values = config.model_dump()
    values["data"] |= {k: v for k, v in {"source": source, "path": path}.items() if v}
    for section, text in (("model", model), ("pairs", preferences), ("retrain", new_data)):
        if text:
            values[section]["path"] = text
    values["data"]["plugins"] = values["data"]["plugins"] or values["rl"]["plugins"]
    if seed >= 0:
        values["seed"] = seed
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def rl_lora(model: ModelConfig) -> LoRAConfig:
    """Return RL's LoRA settings: new adapters of the warm start's shape, on its merged model."""
    if not model.lora.from_folder:
        return model.lora
    from engine.models import resolve_lora

    return resolve_lora(model.path, model.lora).model_copy(update={"from_folder": False})


def check_settings(config: PipelineConfig) -> None:
    """Raise ConfigError for settings that can't work with any data or model.

    The checks load torch, seconds that a rerun with unchanged settings and sources does not spend.
    """
    from engine.evaluation.lm_eval import require_lm_eval
    from engine.tracking.metric_logs import require_packages

    require_packages(config.tracking.logger, "tracking.logger")
    require_lm_eval(config.evaluate.lm_eval)
    key = checks_key(config)
    if key and host().has_passed(key):
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
        host().remember_passed(key)


def checks_key(config: PipelineConfig) -> str:
    """Return the digest of what the checks depend on; empty where it isn't all known.

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


def check_names(config: PipelineConfig) -> str:
    """Check that model, reward and data are there, before seconds go into loading torch.

    Returns the data's digest.
    """
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


def check_inputs(config: PipelineConfig) -> str:
    """Check settings, the model's folder and the tracking server; return the model's digest."""
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
    """Return the longest prompt plus completion that the model can read, in tokens."""
    if not model.path:
        return model.max_position_embeddings
    from engine.models import vocabulary_and_context

    return vocabulary_and_context(model.path)[1]


def open_run(config: PipelineConfig, digests: Digests, workflow: str = "rlhf") -> RunContext:
    """Start the parent run in MLflow."""
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    execution = host().execution or run_id
    tracker = Tracker(experiment=config.tracking.experiment)
    parent = tracker.start_pipeline(
        f"{workflow}-{run_id}",
        config.model_dump(mode="json"),
        {
            "hybridflyte.run": run_id,
            **execution_tags(execution),
            "code_version": code_version(),
            "config_digest": digest(config),
            "data_digest": digests.data,
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


# Preferences.


def preferences_digest(pairs: PairsConfig) -> str:
    """Return the SHA-256 (hex) of the files of preferences; empty for rollouts.

    Raises DataError where they are not there.
    """
    from engine.data.row_files import address_digest, data_files

    if not pairs.path:
        return ""
    if not is_remote(pairs.path) and not as_path(pairs.path).exists():
        raise DataError(f"pairs.path={pairs.path!r} does not exist; check the path")
    digests = "\n".join(map(address_digest, data_files(pairs.path)))
    return hashlib.sha256(digests.encode()).hexdigest()


def check_preference_stages(config: PipelineConfig, workflow: str) -> None:
    """Raise ConfigError for settings of stages with preferences that can't work."""
    from engine.evaluation.decode import check_evaluation_layout
    from engine.preferences import layout_of
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
