"""Register a model that a run has made, and make it the champion if its evaluation allows.

    pyflyte run workflows/promote_only.py promote_only --dataset outputs/artifacts/dataset/… \
        --policy outputs/artifacts/rl/… --evaluation outputs/artifacts/evaluation/…

For a run that ended before promotion, or whose promotion was declined under other rules.
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import finalize, plan_promotion
from workflows.approval import gate


@workflow(on_failure=failure.promote_only_failed)
def promote_only(
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteDirectory:
    """Promote a model by an evaluation that is there already.

    Args:
        dataset: The dataset artifact of the run.
        policy: The model artifact.
        evaluation: The evaluation artifact of this model on this dataset.
        config: Settings; promote and tracking are read, and evaluate and data.max_response_length,
            which must be as they were for the evaluation.
        seed: Seed of the run; negative: as in config.
        profile: Machines that the champion is evaluated on, where it has to be.

    Returns:
        The promotion artifact: decision.json.
    """
    p = plan_promotion(**locals())
    return finalize(run=p.run, artifact=gate(p, dataset, policy, evaluation))
