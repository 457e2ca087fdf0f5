"""Checks all that can be checked before compute, opens the run, and splits its settings by stage.

What settings refer to by name is pinned, so that changed files miss the cache: a hub model gets the
commit that it is loaded at; data, code (without what it imports), files and folders get a digest.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from engine.config import (
    AgentConfig,
    EvaluateConfig,
    LoRAConfig,
    ModelConfig,
    MultiTurnConfig,
    PairsConfig,
    PipelineConfig,
    RewardConfig,
    RLConfig,
    digest,
    validated,
)
from engine.console import say
from engine.data.cells import texts_of
from engine.data.row_files import address_digest, data_files
from engine.data.sources import source_digest
from engine.errors import ConfigError, DataError
from engine.registry import import_plugins
from engine.rewards import require_rewards
from engine.rewards.reward_function import reward_module
from engine.stages import profiles, settings
from engine.stages.profiles import Profile
from engine.stages.stage import Artifact, execution_tags, host, library_versions, show_run
from engine.storage import digests, signatures
from engine.storage.artifacts import read_manifest
from engine.storage.digests import PACKAGES, sources_digest
from engine.storage.filesystem import as_path, home, is_remote, pin_revision, require_model_name
from engine.tracking import Tracker
from engine.tracking.runs import RUN_TAG

BY_RL = ("rlhf", "agents", "classic_rlhf")  # workflows with a warm start and RL
BY_PREFERENCES = ("preference", "reward_model", "classic_rlhf", "make_pairs")

MODEL_REWARDS = "engine.rewards.model_based"  # whose rewards load models

C = TypeVar("C", bound=PipelineConfig)
Scored = TypeVar("Scored", EvaluateConfig, PairsConfig)


def plan(
    config: PipelineConfig,
    source: str,
    path: str,
    model: str,
    preferences: str,
    seed: int,
    profile: str,
    workflow: str,
) -> settings.Plan:
    """Check the inputs, open the MLflow parent run, and split the configuration by stage.

    What is given (not empty or negative) wins over the configuration; `preferences` is
    `pairs.path`. `profile` fills in layout and GPUs where they are open. `workflow` names the run.
    """
    machines = profiles.read_profile(profile)
    profiles.suggest_gpus(machines)
    config = with_overrides(config, source, path, model, preferences, seed)
    if workflow == "agents" and not config.rl.rollout.multi_turn.enable:
        raise ConfigError(
            "the workflow agents plays episodes, and rl.rollout.multi_turn.enable is false; set it "
            "with rl.rollout.agent.environment.name or rl.rollout.agent.play, or run "
            "workflows/rlhf.py"
        )
    check_signatures(config)
    by_preferences = workflow in BY_PREFERENCES
    pairs_digest = preferences_digest(config.pairs) if by_preferences else ""
    data_digest = check_names(config)
    config = profiles.apply_profile(pin_named_content(config), machines)
    config = config.replaced({"model.path": pin_revision(config.model.path)})
    if workflow != "evaluate_only":
        profiles.require_shared_home(config)
    start_digest, context = check_inputs(config)
    profiles.check_memory(config, machines, trains=workflow in BY_RL)
    facts: dict[str, object] = {}
    if by_preferences:
        check_preference_stages(config, workflow)
        source = f"{pairs_digest[:12]} in {config.pairs.path}" if pairs_digest else "of rollouts"
        facts["preferences"] = source
    run = open_run(config, data_digest, workflow)
    more = f", preferences {source}" if by_preferences else ""
    say(f"run {run.run_id}: config {digest(config)[:12]}, data {data_digest[:12]}{more}")
    if 0 < config.data.test_size < (fewest := config.promote.minimum_problems):
        say(
            f"plan: data.test_size={config.data.test_size} is less than promote.minimum_problems="
            f"{fewest}, so that nothing is promoted by the split test; raise it, or lower the rule"
        )
    for line in learning_rate_warnings(config, workflow):
        say(f"plan: {line}")
    show_run(run, config, data_digest, machines, **facts)
    if host().dry_run:
        from engine.stages.row_checks import check_rows  # which loads transformers

        splits, longest = check_rows(config.data, config.model.path, context, config.seed)
        tables = splits.tables()
        if len(tables["test"]) < min(fewest, config.data.test_size or fewest):
            say(
                f"plan: {len(tables['test'])} test rows are less than promote.minimum_problems="
                f"{fewest}, so that nothing is promoted by the split test; give more rows"
            )
        counts = ", ".join(f"{name} {len(rows)}" for name, rows in tables.items())
        say(f"rows      {counts}; longest prompt {longest} tokens")
        for line in profiles.rl_estimate(config, machines) if workflow in BY_RL else ():
            say(line)
    data, seed, skip, start = config.data, config.seed, config.sft.skip, config.model
    dtype = start.dtype if skip else ""  # a warm start resolves it
    weights: dict[str, Any] = {"dtype": dtype, "seed": seed}
    on_pairs = {"too_long": config.pairs.too_long, **weights}
    lora = start.lora if skip else rl_lora(start)
    labels = config.preference.loss == "kto" and workflow == "preference"
    return settings.Plan(
        run=run,
        profile=machines,
        sft_profile=profiles.LAPTOP if skip else machines,
        dataset=settings.DatasetSettings(
            data=data,
            source_digest=data_digest,
            model_path=start.path,
            model_digest=start_digest,
            context=context,
            seed=seed,
        ),
        sft=settings.SFTSettings(
            start=start, start_digest=start_digest, config=config.sft, seed=seed
        ),
        audit_profile=audit_profile(config, machines),
        reward_audit=reward_audit_settings(config),
        rl=settings.RLSettings(data=data, config=config.rl, lora=lora, **weights),
        pairs=settings.PairsSettings(
            data=data,
            config=config.pairs,
            source_digest=pairs_digest,
            kind="labels" if labels else "pairs",
            seed=seed,
        ),
        preference=settings.PreferenceSettings(config=config.preference, lora=lora, **on_pairs),
        reward_model=settings.RewardModelSettings(config=config.reward_model, **on_pairs),
        reward_model_gate=settings.RewardModelGateSettings(
            config=config.promote.reward_model, lineage=config.lineage, seed=seed
        ),
        evaluation=settings.EvaluationSettings(data=data, config=config.evaluate, seed=seed),
        promotion=promotion_settings(config),
        needs_approval=config.promote.approval == "required",
        config_digest=digest(config),
    )


def learning_rate_warnings(config: PipelineConfig, workflow: str) -> Iterator[str]:
    """Yield a sentence for each stage whose learning rate may ruin `model.path`."""
    if not config.model.path:
        return
    from engine.models import high_learning_rate

    trains = {"sft": not config.sft.skip and workflow in (*BY_RL, "preference")}
    trains |= {"rl.actor": workflow in BY_RL, "preference": workflow == "preference"}
    for name in (name for name, does in trains.items() if does):
        optim = attrgetter(f"{name}.optim")(config)
        if warning := high_learning_rate(config.model.path, optim, config.model.lora):
            yield f"{name}.{warning}"


def reward_audit_settings(config: PipelineConfig) -> settings.RewardAuditSettings:
    """Return the settings of `reward_audit`, with the evaluation's reward where it is another."""
    rl, evaluate = config.rl, config.evaluate
    rewards, code = {"evaluation": evaluate.scorer}, {"evaluation": evaluate.named_content}
    if rl.reward != evaluate.scorer:
        rewards["rl"], code["rl"] = rl.reward, _code_digest(_reward_names(rl.reward), *rl.plugins)
    plugins = tuple(dict.fromkeys((*rl.plugins, *evaluate.plugins)))
    required = config.promote.require_reward_audit
    return settings.RewardAuditSettings(
        rewards=rewards, plugins=plugins, code=code, required=required
    )


