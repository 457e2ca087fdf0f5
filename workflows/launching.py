"""Makes launch plans by the house's rules, and keeps a registry; see `workflows.launch_plans`."""

from collections.abc import Mapping, Sequence
from typing import Any

import rich_click as click
from flytekit import (
    CronSchedule,
    Email,
    FixedRate,
    Labels,
    LaunchPlan,
    Slack,
    WorkflowExecutionPhase,
)
from flytekit.core.interface import Interface
from flytekit.core.notification import Notification
from flytekit.core.workflow import WorkflowBase
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy

from engine.config import load_config
from engine.errors import ConfigError
from engine.stages import pods
from tasks.inputs import RLHFConfig

MAX_PARALLELISM = 8  # nodes of one execution at once; the longest row of stages side by side is 2
FAILED = (
    WorkflowExecutionPhase.FAILED,
    WorkflowExecutionPhase.ABORTED,
    WorkflowExecutionPhase.TIMED_OUT,
)


class Launch(LaunchPlan):
    """A launch plan that is run locally with its own inputs, where flytekit's has the workflow's.

    Its interface is what is left to choose, with its own defaults. What is registered is the same.
    """

    @property
    def python_interface(self) -> Interface:
        interface = self.workflow.python_interface
        free = {
            name: (kind, self.saved_inputs.get(name, default))
            for name, (kind, default) in interface.inputs_with_defaults.items()
            if name not in self.raw_fixed_inputs
        }
        return Interface(free, interface.outputs, docstring=interface.docstring)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the workflow here; ConfigError for a fixed input, UsageError for a missing one."""
        for name in inputs:
            if name in self.raw_fixed_inputs:
                raise ConfigError(
                    f"launch plan {self.name} fixes {name}={self.raw_fixed_inputs[name]!r}; leave "
                    "it out, or run the workflow itself"
                )
        required = [
            name
            for name, (_, default) in self.python_interface.inputs_with_defaults.items()
            if default is None and name not in inputs
        ]
        if required and not args:
            raise click.UsageError(
                f"launch plan {self.name} needs {', '.join(f'--{name}' for name in required)}"
            )
        return super().__call__(*args, **inputs)


LAUNCH_PLANS: dict[str, Launch] = {}


def launch_plan(
    workflow: WorkflowBase,
    name: str,
    *,
    default_inputs: Mapping[str, object] | None = None,
    fixed_inputs: Mapping[str, object] | None = None,
    schedule: CronSchedule | FixedRate | None = None,
    notify_on: Sequence[int] = FAILED,
    one_at_a_time: bool = False,
) -> Launch:
    """Make a launch plan and note it in `LAUNCH_PLANS`.

    one_at_a_time: skip an execution while another one runs, where a second has nothing to do.
    notify_on: phases that the addresses of HYBRIDFLYTE_NOTIFY are told of.
    """
    launch = Launch.create(
        name,
        workflow,
        default_inputs=dict(default_inputs or {}),
        fixed_inputs=dict(fixed_inputs or {}),
        schedule=schedule,
        notifications=notifications(list(notify_on)),
        labels=Labels({"app": "hybridflyte", "launch-plan": name}),
        max_parallelism=MAX_PARALLELISM,
        concurrency=ConcurrencyPolicy(1, ConcurrencyLimitBehavior.SKIP) if one_at_a_time else None,
    )
    LAUNCH_PLANS[name] = launch
    return launch


def notifications(phases: list[int]) -> list[Notification]:
    """Notify the recipients in HYBRIDFLYTE_NOTIFY; ConfigError for an invalid address."""
    kinds = {Email: pods.recipients(slack=False), Slack: pods.recipients(slack=True)}
    return [kind(phases=phases, recipients_email=to) for kind, to in kinds.items() if to]


def settings(name: str) -> RLHFConfig:
    """Return the settings of a preset."""
    return RLHFConfig.model_validate(load_config(f"preset:{name}").model_dump())
