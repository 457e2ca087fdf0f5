"""Preferences: DPO and its relatives, KTO, reward models, and classic RLHF, each with one command.

    pyflyte run workflows/preference.py preference
    pyflyte run workflows/preference.py preference --model /models/Qwen2.5-0.5B-Instruct \
        --preferences pairs.jsonl --config '{"sft": {"skip": true}}'
    pyflyte run workflows/preference.py reward_model
    pyflyte run workflows/preference.py classic_rlhf
    pyflyte run workflows/preference.py make_pairs --policy models:/hybridflyte-policy@champion

Composition only: what a stage does is in `engine/stages/`.
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import fetch, finalize, learn_in_rounds, pairs, plan, preprocess, rl
from workflows.launching import settings
from workflows.parts import evaluate_and_promote, reward_model_of, warm_start_of


@workflow(on_failure=failure.preference_failed)
def preference(
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    preferences: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteFile:
    """Warm-start a model (unless `sft.skip`), train it on preferences, promote it if it is better.

    Args:
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text.
        source: Data source of the problems, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the problems; empty: as in config.
        model: Hugging Face model folder to start from; empty: as in config.
        preferences: Pairs or labelled rows: file, folder, s3://… or hf://ID; empty: as in config,
            where empty means that the policy writes them and rl.reward ranks them.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = plan(
        config=config,
        source=source,
        path=path,
        model=model,
        preferences=preferences,
        seed=seed,
        profile=profile,
        workflow="preference",
    )
    dataset, warm_start = warm_start_of(p)
    policy = learn_in_rounds(
        profile=p.profile,
        run=p.run,
        pairs_settings=p.pairs,
        settings=p.preference,
        dataset=dataset,
        start=warm_start,
    )
    return evaluate_and_promote(p, dataset, warm_start, policy)


@workflow(on_failure=failure.reward_model_failed)
def reward_model(
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    preferences: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteDirectory:
    """Train a reward model on preferences; RL takes its folder as a reward.

    Args:
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text.
        source: Data source of the problems, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the problems; empty: as in config.
        model: Hugging Face model folder to start from; empty: as in config.
        preferences: Pairs: file, folder, s3://… or hf://ID; empty: as in config, where empty means
            that the policy writes them and rl.reward ranks them.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The reward model: a sequence-classification folder, or with head=likelihood a language
        model, with accuracy and calibration on held-out pairs in its manifest.
    """
    p = plan(
        config=config,
        source=source,
        path=path,
        model=model,
        preferences=preferences,
        seed=seed,
        profile=profile,
        workflow="reward_model",
    )
    dataset, warm_start = warm_start_of(p)
    scorer, registered = reward_model_of(p, dataset, warm_start)
    done = finalize(run=p.run, artifact=scorer)
    registered >> done  # which ends the run
    return done


@workflow(on_failure=failure.classic_rlhf_failed)
def classic_rlhf(
    config: RLHFConfig = settings("classic_rlhf"),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    preferences: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteFile:
    """Warm start, reward model, PPO by it with a critic that starts from it, and promotion.

    Args:
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text.
            rl.reward is the true reward: it ranks rollouts where no preferences are given, and
            shows how far the reward model is over-optimised.
        source: Data source of the problems, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the problems; empty: as in config.
        model: Hugging Face model folder to start from; empty: as in config.
        preferences: Pairs: file, folder, s3://… or hf://ID; empty: as in config, where empty means
            that the policy writes them and rl.reward ranks them.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = plan(
        config=config,
        source=source,
        path=path,
        model=model,
        preferences=preferences,
        seed=seed,
        profile=profile,
        workflow="classic_rlhf",
    )
    dataset, warm_start = warm_start_of(p)
    scorer, registered = reward_model_of(p, dataset, warm_start)
    policy = rl(
        p.profile,
        run=p.run,
        settings=p.rl,
        dataset=dataset,
        warm_start=warm_start,
        reward_model=scorer,
    )
    registered >> policy  # a registry that can't be written to is found out before RL
    return evaluate_and_promote(p, dataset, warm_start, policy)


@workflow(on_failure=failure.make_pairs_failed)
def make_pairs(
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    policy: str = "models:/hybridflyte-policy@champion",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteDirectory:
    """Let a policy write pairs: the best and the worst of its completions, by a reward.

    Args:
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text.
        source: Data source of the problems, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the problems; empty: as in config.
        model: The start model of the run whose problems these are; empty: as in config.
        policy: Who writes: models:/NAME@ALIAS, models:/NAME/VERSION, folder or address.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The pairs artifact: train.parquet, validation.parquet and a card.
    """
    p = plan(
        config=config,
        source=source,
        path=path,
        model=model,
        preferences="",
        seed=seed,
        profile=profile,
        workflow="make_pairs",
    )
    writer = fetch(run=p.run, reference=policy, name="policy")
    dataset = preprocess(run=p.run, settings=p.dataset).dataset
    made = pairs(p.profile, run=p.run, settings=p.pairs, dataset=dataset, policy=writer)
    return finalize(run=p.run, artifact=made)
