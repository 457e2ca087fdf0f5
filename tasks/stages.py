"""All Flyte tasks that open runs, make artifacts and end runs: thin wrappers of `engine.stages`.

Where a task runs and what is retried and cached is in `engine.stages.pods`, by its name. The body
is the function of the same name there, which gets the task's inputs by name (`locals()`).
`stages.training` and others are loaded when a task runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from flytekit import StructuredDataset, dynamic, map_task, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from engine import stages
from engine.console import say
from engine.stages.pods import registration_environment
from engine.stages.profiles import Profile
from engine.stages.settings import (
    DatasetSettings,
    EvaluationSettings,
    IngestSettings,
    PairsSettings,
    Plan,
    PreferenceSettings,
    PromotionPlan,
    PromotionSettings,
    RetrainingPlan,
    RewardAuditSettings,
    RewardModelGateSettings,
    RewardModelSettings,
    RLSettings,
    RunContext,
    SFTSettings,
)
from engine.stages.stage import shared
from tasks import host
from tasks.failure import current_run
from tasks.flytekit_setup import evict_missing
from tasks.inputs import RLHFConfig
from tasks.variants import on_profiles, stages_of


def opened(body: Callable[..., Any], **inputs: Any) -> Any:
    """Call a stage's body that plans a run; return the plan."""
    current_run.clear()
    with host.flyte_host():
        if evicted := evict_missing():
            say(f"plan: results that were deleted from the disk are made again ({evicted})")
    made = host.run_body(body, **inputs)
    current_run.append(made.run)
    return made


@task(**host.task_options("plan"))
def plan(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: str,
    workflow: str = "rlhf",
    preferences: str = "",
) -> Plan:
    """Check the inputs, open the run, and split the configuration by stage."""
    return opened(stages.plan.plan, **locals())


@task(**host.task_options("plan_promotion"))
def plan_promotion(
    config: RLHFConfig,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    seed: int,
    profile: str,
) -> PromotionPlan:
    """Check that the evaluation is of this model on this data, as configured; open the run."""
    return opened(stages.plan.plan_promotion, **locals())


@task(**host.task_options("trigger_retraining"))
def trigger_retraining(
    config: RLHFConfig, at: datetime, path: str, seed: int, profile: str
) -> RetrainingPlan:
    """Open the run, and find what arrived until `at` since the champion's data."""
    return opened(stages.dataset.trigger_retraining, **locals())


class Dataset(NamedTuple):
    """The artifact, which stages read, and its splits, which people look at in Flyte's console."""

    dataset: FlyteDirectory
    sft_train: host.SFTPairs
    sft_validation: host.SFTPairs
    train: host.RLPrompts
    validation: host.RLPrompts
    test: host.RLPrompts


@task(**host.task_options("preprocess"))
def preprocess(run: RunContext, settings: DatasetSettings) -> Dataset:
    """Make validated splits and a tokenizer from a source."""
    made = host.run_body(stages.dataset.preprocess, **locals())
    return Dataset(FlyteDirectory(made.uri), *host.tables(made, *stages.dataset.SPLITS))


@task(**host.task_options("ingest"))
def ingest(run: RunContext, settings: IngestSettings, champion: FlyteDirectory) -> Dataset:
    """Add new problems to the champion's dataset."""
    made = host.run_body(stages.dataset.ingest, **locals())
    return Dataset(FlyteDirectory(made.uri), *host.tables(made, *stages.dataset.SPLITS))


@task(**host.task_options("fetch"))
def fetch(run: RunContext, reference: str, name: str) -> FlyteDirectory:
    """Download a model: models:/NAME@ALIAS, models:/NAME/VERSION, a folder, address or hub id."""
    return host.directory(stages.fetch.fetch, **locals())


@on_profiles()
def reward_audit(
    run: RunContext, settings: RewardAuditSettings, dataset: FlyteDirectory
) -> FlyteDirectory:
    """Find out whether the run's scorers can be fooled."""
    return host.directory(stages.reward_audit.reward_audit, **locals())


