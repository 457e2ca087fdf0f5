"""Stages that several workflows compose alike, from the outputs of a plan."""

from typing import Any

from tasks.evaluate import evaluate
from tasks.learned_reward import reward_model_promotion, reward_model_training
from tasks.policy_training import rl, sft
from tasks.preference_training import pairs
from tasks.preprocess import preprocess
from tasks.report import report
from workflows.approval import gate


def prepare_dataset(p: Any) -> Any:
    """The dataset of a plan. To be called in workflows only, as the functions below."""
    return preprocess(
        run=p.run,
        data=p.data,
        source_digest=p.source_digest,
        model_path=p.model_path,
        model_digest=p.start_digest,
        context=p.context,
        seed=p.seed,
    ).dataset


def make_warm_start(p: Any, dataset: Any) -> Any:
    """The warm start, or with `sft.skip` the start model."""
    return sft(
        p.sft_profile,
        run=p.run,
        dataset=dataset,
        start=p.start,
        start_digest=p.start_digest,
        config=p.sft,
        seed=p.seed,
    )


def improve_by_rl(p: Any, dataset: Any, warm_start: Any) -> Any:
    """The policy that RL makes of the warm start."""
    return rl(
        p.profile,
        run=p.run,
        dataset=dataset,
        warm_start=warm_start,
        data=p.data,
        config=p.rl,
        lora=p.lora,
        seed=p.seed,
        dtype=p.rl_dtype,
    )


def make_preferences(p: Any, dataset: Any, policy: Any) -> Any:
    """Preferences of files, or from rollouts of the policy."""
    return pairs(
        p.profile,
        run=p.run,
        dataset=dataset,
        policy=policy,
        data=p.data,
        config=p.pairs,
        source_digest=p.pairs_digest,
        kind=p.kind,
        seed=p.seed,
    )


def train_reward_model(p: Any, made: Any, policy: Any) -> Any:
    """A reward model of the policy's backbone."""
    return reward_model_training(
        p.profile,
        run=p.run,
        pairs=made,
        policy=policy,
        config=p.reward_model,
        dtype=p.dtype,
        too_long=p.too_long,
        seed=p.seed,
    )


def promote_reward_model(p: Any, made: Any, scorer: Any) -> Any:
    """A reward model in the registry, champion if it ranks held-out pairs well enough."""
    return reward_model_promotion(
        p.profile,
        run=p.run,
        pairs=made,
        reward_model=scorer,
        config=p.reward_model_gate,
        seed=p.seed,
    )


def evaluate_and_promote(p: Any, dataset: Any, warm_start: Any, policy: Any) -> Any:
    """Evaluation, promotion and report of a policy."""
    evaluation = evaluate(
        p.profile,
        run=p.run,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        data=p.data,
        config=p.evaluate,
        seed=p.seed,
    ).evaluation
    promotion = gate(
        p.needs_approval,
        profile=p.profile,
        run=p.run,
        dataset=dataset,
        policy=policy,
        evaluation=evaluation,
        data=p.data,
        evaluate=p.evaluate,
        config=p.promote,
        seed=p.seed,
    )
    return report(
        run=p.run,
        config_digest=p.config_digest,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        evaluation=evaluation,
        promotion=promotion,
    )
