"""Compare two models on the held-out problems of a run, without training.

    pyflyte run workflows/evaluate_only.py evaluate_only \
        --candidate models:/hybridflyte-policy@champion --baseline /models/Qwen2.5-0.5B

With the settings of a run its data come from the cache, so that the problems are the same.
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import evaluate, fetch, finalize, plan, preprocess


@workflow(on_failure=failure.evaluate_only_failed)
def evaluate_only(
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    candidate: str = "models:/hybridflyte-policy@champion",
    baseline: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteDirectory:
    """Evaluate a model against another one.

    Args:
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text.
        source: Data source, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the data; empty: as in config.
        model: The start model of the run whose problems these are; empty: as in config.
        candidate: The model to judge: models:/NAME@ALIAS, models:/NAME/VERSION, folder or address.
        baseline: The model that it is compared with, written the same way.
        seed: Seed of data and sampling; negative: as in config.
        profile: Machines to run on.

    Returns:
        The evaluation artifact: report.html, comparison.json and a row a problem and model.
    """
    p = plan(
        config=config,
        source=source,
        path=path,
        model=model,
        seed=seed,
        profile=profile,
        workflow="evaluate_only",
    )
    # First: whether they are there is known before the data are made.
    warm_start = fetch(run=p.run, reference=baseline, name="baseline")
    policy = fetch(run=p.run, reference=candidate, name="candidate")
    dataset = preprocess(run=p.run, settings=p.dataset).dataset
    evaluation = evaluate(
        p.profile,
        run=p.run,
        settings=p.evaluation,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
    ).evaluation
    return finalize(run=p.run, artifact=evaluation)
