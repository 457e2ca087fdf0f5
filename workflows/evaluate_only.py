"""Compare two models on the held-out problems of a run, without training.

    pyflyte run workflows/evaluate_only.py evaluate_only \
        --candidate models:/hybridflyte-policy@champion --baseline /models/Qwen2.5-0.5B

With the settings of a run its data come from the cache, so that the problems are the same.
"""

from typing import Any

from flytekit.types.directory import FlyteDirectory

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.stages import evaluate, fetch, finalize, preprocess
from workflows.parts import audit_of, pipeline


@pipeline(
    failure.evaluate_only_failed,
    model="The start model of the run whose problems these are; empty: as in config.",
    candidate="The model to judge: models:/NAME@ALIAS, models:/NAME/VERSION, folder or address.",
    baseline="The model that it is compared with, written the same way.",
    seed="Seed of data and sampling; negative: as in config.",
    profile="Machines to run on.",
)
def evaluate_only(
    p: Any, candidate: str = "models:/hybridflyte-policy@champion", baseline: str = ""
) -> FlyteDirectory:
    """Evaluate a model against another one.

    Returns:
        The evaluation artifact: report.html, comparison.json and a row a problem and model.
    """
    # First: whether they are there is known before the data are made.
    warm_start = fetch(run=p.run, reference=baseline, name="baseline")
    policy = fetch(run=p.run, reference=candidate, name="candidate")
    dataset = preprocess(run=p.run, settings=p.dataset).dataset
    audit = audit_of(p, dataset)
    evaluation = evaluate(
        p.profile,
        run=p.run,
        settings=p.evaluation,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        audit=audit,
    ).evaluation
    return finalize(run=p.run, artifact=evaluation)
