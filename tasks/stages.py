"""All Flyte tasks that open runs, make artifacts and end runs: thin wrappers of `engine.stages`.

Where a task runs and what is retried and cached is in `engine.stages.pods`, by its name. Its body,
whose inputs it has, is the function of that name in `engine.stages`.
"""

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from flytekit import StructuredDataset, map_task, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from engine import stages
from engine.console import say
from engine.data.contract import EVALUATION_ROWS
from engine.stages import interfaces, pods
from engine.stages.profiles import Profile
from engine.stages.stage import Artifact, shared
from tasks import host
from tasks.failure import current_run
from tasks.flytekit_setup import evict_missing
from tasks.inputs import RLHFConfig
from tasks.variants import MadeInside, dynamic_task, on_profiles, stages_of

TYPES = {"Artifact": FlyteDirectory, "Path": FlyteFile, "PipelineConfig": RLHFConfig}
CALLS: Mapping[Any, Callable[..., Any]] = {FlyteDirectory: host.directory, FlyteFile: host.file}


def function_of(
    body: str, call: Callable[..., Any] | None = None, gives: object = None, **inputs: object
) -> Callable[..., Any]:
    """Return the function of a stage's task; `body` is `module.function` of `engine.stages`.

    call: calls the body and makes outputs of its result, by default by their type. gives, inputs:
    types of the output and of inputs that flytekit has in the place of the body's.
    """
    signature = interfaces.signature_of(body, TYPES, gives, **inputs)
    call = call or CALLS.get(signature.return_annotation, host.run_body)
    return interfaces.function_of(body, call, __name__, signature)


def task_of(
    body: str,
    call: Callable[..., Any] | None = None,
    gives: object = None,
    made_inside: Mapping[str, MadeInside] | None = None,
    **inputs: object,
) -> Any:
    """Return a stage's task; see `function_of`, and `on_profiles` for `made_inside`."""
    function = function_of(body, call, gives, **inputs)
    if pods.STAGES[function.__name__].on_profile:
        return on_profiles(function, made_inside or {})
    return task(function, **host.task_options(function.__name__))


def opened(body: Callable[..., Any], **inputs: object) -> Any:
    """Call a stage's body that plans a run; return the plan."""
    current_run.clear()
    with host.flyte_host():
        if evicted := evict_missing():
            say(f"plan: results that were deleted from the disk are made again ({evicted})")
    made = host.run_body(body, **inputs)
    current_run.append(made.run)
    return made


plan = task_of("plan.plan", opened)
plan_promotion = task_of("plan.plan_promotion", opened)
trigger_retraining = task_of("dataset.trigger_retraining", opened)


class Dataset(NamedTuple):
    """The artifact, which stages read, and its splits, which people look at in Flyte's console."""

    dataset: FlyteDirectory
    sft_train: host.SFTPairs
    sft_validation: host.SFTPairs
    train: host.RLPrompts
    validation: host.RLPrompts
    test: host.RLPrompts


def dataset_of(body: Callable[..., Artifact], **inputs: object) -> Dataset:
    """Call a stage's body that makes a dataset."""
    made = host.run_body(body, **inputs)
    return Dataset(FlyteDirectory(made.uri), *host.tables(made, *stages.dataset.SPLITS))


preprocess = task_of("dataset.preprocess", dataset_of, Dataset)
ingest = task_of("dataset.ingest", dataset_of, Dataset)
fetch = task_of("fetch.fetch")
reward_audit = task_of("reward_audit.reward_audit")
sft = task_of("training.sft")
rl = task_of("training.rl")
pairs = task_of("preferences.pairs")
reference_log_probs = task_of("preferences.reference_log_probs")
preference_training = task_of("preferences.preference_training")
reward_model_training = task_of("preferences.reward_model_training")
reward_model_promotion = task_of("promotion.reward_model_promotion")


def by_these_tasks(body: Callable[..., Any], **inputs: object) -> Any:
    """Call a body that composes a front's tasks; how many is known when a run starts."""
    return body(front=sys.modules[__name__], **inputs)


# The timeout holds for all stages of all rounds.
learn_in_rounds = dynamic_task(
    function_of("preferences.learn_in_rounds", by_these_tasks), timedelta(days=18)
)


# Evaluation. With `evaluate.map_parts` the dynamic task `evaluate` runs `evaluate_part` so many
# times, each in a pod of the profile, and its stage reads their tables instead of decoding.


class Evaluation(NamedTuple):
    """The artifact, which the gate reads, and its tables, which people look at in the console."""

    evaluation: FlyteDirectory
    rows_warm_start: host.EvaluationRows
    rows_rl: host.EvaluationRows


def table_of(body: Callable[..., Any], **inputs: object) -> StructuredDataset:
    """Call a stage's body that makes a table of no artifact."""
    return host.as_table(host.TableFile.write(host.run_body(body, **inputs)))


evaluate_part = stages_of(function_of("evaluation.evaluate_part", table_of, host.EvaluationRows))


def parts_of(profile: Profile, inputs: Mapping[str, Any]) -> Any:
    """Make the parts' tables by a map task; None without parts."""
    parts = inputs["settings"].config.map_parts
    if parts == 1:
        return None
    given = {name: value for name, value in inputs.items() if name != "audit"}
    return map_task(partial(evaluate_part(profile), **given))(part=list(range(parts)))


def evaluation_of(
    body: Callable[..., Artifact], parts: list[StructuredDataset] | None = None, **inputs: object
) -> Evaluation:
    """Call the stage's body that compares two models; `parts`: what a map task has decoded."""
    tables = (
        table.open(host.TableFile).all().read(EVALUATION_ROWS, f"part {number} of the evaluation")
        for number, table in enumerate(parts or (), 1)
    )
    made = host.run_body(body, parts=tables if parts else None, **inputs)
    names = (f"rows_{name}" for name in stages.evaluation.MODELS)
    return Evaluation(FlyteDirectory(made.uri), *host.tables(made, *names))


evaluate = task_of(
    "evaluation.evaluate",
    evaluation_of,
    Evaluation,
    made_inside={"parts": parts_of},
    parts=list[StructuredDataset] | None,
)

promote = task_of("promotion.promote")
waits_for_approval = task_of("promotion.waits_for_approval")
approval_request = task_of("promotion.approval_request")
rollback = task_of("promotion.rollback")


@task(**host.task_options("keep_promotion"))
def keep_promotion(promotion: FlyteDirectory) -> FlyteDirectory:
    """Return a promotion as it is, for the workflow branch without approval."""
    return host.directory(lambda promotion: shared(promotion.local()), **locals())


report = task_of("evaluation.report")
finalize = task_of("evaluation.finalize")
finalize_skipped = task_of("evaluation.finalize_skipped")
review = task_of("evaluation.review")