@on_profiles()
def sft(run: RunContext, settings: SFTSettings, dataset: FlyteDirectory) -> FlyteDirectory:
    """Fine-tune the start model, unless `sft.skip`."""
    return host.directory(stages.training.sft, **locals())


@on_profiles()
def rl(
    run: RunContext,
    settings: RLSettings,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    reward_model: FlyteDirectory | None = None,
) -> FlyteDirectory:
    """Improve the warm start by reinforcement learning on the dataset's prompts."""
    return host.directory(stages.training.rl, **locals())


@on_profiles()
def pairs(
    run: RunContext, settings: PairsSettings, dataset: FlyteDirectory, policy: FlyteDirectory
) -> FlyteDirectory:
    """Make the preferences that are learned from, by rollouts of the policy or from files."""
    return host.directory(stages.preferences.pairs, **locals())


@on_profiles()
def reference_log_probs(
    run: RunContext, settings: PreferenceSettings, pairs: FlyteDirectory, policy: FlyteDirectory
) -> FlyteDirectory:
    """Compute the reference's log-probs; `settings.config` as `reference_settings` gives it."""
    return host.directory(stages.preferences.reference_log_probs, **locals())


@on_profiles()
def preference_training(
    run: RunContext,
    settings: PreferenceSettings,
    pairs: FlyteDirectory,
    policy: FlyteDirectory,
    reference: FlyteDirectory,
) -> FlyteDirectory:
    """Train the policy, which is the reference as well, on preferences."""
    return host.directory(stages.preferences.preference_training, **locals())


@dynamic(
    cache=False,
    requests=host.SMALL,
    container_image=host.IMAGE,
    retries=2,  # of its own pod, as in `tasks.variants`
    timeout=timedelta(days=18),  # holds for all stages of all rounds
    environment=registration_environment(),
)
def learn_in_rounds(
    profile: Profile,
    run: RunContext,
    pairs_settings: PairsSettings,
    settings: PreferenceSettings,
    dataset: FlyteDirectory,
    start: FlyteDirectory,
) -> FlyteDirectory:
    """Make preferences, their reference and an update, `pairs.rounds` times.

    How many there are is known when a run starts: the nodes are written then.
    """
    policy = start
    for one in stages.preferences.rounds(pairs_settings, settings):
        made = pairs(profile, run=run, settings=one.pairs, dataset=dataset, policy=policy)
        log_probs = reference_log_probs(
            profile, run=run, settings=one.reference, pairs=made, policy=policy
        )
        policy = preference_training(
            profile,
            run=run,
            settings=one.training,
            pairs=made,
            policy=policy,
            reference=log_probs,
        )
    return policy


@on_profiles()
def reward_model_training(
    run: RunContext, settings: RewardModelSettings, pairs: FlyteDirectory, policy: FlyteDirectory
) -> FlyteDirectory:
    """Train a reward model that starts from the policy's backbone."""
    return host.directory(stages.preferences.reward_model_training, **locals())


@on_profiles()
def reward_model_promotion(
    run: RunContext,
    settings: RewardModelGateSettings,
    pairs: FlyteDirectory,
    reward_model: FlyteDirectory,
) -> FlyteDirectory:
    """Register the reward model; make it champion if it ranks held-out pairs by the rules."""
    return host.directory(stages.promotion.reward_model_promotion, **locals())


# Evaluation. With `evaluate.map_parts` the dynamic task `evaluate` runs `evaluate_part` so many
# times, each in a pod of the profile, and its stage reads their tables instead of decoding.


class Evaluation(NamedTuple):
    """The artifact, which the gate reads, and its tables, which people look at in the console."""

    evaluation: FlyteDirectory
    rows_warm_start: host.EvaluationRows
    rows_rl: host.EvaluationRows


@stages_of
def evaluate_part(
    part: int,
    run: RunContext,
    settings: EvaluationSettings,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
) -> host.EvaluationRows:
    """Return both models' rows of one share of the problems, `part` of `evaluate.map_parts`."""
    rows = host.run_body(stages.evaluation.evaluate_part, **locals())
    return host.as_table(host.TableFile.write(rows))