def audit_profile(config: PipelineConfig, machines: Profile) -> Profile:
    """Return the machines of the stage `reward_audit`: with GPUs where a model scores."""
    names = {*_reward_names(config.rl.reward), *_reward_names(config.evaluate.scorer)}
    models = any(reward_module(name) == MODEL_REWARDS for name in names)
    return machines if models else profiles.LAPTOP


def promotion_settings(config: PipelineConfig) -> settings.PromotionSettings:
    """Return the settings of `promote`."""
    sections: dict[str, Any] = {"data": config.data, "evaluate": config.evaluate}
    sections |= {"config": config.promote, "lineage": config.lineage}
    return settings.PromotionSettings(**sections, seed=config.seed)


def plan_promotion(
    config: PipelineConfig,
    dataset: Artifact,
    policy: Artifact,
    evaluation: Artifact,
    seed: int,
    profile: str,
) -> settings.PromotionPlan:
    """Check that the evaluation is of this model on this data, as configured; open the run."""
    from engine.evaluation.comparability import require_same_settings
    from engine.promotion.gate import check_evidence

    machines, data = profiles.read_profile(profile), dataset.local()
    config = with_overrides(config, seed=seed)
    check_signatures(config)
    evidence = check_evidence(data, policy.local(), evaluation.local())
    promotion = promotion_settings(config.replaced({"evaluate": pinned_evaluation(config)}))
    require_same_settings(evidence, promotion.data, promotion.evaluate, promotion.seed)
    Tracker(experiment=config.tracking.experiment).check()
    run = open_run(config, read_manifest(data).digest, "promote_only")
    return settings.PromotionPlan(run, machines, promotion, config.promote.approval == "required")


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
    return validated(type(config), values)


