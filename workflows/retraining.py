"""Scheduled retraining: train the champion on new data, and promote the result if it is better.

    pyflyte run workflows/retraining.py retraining --kickoff "$(date -u +%Y-%m-%dT%H:%M:%S)" \\
        --path s3://bucket/problems

Training starts from the champion, with a replay of its own training data. Both models are evaluated
on the champion's frozen test set. A run with too little new data ends as skipped, with the reason.
A run may be late or repeated: see docs/retraining.md.
"""

from datetime import datetime
from types import SimpleNamespace

from flytekit import conditional, workflow
from flytekit.types.file import FlyteFile

from engine.stages.profiles import Profile
from engine.stages.settings import (
    EvaluationSettings,
    IngestSettings,
    PromotionSettings,
    RewardAuditSettings,
    RLSettings,
    RunContext,
)
from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import finalize_skipped, trigger_retraining
from workflows import pipelines
from workflows.parts import FRONT


@workflow
def retrain_champion(
    run: RunContext,
    profile: Profile,
    champion: str,
    ingest_settings: IngestSettings,
    audit_profile: Profile,
    audit_settings: RewardAuditSettings,
    rl_settings: RLSettings,
    evaluation_settings: EvaluationSettings,
    promotion_settings: PromotionSettings,
    needs_approval: bool,
    config_digest: str,
) -> FlyteFile:
    """Train on the new data, evaluate, and promote by the rules."""
    p = SimpleNamespace(
        run=run,
        profile=profile,
        champion=champion,
        ingest=ingest_settings,
        audit_profile=audit_profile,
        reward_audit=audit_settings,
        rl=rl_settings,
        evaluation=evaluation_settings,
        promotion=promotion_settings,
        needs_approval=needs_approval,
        config_digest=config_digest,
    )
    return pipelines.retrain_champion(FRONT, p)


@workflow(on_failure=failure.retraining_failed)
def retraining(
    kickoff: datetime,
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    path: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteFile:
    """Train the champion on the problems that arrived since, and promote the better model.

    Args:
        kickoff: Scheduled time in UTC: files written later wait for the next run.
        config: Settings; data.source and the sections model and sft are not read.
        path: Folder or s3:// prefix of dated folders with new data; empty: retrain.path.
        seed: Seed of replay and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = trigger_retraining(config=config, at=kickoff, path=path, seed=seed, profile=profile)
    return (
        conditional("new_data")
        .if_(p.proceed.is_true())
        .then(
            retrain_champion(
                run=p.run,
                profile=p.profile,
                champion=p.champion,
                ingest_settings=p.ingest,
                audit_profile=p.audit_profile,
                audit_settings=p.reward_audit,
                rl_settings=p.rl,
                evaluation_settings=p.evaluation,
                promotion_settings=p.promotion,
                needs_approval=p.needs_approval,
                config_digest=p.config_digest,
            )
        )
        .else_()
        .then(finalize_skipped(run=p.run, reason=p.skip_reason))
    )