def parts_of(profile: Profile, inputs: Mapping[str, Any]) -> Any:
    """Make the parts' tables by a map task; None without parts."""
    parts = inputs["settings"].config.map_parts
    if parts == 1:
        return None
    given = {name: value for name, value in inputs.items() if name != "audit"}
    return map_task(partial(evaluate_part(profile), **given))(part=list(range(parts)))


@on_profiles(made_inside={"parts": parts_of})
def evaluate(
    run: RunContext,
    settings: EvaluationSettings,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
    audit: FlyteDirectory | None = None,
    parts: list[StructuredDataset] | None = None,
) -> Evaluation:
    """Compare the two models on held-out problems; `parts`: what a map task has decoded."""
    inputs: dict[str, Any] = {**locals(), "parts": None}
    if parts:
        from engine.data.contract import EVALUATION_ROWS

        named = ((f"part {n + 1} of the evaluation", table) for n, table in enumerate(parts))
        inputs["parts"] = (
            host.open_table(table).read(EVALUATION_ROWS, name) for name, table in named
        )
    made = host.run_body(stages.evaluation.evaluate, **inputs)
    names = (f"rows_{name}" for name in stages.evaluation.MODELS)
    return Evaluation(FlyteDirectory(made.uri), *host.tables(made, *names))


@on_profiles()
def promote(
    run: RunContext,
    settings: PromotionSettings,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    approved_by: str = "",
) -> FlyteDirectory:
    """Register the model; make it champion if it beats the present one on the same problems."""
    return host.directory(stages.promotion.promote, **locals())


@task(**host.task_options("waits_for_approval"))
def waits_for_approval(promotion: FlyteDirectory) -> bool:
    """Return whether a promotion lacks only approval: the condition of a workflow branch."""
    return bool(host.run_body(stages.promotion.read_decision, **locals())["waits_for_approval"])


@task(**host.task_options("keep_promotion"))
def keep_promotion(promotion: FlyteDirectory) -> FlyteDirectory:
    """Return a promotion as it is, for the workflow branch without approval."""
    return host.directory(lambda promotion: shared(promotion.local()), **locals())


@task(**host.task_options("approval_request"))
def approval_request(promotion: FlyteDirectory) -> str:
    """Return what a person is asked to approve, as Flyte's console shows it."""
    return host.run_body(stages.promotion.approval_request, **locals())


@task(**host.task_options("rollback"))
def rollback(
    model_name: str,
    reason: str,
    to: str = "",
    expected: str = "",
    alias: str = "champion",
    forced: bool = False,
    approved_by: str = "",
    request: str = "",
) -> FlyteDirectory:
    """Restore a champion; a second call with the same `request` changes nothing."""
    return host.directory(stages.promotion.rollback, **locals())


@task(**host.task_options("report"))
def report(
    run: RunContext,
    config_digest: str,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    promotion: FlyteDirectory,
) -> FlyteFile:
    """Write the run's pages and `summary.json`, end the MLflow parent run, print the summary."""
    return host.file(stages.evaluation.report, **locals())


@task(**host.task_options("finalize"))
def finalize(run: RunContext, artifact: FlyteDirectory) -> FlyteDirectory:
    """Write the artifact's metrics to the MLflow run, end the run, and return the artifact."""
    return host.directory(stages.evaluation.finalize, **locals())


@task(**host.task_options("finalize_skipped"))
def finalize_skipped(run: RunContext, reason: str) -> FlyteFile:
    """End a run that had nothing to do: the reason goes to MLflow and into `summary.json`."""
    return host.file(stages.evaluation.finalize_skipped, **locals())


@task(**host.task_options("review"))
def review(
    artifact: str, against: str, store: str, verify_content: bool, require_signatures: bool
) -> FlyteFile:
    """Write the page of an artifact's lineage; fail, with the page in the Deck, on tampering."""
    return host.file(stages.evaluation.review, **locals())