def rl_lora(model: ModelConfig) -> LoRAConfig:
    """Return RL's LoRA settings: new adapters of the warm start's shape, on its merged model."""
    if not model.lora.from_folder:
        return model.lora
    from engine.models import resolve_lora

    return resolve_lora(model.path, model.lora).model_copy(update={"from_folder": False})


def check_settings(config: PipelineConfig) -> None:
    """Raise ConfigError for settings that can't work with any data or model.

    Checks that load torch, for seconds, are not repeated for the same settings and sources.
    """
    from engine.evaluation.lm_eval import require_lm_eval
    from engine.tracking.metric_logs import require_packages

    require_packages(config.tracking.logger, "tracking.logger")
    require_lm_eval(config.evaluate.lm_eval)
    key = checks_key(config)
    passed = home() / "checks" / key
    if key and passed.exists():
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
        with contextlib.suppress(OSError):  # then it is checked again
            passed.mkdir(parents=True, exist_ok=True)


def checks_key(config: PipelineConfig) -> str:
    """Return the digest of what the checks depend on; empty where it isn't all known."""
    rl, evaluation = config.rl, config.evaluation()
    named = json.dumps(config.model_dump(mode="json"), separators=(",", "="))  # colons are values'
    plugins = {*config.data.plugins, *rl.plugins, *evaluation.plugins}
    others = rl.algorithm.teachers or rl.critic.model_path or ":" in named
    if others or any(module.partition(".")[0] not in PACKAGES for module in plugins):
        return ""
    parts = (digest(config), sources_digest(), library_versions(), str(os.cpu_count()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_signatures(config: PipelineConfig) -> None:
    """Raise ConfigError where signatures are required, and a run can't make or check them."""
    if not config.lineage.require_signatures:
        return
    trusted, key = signatures.trusted_keys(config.lineage.public_keys), signatures.signing_key()
    if key is None or signatures.public_key(key) not in trusted:
        state = "is not set" if key is None else "holds a key that is not among the public keys"
        raise ConfigError(
            f"lineage.require_signatures=true, and {signatures.SIGNING_VARIABLE} {state}: the gate "
            "would refuse what this run makes; set the key, or lineage.require_signatures=false"
        )


def check_names(config: PipelineConfig) -> str:
    """Check that model, reward and data are there, before torch loads; return the data's digest."""
    scratch = ", or leave it empty for a model from scratch"
    require_model_name(config.model.path, way_out=scratch)
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


def check_inputs(config: PipelineConfig) -> tuple[str, int]:
    """Check settings, model and tracking server; return the model's digest and context (tokens)."""
    check_settings(config)
    path, start_digest, context = config.model.path, "", config.model.max_position_embeddings
    if path:
        from engine.models import require_model_folder, vocabulary_and_context

        require_model_folder(path)
        start_digest, context = model_digest(path), vocabulary_and_context(path)[1]
    profiles.check_model_layouts(config)
    tracker = Tracker(experiment=config.tracking.experiment)
    if not host().dry_run or tracker.database is None:  # whose check would make the file
        tracker.check()
    return start_digest, context


def open_run(config: PipelineConfig, data_digest: str, workflow: str) -> settings.RunContext:
    """Start the parent run in MLflow; a dry run has none."""
    values: dict[str, Any] = {"experiment": config.tracking.experiment}
    values |= {"logger": config.tracking.logger, "started_at": time.time()}
    if host().dry_run:
        return settings.RunContext(run_id="dry-run", mlflow_run="", **values)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    execution = host().execution or run_id
    tracker = Tracker(experiment=config.tracking.experiment)
    parent = tracker.start_pipeline(
        f"{workflow}-{run_id}",
        config.model_dump(mode="json"),
        {
            RUN_TAG: run_id,
            **execution_tags(execution),
            "code_version": digests.code_version(),
            "config_digest": digest(config),
            "data_digest": data_digest,
        },
        key=execution,
    )
    url = tracker.run_url(parent)
    return settings.RunContext(run_id=run_id, mlflow_run=parent, mlflow_url=url, **values)


def preferences_digest(pairs: PairsConfig) -> str:
    """Return the SHA-256 (hex) of the files of preferences; empty for rollouts."""
    if not pairs.path:
        return ""
    if not is_remote(pairs.path) and not as_path(pairs.path).exists():
        raise DataError(f"pairs.path={pairs.path!r} does not exist; check the path")
    contents = "\n".join(map(address_digest, data_files(pairs.path)))
    return hashlib.sha256(contents.encode()).hexdigest()


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
            "reward_model.head=token learns from steps, not pairs; train it by "
            "ProcessRewardTrainer or python -m engine.main_reward_model"
        )
    check_offline_layout(config.reward_model, LoRAConfig())
    if workflow == "classic_rlhf" and config.rl.reward.name == "reward_model":
        raise ConfigError(
            "rl.reward.name=reward_model in classic_rlhf, which trains one and sets it; rl.reward "
            "is the true reward there, which pairs are ranked by and over-optimisation is measured "
            "with"
        )


def pin_named_content(config: C) -> C:
    """Return the settings with what `rl`, `pairs` and `evaluate` name pinned; or ModelError."""
    rl, several = config.rl, "algorithm.distillation.teachers"
    named = ("algorithm.teacher", "critic.model_path")
    pins: dict[str, object] = {s: pin_revision(attrgetter(s)(rl), f"rl.{s}") for s in named}
    pins[several] = tuple(
        teacher.replaced({"model": pin_revision(teacher.model, f"rl.{several}[{i}].model")})
        for i, teacher in enumerate(rl.algorithm.distillation.teachers)
    )
    rl = rl.replaced(pins)
    rl = rl.replaced({"named_content": named_content(rl)})
    if rl.rollout.multi_turn.enable:
        agent = pinned_agent(rl.rollout.agent, rl.rollout.multi_turn)
        rl = rl.replaced({"rollout.agent": agent})
    pinned = {"pairs": _with_reward_code(config.ranking()), "evaluate": pinned_evaluation(config)}
    return config.model_copy(update={"rl": rl, **pinned})


def pinned_evaluation(config: PipelineConfig) -> EvaluateConfig:
    """Return how models are evaluated, with digests of the reward's modules and of own tasks."""
    evaluate = _with_reward_code(config.evaluation())
    folder = evaluate.lm_eval.include_path
    if folder and Path(folder).is_dir():
        content = digests.tree_digest(Path(folder))
        evaluate = evaluate.replaced({"lm_eval.named_content": content})
    if evaluate.multi_turn is not None and evaluate.multi_turn.enable:
        agent = pinned_agent(evaluate.environments, evaluate.multi_turn)
        evaluate = evaluate.replaced({"agent": agent})
    return evaluate


def _with_reward_code(config: Scored) -> Scored:
    code = _code_digest(_reward_names(config.scorer), *config.plugins)
    return config.replaced({"named_content": code})


def pinned_agent(agent: AgentConfig, multi_turn: MultiTurnConfig) -> AgentConfig:
    """Return the settings of episodes, with the digest of all modules and files that they name."""
    from engine.agents.agent_runner import agent_files

    environment, play = agent.environment, agent.play
    named = [environment.name, multi_turn.format, *texts_of([environment.options, play.options])]
    files = agent_files(play.name) if play.name else []
    named += [] if files else [play.name]
    contents = [digests.hash_file(name) for name in (*named, *files) if os.path.isfile(name)]
    content = _joined(_code_digest(named), *contents)
    return agent.replaced({"named_content": content})


def _reward_names(reward: RewardConfig) -> list[str]:
    return [spec.name for spec in reward.specs().values()]


def _code_digest(names: Iterable[str], *modules: str) -> str:
    """Return the digest of modules, and of those of names like `package.module:name`."""
    named = (name.partition(":")[0] for name in names if ":" in name)
    return digests.modules_digest([*modules, *named])


def _joined(*parts: str) -> str:
    """Return one digest of several; empty where all are."""
    text = "\0".join(filter(None, parts))
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def named_content(rl: RLConfig) -> str:
    """Return the digest of plugins and modules that settings name, and of models' folders."""
    algorithm, loss = rl.algorithm, rl.actor.policy_loss.loss_mode
    names = [algorithm.dataflow, algorithm.adv_estimator, rl.rollout.engine, loss]
    names += [algorithm.preference.loss, *_reward_names(rl.reward)]
    folders = map(Path, filter(None, [*algorithm.teacher_models.values(), rl.critic.model_path]))
    weights = (digests.tree_digest(folder) for folder in folders if folder.is_dir())
    return _joined(_code_digest(names, *rl.plugins), *weights)


def model_digest(path: str) -> str:
    """Return the digest of a model's folder and of an adapter's base; a pinned id as it is."""
    from engine.models.loading import adapter_base_path

    if not Path(path).is_dir():
        return path
    content, base = digests.tree_digest(Path(path)), adapter_base_path(path)
    if base is None:
        return content
    return _joined(content, model_digest(pin_revision(base, f"the base of model.path={path!r}")))
