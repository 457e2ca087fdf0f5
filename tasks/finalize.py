"""Tasks that open and end runs of the workflows that have only some stages of `rlhf`."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from engine.config import DataConfig, EvaluateConfig, PromoteConfig
from engine.console import display_path
from tasks.content_pinning import pinned_evaluation
from tasks.context import SHORT, RunContext, as_output, echo, local_artifact, user_facing_errors
from tasks.decks import DECK, show_facts
from tasks.failure import set_current_run
from tasks.inputs import RLHFConfig
from tasks.pages import write_pages
from tasks.plan import open_run
from tasks.profiles import Profile, read_profile

SKIPPED_TAG = "hybridflyte.skipped"


class PromotionPlan(NamedTuple):
    """What `promote` needs."""

    run: RunContext
    data: DataConfig
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    needs_approval: bool
    profile: Profile


@task(**SHORT)
def open_promotion(
    config: RLHFConfig,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    seed: int,
    profile: str,
) -> PromotionPlan:
    """Check that the evaluation is of this model on this data, as configured; open the run."""
    from engine.evaluation.settings import require_same_settings
    from engine.promotion.checks import check_evidence
    from engine.storage.manifest import read_manifest
    from engine.tracking import Tracker

    with user_facing_errors():
        set_current_run(None)
        machines = read_profile(profile)
        folders = [local_artifact(artifact) for artifact in (dataset, policy, evaluation)]
        digest = check_evidence(*folders)
        seed = seed if seed >= 0 else config.seed
        evaluate = pinned_evaluation(config)
        require_same_settings(read_manifest(folders[2]), config.data, evaluate, seed)
        Tracker(experiment=config.tracking.experiment).check()
        run = open_run(config, (digest, ""), "promote_only")
        set_current_run(run)
    approval = config.promote.approval == "required"
    return PromotionPlan(run, config.data, evaluate, config.promote, seed, approval, machines)


@task(**SHORT, **DECK)
def finalize(run: RunContext, artifact: FlyteDirectory) -> FlyteDirectory:
    """Write the artifact's metrics to the MLflow run, end the run, and return the artifact.

    Of a promotion it writes the run's pages as well, see `tasks.pages`.
    """
    from engine.storage.manifest import read_manifest
    from engine.tracking import Tracker

    with user_facing_errors():
        folder = local_artifact(artifact)
        manifest = read_manifest(folder)
        if manifest.kind == "promotion":
            echo(f"run {run.run_id}: report in {display_path(write_pages(run, folder))}")
        metrics = {k: v for k, v in manifest.metrics.items() if k != "seconds"}
        Tracker(experiment=run.experiment).finish_pipeline(run.mlflow_run, "FINISHED", metrics)
        where = f"{manifest.kind} in {display_path(folder)}"
        echo(f"run {run.run_id}: MLflow run {run.mlflow_run}; {where}")
        return as_output(folder)


@task(**SHORT, **DECK)
def finalize_skipped(run: RunContext, reason: str) -> FlyteFile:
    """End a run that had nothing to do: the reason goes to MLflow and into `summary.json`."""
    from engine.redaction import redact
    from engine.tracking import Tracker
    from tasks.report import write_summary

    with user_facing_errors():
        tracker = Tracker(experiment=run.experiment)
        with tracker.translated("record why a run was skipped"):
            tracker.client.set_tag(run.mlflow_run, SKIPPED_TAG, redact(reason))
        tracker.finish_pipeline(run.mlflow_run, "FINISHED")
        path = write_summary(run, {"run_id": run.run_id, "skipped": reason})
        echo(f"run {run.run_id}: skipped: {reason}")
        show_facts("Skipped", {"run": run.run_id, "reason": redact(reason)})
    return FlyteFile(str(path))
