"""The pipelines of `workflows.pipelines` as tasks of Flyte 2 that a person or a trigger starts."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flyte
import flyte.errors
from flyte.io import Dir, File
from flyte.models import ActionPhase
from flyte.notify import Email

from engine import stages as bodies
from engine.console import end_process, say
from engine.stages import pods
from engine.stages.profiles import Profile
from engine.stages.settings import Plan, RetrainingPlan
from engine.stages.stage import Artifact, is_dry_run, record_failure
from workflows.flyte2 import host, stages
from workflows.flyte2.environments import DRIVER, task_on
from workflows.pipelines import APPROVAL_TIMEOUT, APPROVED_BY, Pipeline

MAX_ACTIONS = 8  # of one run at once, as `workflows.launching.MAX_PARALLELISM`
TYPES = {Path: File, Artifact: Dir}
PLANS: dict[str, Any] = {"plan": Plan, "trigger_retraining": RetrainingPlan}


class Front:
    """The stages as a pipeline calls them: a profile, where they have one, then inputs by name."""

    def __getattr__(self, stage: str) -> Callable[..., Any]:
        if stage not in pods.STAGES:
            raise AttributeError(stage)
        return partial(self.call, stage)

    def call(self, stage: str, *profile: Profile, **inputs: Any) -> Any:
        """Run a stage as a task of its own; again where its cached folder was deleted."""
        task = task_on(stages, stage, *profile, cluster=flyte.ctx().is_in_cluster())
        made = task(**inputs)
        if host.is_gone(made):
            say(f"{stage}: its result was deleted from the disk and is made again")
            made = task.override(cache=host.cache(task.cache.salt, overwrite=True))(**inputs)
        return PLANS[stage](*made) if stage in PLANS else made

    def evaluate(self, profile: Profile, **inputs: Any) -> Dir:
        """Compare two models; with `evaluate.map_parts` answered by so many tasks at once."""
        count, parts = inputs["settings"].config.map_parts, None
        if count > 1:
            cluster = flyte.ctx().is_in_cluster()
            given = {name: value for name, value in inputs.items() if name != "audit"}
            part = partial(task_on(stages, "evaluate_part", profile, cluster=cluster), **given)
            parts = list(flyte.map(part, range(count), return_exceptions=False))
        return self.call("evaluate", profile, **inputs, parts=parts)

    def learn_in_rounds(self, **inputs: Any) -> Dir:
        """Make preferences, their reference and an update, `pairs.rounds` times."""
        return bodies.preferences.learn_in_rounds(front=self, **inputs)

    def gate(self, p: Any, dataset: Dir, policy: Dir, evaluation: Dir) -> Dir:
        """Promote; where approval is all that is missing, wait for a person first.

        Approval runs the promotion again, against the champion of that moment. Without an answer
        within a week the run fails, and no alias has moved; a "no" leaves the model as it is.
        """
        inputs = {"run": p.run, "settings": p.promotion, "dataset": dataset, "policy": policy}
        promote = partial(self.promote, p.profile, **inputs, evaluation=evaluation)
        decided = promote(approved_by="")
        request = self.approval_request(promotion=decided) if p.needs_approval else ""
        if not request:
            return decided
        approval = flyte.new_condition("promotion", prompt=request, timeout=APPROVAL_TIMEOUT)
        return promote(approved_by=APPROVED_BY) if approval.wait() else decided

    def in_order(self, earlier: Any, later: Any) -> None:
        """Do nothing: a call returns when its stage has ended."""


FRONT = Front()


def recorded(
    workflow: str, config: host.Settings, plan: Callable[[], Any], run: Callable[[Any], Any]
) -> Any:
    """Plan a run and run it; where it fails, write the cause to its MLflow run and end that."""
    kept: dict[str, Any] = {"execution": host.Flyte2Host().execution, "status": "FAILED"}
    with host.flyte_host():
        settings = config.parse()
    record = partial(record_failure, workflow, settings)
    try:
        p = plan()
        if is_dry_run():
            say("to do     what follows the plan and is not cached; dry run, nothing is computed")
            end_process(0)
        kept["run"] = p.run
        host.on_interrupt.append(partial(record, "interrupted", run=p.run, status="KILLED"))
        return run(p)
    except Exception as error:
        if getattr(error, "code", "") == "PreemptedError":
            kept["status"] = "KILLED"
        record(str(error), **kept)
        # A stage has had its own attempts.
        raise flyte.errors.NonRecoverableError(str(error)) from None
    finally:
        host.on_interrupt.clear()


def task_of(pipeline: Pipeline, module: str, triggers: Sequence[flyte.Trigger] = ()) -> Any:
    """Return the task `<module>.<pipeline>`, whose inputs are those of a plan."""

    def composed(**inputs: Any) -> Any:
        return recorded(pipeline.name, inputs["config"], *pipeline.bind(FRONT, inputs))

    config = host.Settings(f"preset:{pipeline.preset}" if pipeline.preset else "")
    return entry(*triggers)(pipeline.declare(composed, module, config, TYPES))


def entry(*triggers: flyte.Trigger) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function: make it a task that is started, with its docstring as help page."""

    def make(body: Callable[..., Any]) -> Any:
        text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", inspect.getdoc(body) or "", flags=re.MULTILINE)
        docs = flyte.Documentation(text.replace("Args:\n", ""))
        # A pod that is lost starts again, and finds what its stages have made.
        options: dict[str, Any] = {"retries": 2, "report": True, "entrypoint": True, "docs": docs}
        return DRIVER.task(triggers=triggers, **options)(body)

    return make


FAILED = (ActionPhase.FAILED, ActionPhase.ABORTED, ActionPhase.TIMED_OUT)


def trigger(
    name: str, automation: Any = None, *, preset: str = "", ends: bool = False, **inputs: Any
) -> flyte.Trigger:
    """Return a trigger that tells those of HYBRIDFLYTE_NOTIFY of failures, or of all `ends`.

    Without automation it is what flytekit calls a launch plan: inputs by a name. `preset` is that
    of `config`.
    """
    people = (*pods.recipients(slack=False), *pods.recipients(slack=True))
    phases = (*FAILED, ActionPhase.SUCCEEDED) if ends else FAILED
    config = {"config": host.Settings(f"preset:{preset}")} if preset else {}
    return flyte.Trigger(
        name,
        automation,
        inputs=config | inputs,
        max_action_concurrency=MAX_ACTIONS,
        notifications=(Email(on_phase=phases, recipients=people),) if people else None,
        labels={"app": "hybridflyte", "launch-plan": name},
        auto_activate=automation is not None,
    )


FULL: dict[str, Any] = {"path": "openai/gsm8k", "source": "gsm8k", "profile": "8xA100"}
FULL["model"] = "Qwen/Qwen2.5-1.5B-Instruct"


def full(pipeline: Pipeline, preset: str = "full") -> flyte.Trigger:
    """Return the trigger `<pipeline>_full`: GSM8K on eight GPUs, and a message at each end."""
    return trigger(f"{pipeline.name}_full", preset=preset, ends=True, **FULL)
