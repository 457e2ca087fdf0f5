"""All Flyte tasks that open runs, make artifacts and end runs: thin wrappers of `engine.stages`.

A decorator says where a task runs and what is retried and cached; the body is the function of the
same name there, which gets the task's inputs by name (`locals()`). `stages.training` and others are
loaded when a task runs.
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
from tasks.flytekit_setup import evict_missing, registration_environment
from tasks.inputs import RLHFConfig
from tasks.variants import on_profiles, ray_cluster, ray_cluster_of_gpus, stages_of

# Options of stages: what is computed once, and goes on elsewhere where its machine is taken away.
CACHED: dict[str, Any] = {"cache": host.STAGE_CACHE, "interruptible": True, **host.DECK}
COMPUTES: dict[str, Any] = {
    **CACHED,
    "requests": host.LARGE,
    "retries": 3,
    "timeout": timedelta(hours=6),
}
TRAINS: dict[str, Any] = {
    **COMPUTES,
    "task_config": ray_cluster_of_gpus,
    "timeout": timedelta(hours=12),
    "needs": ("hub", "loggers"),
}
# Moves of an alias are not interruptible; running one again changes nothing.
PROMOTES: dict[str, Any] = {
    "cache": False,
    "requests": host.LARGE,
    "retries": 2,
    "timeout": timedelta(hours=6),
    **host.DECK,
}
DATASET: dict[str, Any] = {**host.short("hub", minutes=120, retries=3), **CACHED}


def opened(body: Callable[..., Any], **inputs: Any) -> Any:
    """Call a stage's body that plans a run; return the plan."""
    current_run.clear()
    with host.flyte_host():
        if evicted := evict_missing():
            say(f"plan: results that were deleted from the disk are made again ({evicted})")
    made = host.run_body(body, **inputs)
    current_run.append(made.run)
    return made


@task(**host.short("hub", **host.DECK_OF_SETTINGS))
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


@task(**host.short())
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


@task(**host.short("hub", minutes=120, **host.DECK_OF_SETTINGS))
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


@task(**DATASET)
def preprocess(run: RunContext, settings: DatasetSettings) -> Dataset:
    """Make validated splits and a tokenizer from a source."""
    made = host.run_body(stages.dataset.preprocess, **locals())
    return Dataset(FlyteDirectory(made.uri), *host.tables(made, *stages.dataset.SPLITS))


@task(**DATASET)
def ingest(run: RunContext, settings: IngestSettings, champion: FlyteDirectory) -> Dataset:
    """Add new problems to the champion's dataset."""
    made = host.run_body(stages.dataset.ingest, **locals())
    return Dataset(FlyteDirectory(made.uri), *host.tables(made, *stages.dataset.SPLITS))


# Not cached: an alias may point to another version tomorrow.
@task(**host.short("hub", minutes=120, retries=3, interruptible=True, **host.DECK))
def fetch(run: RunContext, reference: str, name: str) -> FlyteDirectory:
    """Download a model: models:/NAME@ALIAS, models:/NAME/VERSION, a folder, address or hub id."""
    return host.directory(stages.fetch.fetch, **locals())


@on_profiles(**COMPUTES)
def reward_audit(
    run: RunContext, settings: RewardAuditSettings, dataset: FlyteDirectory
) -> FlyteDirectory:
    """Find out whether the run's scorers can be fooled."""
    return host.directory(stages.reward_audit.reward_audit, **locals())


@on_profiles(**TRAINS)
def sft(run: RunContext, settings: SFTSettings, dataset: FlyteDirectory) -> FlyteDirectory:
    """Fine-tune the start model, unless `sft.skip`."""
    return host.directory(stages.training.sft, **locals())


# Requests are the submitter's; they are copied to no Ray pod that has a template of its own.
@on_profiles(
    **{
        **TRAINS,
        "task_config": ray_cluster,
        "requests": host.SMALL,
        "retries": 5,
        "timeout": timedelta(days=3),
    }
)
def rl(
    run: RunContext,
    settings: RLSettings,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    reward_model: FlyteDirectory | None = None,
) -> FlyteDirectory:
    """Improve the warm start by reinforcement learning on the dataset's prompts."""
    return host.directory(stages.training.rl, **locals())


