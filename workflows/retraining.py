"""Scheduled retraining: train the champion on new data, and promote the result if it is better.

    pyflyte run workflows/retraining.py retraining --kickoff "$(date -u +%Y-%m-%dT%H:%M:%S)" \\
        --path s3://bucket/problems

Training starts from the champion, on the problems that arrived since its own training data, with
a replay of those. Both models are evaluated on the champion's frozen test set, and the promotion
rules decide. A run with too little new data ends as skipped, with the reason. A run may be late or
repeated: see docs/retraining.md.
"""

from datetime import datetime

from flytekit import conditional, workflow
from flytekit.types.file import FlyteFile

from engine.config import (
    DataConfig,
    EvaluateConfig,
    LoRAConfig,
    PromoteConfig,
    RetrainConfig,
    RLConfig,
)
from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.context import RunContext
from tasks.evaluate import evaluate
from tasks.fetch import fetch
from tasks.inputs import RLHFConfig
from tasks.new_data import NewData, ingest, trigger_retraining
from tasks.policy_training import rl
from tasks.profiles import Profile
from tasks.report import finalize_skipped, report
from workflows.approval import gate


@workflow
def retrain_champion(
    run: RunContext,
    champion: str,
    new_data: NewData,
    data: DataConfig,
    retrain: RetrainConfig,
    rl_config: RLConfig,
    lora: LoRAConfig,
    evaluate_config: EvaluateConfig,
    promote_config: PromoteConfig,
    needs_approval: bool,
    seed: int,
    config_digest: str,
    profile: Profile,
) -> FlyteFile:
    """Train on the new data, evaluate, and promote by the rules."""
    start = fetch(run=run, reference=champion, name="champion")
    dataset = ingest(
        run=run, champion=start, new_data=new_data, data=data, retrain=retrain, seed=seed
    ).dataset
    policy = rl(
        profile,
        run=run,
        dataset=dataset,
        warm_start=start,
        data=data,
        config=rl_config,
        lora=lora,
        seed=seed,
    )
    evaluation = evaluate(
        profile,
        run=run,
        dataset=dataset,
        warm_start=start,
        policy=policy,
        data=data,
        config=evaluate_config,
        seed=seed,
    ).evaluation
    promotion = gate(
        needs_approval,
        profile=profile,
        run=run,
        dataset=dataset,
        policy=policy,
        evaluation=evaluation,
        data=data,
        evaluate=evaluate_config,
        config=promote_config,
        seed=seed,
    )
    return report(
        run=run,
        config_digest=config_digest,
        dataset=dataset,
        warm_start=start,
        policy=policy,
        evaluation=evaluation,
        promotion=promotion,
    )


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
                champion=p.champion,
                new_data=p.new_data,
                data=p.data,
                retrain=p.retrain,
                rl_config=p.rl,
                lora=p.lora,
                evaluate_config=p.evaluate,
                promote_config=p.promote,
                needs_approval=p.needs_approval,
                seed=p.seed,
                config_digest=p.config_digest,
                profile=p.profile,
            )
        )
        .else_()
        .then(finalize_skipped(run=p.run, reason=p.skip_reason))
    )
