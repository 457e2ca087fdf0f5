"""Promotion that may wait for a person: `promote.approval=required`.

The rules come first. Only where approval is all that is missing, the workflow waits. Approval in
Flyte's console (or at the terminal, locally) runs the promotion again, against the champion of that
moment. Without approval within a week the execution fails, and no alias has moved.
"""

from datetime import timedelta
from typing import Any

from flytekit import approve, conditional, workflow
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig, PromoteConfig
from tasks.context import RunContext
from tasks.flytekit_setup import patch_nested_branches
from tasks.profiles import Profile
from tasks.promote import approval_request, keep_promotion, promote, waits_for_approval

patch_nested_branches()

APPROVAL_TIMEOUT = timedelta(days=7)
APPROVED_BY = "Flyte approval"


@workflow
def direct_promotion(
    profile: Profile,
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
    approved_by: str = "",
) -> FlyteDirectory:
    """Promote on the profile's machine."""
    return promote(
        profile,
        run=run,
        dataset=dataset,
        policy=policy,
        evaluation=evaluation,
        data=data,
        evaluate=evaluate,
        config=config,
        seed=seed,
        approved_by=approved_by,
    )


@workflow
def approved_promotion(
    first: FlyteDirectory,
    profile: Profile,
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
) -> FlyteDirectory:
    """Wait for approval, then promote."""
    approved = approve(approval_request(promotion=first), "promotion", timeout=APPROVAL_TIMEOUT)
    again = direct_promotion(
        profile=profile,
        run=run,
        dataset=dataset,
        policy=policy,
        evaluation=evaluation,
        data=data,
        evaluate=evaluate,
        config=config,
        seed=seed,
        approved_by=APPROVED_BY,
    )
    approved >> again
    return again


@workflow
def promotion_with_approval(
    profile: Profile,
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
) -> FlyteDirectory:
    """Promote, and wait for a person where only approval is missing."""
    first = direct_promotion(
        profile=profile,
        run=run,
        dataset=dataset,
        policy=policy,
        evaluation=evaluation,
        data=data,
        evaluate=evaluate,
        config=config,
        seed=seed,
    )
    waits = waits_for_approval(promotion=first)
    return (
        conditional("approval")
        .if_(waits.is_true())
        .then(
            approved_promotion(
                first=first,
                profile=profile,
                run=run,
                dataset=dataset,
                policy=policy,
                evaluation=evaluation,
                data=data,
                evaluate=evaluate,
                config=config,
                seed=seed,
            )
        )
        .else_()
        .then(keep_promotion(promotion=first))
    )


def gate(needs_approval: Any, **inputs: Any) -> Any:
    """The promotion of a run; with `needs_approval` (a promise) it may wait for a person.

    To be called in workflows only. Without approval this is one container instead of three.
    """
    return (
        conditional("promotion")
        .if_(needs_approval.is_true())
        .then(promotion_with_approval(**inputs))
        .else_()
        .then(direct_promotion(**inputs))
    )