@on_profiles(**COMPUTES)
def pairs(
    run: RunContext, settings: PairsSettings, dataset: FlyteDirectory, policy: FlyteDirectory
) -> FlyteDirectory:
    """Make the preferences that are learned from, by rollouts of the policy or from files."""
    return host.directory(stages.preferences.pairs, **locals())


@on_profiles(**{**TRAINS, "timeout": timedelta(hours=6)})
def reference_log_probs(
    run: RunContext, settings: PreferenceSettings, pairs: FlyteDirectory, policy: FlyteDirectory
) -> FlyteDirectory:
    """Compute the reference's log-probs; `settings.config` as `reference_settings` gives it."""
    return host.directory(stages.preferences.reference_log_probs, **locals())


@on_profiles(**TRAINS)
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

    One round is the offline pipeline; in several the policy of the round before makes the pairs and
    is the reference. How many there are is known when a run starts: the nodes are written then.
    """
    policy, seed = start, settings.seed
    # A round's pairs don't depend on how many others there are.
    config = pairs_settings.config.model_copy(update={"rounds": 1})
    reference_config = stages.preferences.reference_settings(settings.config)
    reference = settings.model_copy(update={"config": reference_config})
    for number in range(pairs_settings.config.rounds):
        round_settings = {"config": config, "seed": seed + number}
        made = pairs(
            profile,
            run=run,
            settings=pairs_settings.model_copy(update=round_settings),
            dataset=dataset,
            policy=policy,
        )
        log_probs = reference_log_probs(
            profile, run=run, settings=reference, pairs=made, policy=policy
        )
        policy = preference_training(
            profile,
            run=run,
            settings=settings.model_copy(update={"seed": seed + number}),
            pairs=made,
            policy=policy,
            reference=log_probs,
        )
    return policy


@on_profiles(**TRAINS)
def reward_model_training(
    run: RunContext, settings: RewardModelSettings, pairs: FlyteDirectory, policy: FlyteDirectory
) -> FlyteDirectory:
    """Train a reward model that starts from the policy's backbone."""
    return host.directory(stages.preferences.reward_model_training, **locals())


# On the profile's machine, as two reward models score the held-out pairs.
@on_profiles(**PROMOTES)
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


@stages_of(**{k: v for k, v in COMPUTES.items() if k not in host.DECK})
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


@on_profiles(**COMPUTES, made_inside={"parts": parts_of})
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


# On the profile's machine, as it may have to evaluate the champion.
@on_profiles(**PROMOTES)
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


@task(**host.short())
def waits_for_approval(promotion: FlyteDirectory) -> bool:
    """Return whether a promotion lacks only approval: the condition of a workflow branch."""
    return bool(host.run_body(stages.promotion.read_decision, **locals())["waits_for_approval"])


@task(**host.short())
def keep_promotion(promotion: FlyteDirectory) -> FlyteDirectory:
    """Return a promotion as it is, for the workflow branch without approval."""
    return host.directory(lambda promotion: shared(promotion.local()), **locals())


@task(**host.short())
def approval_request(promotion: FlyteDirectory) -> str:
    """Return what a person is asked to approve, as Flyte's console shows it."""
    return host.run_body(stages.promotion.approval_request, **locals())


@task(**host.short(minutes=60, **host.DECK))
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


@task(**host.short(**host.DECK))
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


@task(**host.short(**host.DECK))
def finalize(run: RunContext, artifact: FlyteDirectory) -> FlyteDirectory:
    """Write the artifact's metrics to the MLflow run, end the run, and return the artifact."""
    return host.directory(stages.evaluation.finalize, **locals())


@task(**host.short(**host.DECK))
def finalize_skipped(run: RunContext, reason: str) -> FlyteFile:
    """End a run that had nothing to do: the reason goes to MLflow and into `summary.json`."""
    return host.file(stages.evaluation.finalize_skipped, **locals())


@task(**host.short(minutes=360, **host.DECK))
def review(
    artifact: str, against: str, store: str, verify_content: bool, require_signatures: bool
) -> FlyteFile:
    """Write the page of an artifact's lineage; fail, with the page in the Deck, on tampering."""
    return host.file(stages.evaluation.review, **locals())
