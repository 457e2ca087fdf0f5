"""Promotion that may wait for a person: `promote.approval=required`.

The rules come first. Only where approval is all that is missing, the workflow waits. Approval in
Flyte's console (or at the terminal, locally) runs the promotion again, against the champion of that
moment. Without approval within a week the execution fails, and no alias has moved.
"""

from typing import Any

from flytekit import approve, conditional, workflow
from flytekit.types.directory import FlyteDirectory

from engine.stages.profiles import Profile
from engine.stages.settings import PromotionSettings, RunContext
from tasks.stages import approval_request, keep_promotion, promote, waits_for_approval
from workflows.pipelines import APPROVAL_TIMEOUT, APPROVED_BY


@workflow
def approved_promotion(
    first: FlyteDirectory,
    profile: Profile,
    run: RunContext,
    settings: PromotionSettings,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
) -> FlyteDirectory:
    """Wait for approval, then promote."""
    inputs = {**locals()}
    request = approval_request(promotion=inputs.pop("first"))
    approved = approve(request, "promotion", timeout=APPROVAL_TIMEOUT)
    again = promote(**inputs, approved_by=APPROVED_BY)
    approved >> again
    return again


@workflow
def promotion_with_approval(
    profile: Profile,
    run: RunContext,
    settings: PromotionSettings,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
) -> FlyteDirectory:
    """Promote, and wait for a person where only approval is missing."""
    inputs = {**locals()}
    first = promote(**inputs)
    waits = waits_for_approval(promotion=first)
    return (
        conditional("approval")
        .if_(waits.is_true())
        .then(approved_promotion(first=first, **inputs))
        .else_()
        .then(keep_promotion(promotion=first))
    )


def gate(p: Any, dataset: Any, policy: Any, evaluation: Any) -> Any:
    """Promote; without a wait for a person this is one container instead of three."""
    stage = {"profile": p.profile, "run": p.run, "settings": p.promotion}
    inputs = {**stage, "dataset": dataset, "policy": policy, "evaluation": evaluation}
    return (
        conditional("promotion")
        .if_(p.needs_approval.is_true())
        .then(promotion_with_approval(**inputs))
        .else_()
        .then(promote(**inputs))
    )
