"""Promotion that may wait for a person: `promote.approval=required`.

The rules are asked first. Only where consent is all that is missing does a gate open; whoever
approves in Flyte's console (or at the terminal, locally) lets the promotion be tried again, against
the champion of that moment. Nobody does within a week: the execution fails, nothing has moved.
"""

from datetime import timedelta
from typing import Any

from flytekit import approve, conditional, workflow
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig, PromoteConfig
from tasks.context import RunContext
from tasks.promote import keep, promote, to_approve, waits_for_approval

PATIENCE = timedelta(days=7)
APPROVED_BY = "Flyte approval"


@workflow
def approved_promotion(
    first: FlyteDirectory,
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
) -> FlyteDirectory:
    """Wait for consent, then promote."""
    seen = approve(to_approve(promotion=first), "promotion", timeout=PATIENCE)
    again = promote(
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
    seen >> again
    return again


@workflow
def promotion_with_approval(
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
) -> FlyteDirectory:
    """Promote, waiting for a person where only consent is missing."""
    first = promote(
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
        .then(keep(promotion=first))
    )


def gate(needs_approval: Any, **inputs: Any) -> Any:
    """The promotion of a run; with `needs_approval` (a promise) a person may be waited for.

    To be called in a workflow alone. A run that asks nobody has one container here, not three.
    """
    return (
        conditional("promotion")
        .if_(needs_approval.is_true())
        .then(promotion_with_approval(**inputs))
        .else_()
        .then(promote(**inputs))
    )
