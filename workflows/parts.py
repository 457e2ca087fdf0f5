"""Parts that several workflows compose alike, from the outputs of a plan: to be called in them."""

from typing import Any

from tasks.stages import (
    evaluate,
    pairs,
    preprocess,
    report,
    reward_model_promotion,
    reward_model_training,
    rl,
    sft,
)
from workflows.approval import gate


def warm_start_of(p: Any) -> tuple[Any, Any]:
    """Make the dataset of a plan and the warm start, or with `sft.skip` the start model."""
    dataset = preprocess(run=p.run, settings=p.dataset).dataset
    return dataset, sft(p.sft_profile, run=p.run, settings=p.sft, dataset=dataset)


def reward_model_of(p: Any, dataset: Any, policy: Any) -> tuple[Any, Any]:
    """Train a reward model of the policy's backbone, and promote it in the registry."""
    made = pairs(p.profile, run=p.run, settings=p.pairs, dataset=dataset, policy=policy)
    model = reward_model_training(
        p.profile, run=p.run, settings=p.reward_model, pairs=made, policy=policy
    )
    registered = reward_model_promotion(
        p.profile, run=p.run, settings=p.reward_model_gate, pairs=made, reward_model=model
    )
    return model, registered


def improve_and_promote(p: Any, dataset: Any, warm_start: Any) -> Any:
    """Train by RL from the warm start, and promote the policy if it is better."""
    policy = rl(p.profile, run=p.run, settings=p.rl, dataset=dataset, warm_start=warm_start)
    return evaluate_and_promote(p, dataset, warm_start, policy)


def evaluate_and_promote(p: Any, dataset: Any, warm_start: Any, policy: Any) -> Any:
    """Evaluate, promote and report a policy."""
    evaluation = evaluate(
        p.profile,
        run=p.run,
        settings=p.evaluation,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
    ).evaluation
    promotion = gate(p, dataset, policy, evaluation)
    return report(
        run=p.run,
        config_digest=p.config_digest,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        evaluation=evaluation,
        promotion=promotion,
    )
