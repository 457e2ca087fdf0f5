"""Scheduled retraining: the champion learns from what arrived, and gives way only to a better one.

    pyflyte run workflows/retraining.py retraining --kickoff "$(date -u +%Y-%m-%dT%H:%M:%S)" \\
        --path s3://bucket/problems

It starts from the champion, on the problems that arrived since the data of its own training, with
a replay of those. Both are evaluated on the champion's frozen test set, and the gate decides. A
night with too little, or nothing new, ends as skipped with the reason. Run twice, or late, it does
what is left to do: see docs/retraining.md.
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
from tasks.finalize import skipped
from tasks.ingest import take_in
from tasks.inputs import RLHFConfig
from tasks.profiles import ProfileName
from tasks.report import report
from tasks.retraining_trigger import NewData
from tasks.retraining_trigger import kickoff as open_night
from tasks.rl import rl
from workflows.approval import gate


@workflow
def night(
    run: RunContext,
    champion: str,
    news: NewData,
    data: DataConfig,
    retrain: RetrainConfig,
    rl_config: RLConfig,
    lora: LoRAConfig,
    evaluate_config: EvaluateConfig,
    promote_config: PromoteConfig,
    needs_approval: bool,
    seed: int,
    config_digest: str,
    profile: str,
) -> FlyteFile:
    """Train on the new data and let the gate decide."""
    former = fetch(run=run, reference=champion, name="champion")
    dataset = take_in(run=run, champion=former, news=news, data=data, retrain=retrain, seed=seed)
    policy = rl(
        profile,
        run=run,
        dataset=dataset,
        warm_start=former,
        data=data,
        config=rl_config,
        lora=lora,
        seed=seed,
    )
    evaluation = evaluate(
        profile,
        run=run,
        dataset=dataset,
        warm_start=former,
        policy=policy,
        data=data,
        config=evaluate_config,
        seed=seed,
    )
    promotion = gate(
        needs_approval,
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
        warm_start=former,
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
    profile: ProfileName = ProfileName.LAPTOP,
) -> FlyteFile:
    """Train the champion on the problems that arrived since, and promote the better one.

    Args:
        kickoff: The night, in UTC: what was written later waits for the next one.
        config: Settings; data.source and the sections model and sft are not read.
        path: Folder or s3:// prefix of dated folders with new data; empty: retrain.path.
        seed: Seed of replay and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is spread.

    Returns:
        The run's summary.json.
    """
    n = open_night(config=config, at=kickoff, path=path, seed=seed, profile=profile)
    return (
        conditional("new_data")
        .if_(n.go.is_true())
        .then(
            night(
                run=n.run,
                champion=n.champion,
                news=n.news,
                data=n.data,
                retrain=n.retrain,
                rl_config=n.rl,
                lora=n.lora,
                evaluate_config=n.evaluate,
                promote_config=n.promote,
                needs_approval=n.needs_approval,
                seed=n.seed,
                config_digest=n.config_digest,
                profile=n.profile,
            )
        )
        .else_()
        .then(skipped(run=n.run, reason=n.reason))
    )
