"""Preferences: DPO and its relatives, KTO, reward models, and classic RLHF, each with one command.

    pyflyte run workflows/preference.py preference
    pyflyte run workflows/preference.py preference --model /models/Qwen2.5-0.5B-Instruct \
        --preferences pairs.jsonl --config '{"sft": {"skip": true}}'
    pyflyte run workflows/preference.py reward_model
    pyflyte run workflows/preference.py classic_rlhf
    pyflyte run workflows/preference.py make_pairs --policy models:/hybridflyte-policy@champion
"""

from typing import Any

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.stages import fetch, finalize, learn_in_rounds, pairs, preprocess, rl
from workflows.launching import settings
from workflows.parts import (
    INPUTS,
    audit_of,
    evaluate_and_promote,
    pipeline,
    reward_model_of,
    warm_start_of,
)


@pipeline(
    failure.preference_failed,
    by_preferences=True,
    preferences=INPUTS["preferences"][0].replace("Pairs", "Pairs or labelled rows"),
)
def preference(p: Any) -> FlyteFile:
    """Warm-start a model (unless `sft.skip`), train it on preferences, promote it if it is better.

    Returns:
        The run's summary.json.
    """
    dataset, warm_start = warm_start_of(p)
    audit = audit_of(p, dataset)
    policy = learn_in_rounds(
        profile=p.profile,
        run=p.run,
        pairs_settings=p.pairs,
        settings=p.preference,
        dataset=dataset,
        start=warm_start,
    )
    return evaluate_and_promote(p, dataset, warm_start, policy, audit)


@pipeline(failure.reward_model_failed, by_preferences=True)
def reward_model(p: Any) -> FlyteDirectory:
    """Train a reward model on preferences; RL takes its folder as a reward.

    Returns:
        The reward model: a sequence-classification folder, or with head=likelihood a language
        model, with accuracy and calibration on held-out pairs in its manifest.
    """
    dataset, warm_start = warm_start_of(p)
    scorer, registered = reward_model_of(p, dataset, warm_start)
    done = finalize(run=p.run, artifact=scorer)
    registered >> done  # which ends the run
    return done


@pipeline(
    failure.classic_rlhf_failed,
    by_preferences=True,
    settings=settings("classic_rlhf"),
    config=f"{INPUTS['config'][0]} rl.reward is the true reward: it ranks rollouts where no "
    "preferences are given, and shows how far the reward model is over-optimised.",
)
def classic_rlhf(p: Any) -> FlyteFile:
    """Warm start, reward model, PPO by it with a critic that starts from it, and promotion.

    Returns:
        The run's summary.json.
    """
    dataset, warm_start = warm_start_of(p)
    audit = audit_of(p, dataset)
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
    audit >> policy
    return evaluate_and_promote(p, dataset, warm_start, policy, audit)


@pipeline(
    failure.make_pairs_failed,
    model="The start model of the run whose problems these are; empty: as in config.",
    policy="Who writes: models:/NAME@ALIAS, models:/NAME/VERSION, folder or address.",
)
def make_pairs(p: Any, policy: str = "models:/hybridflyte-policy@champion") -> FlyteDirectory:
    """Let a policy write pairs: the best and the worst of its completions, by a reward.

    Returns:
        The pairs artifact: train.parquet, validation.parquet and a card.
    """
    writer = fetch(run=p.run, reference=policy, name="policy")
    dataset = preprocess(run=p.run, settings=p.dataset).dataset
    made = pairs(p.profile, run=p.run, settings=p.pairs, dataset=dataset, policy=writer)
    return finalize(run=p.run, artifact=made)
