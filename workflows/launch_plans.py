"""The launch plans. Each runs here as it would on a cluster, with its own inputs:

pyflyte run workflows/launch_plans.py rlhf_smoke
pyflyte run --remote workflows/launch_plans.py rlhf_full --model Qwen/Qwen2.5-7B-Instruct
"""

from typing import Any

from flytekit import CronSchedule, WorkflowExecutionPhase

from workflows.agents import agents
from workflows.evaluate_only import evaluate_only as evaluate_only_workflow
from workflows.launching import FAILED, Launch, launch_plan, settings
from workflows.preference import classic_rlhf, preference, reward_model
from workflows.promote_only import promote_only
from workflows.retraining import retraining
from workflows.rlhf import rlhf
from workflows.rollback import rollback as rollback_workflow

TERMINAL_PHASES = (*FAILED, WorkflowExecutionPhase.SUCCEEDED)
FULL = {"config": settings("full"), "path": "openai/gsm8k", "model": "Qwen/Qwen2.5-1.5B-Instruct"}


def full(workflow: Any, **inputs: Any) -> Launch:
    """Make the launch plan `<workflow>_full`: GSM8K on eight GPUs, and a message at each end."""
    return launch_plan(
        workflow,
        f"{workflow.name.rpartition('.')[2]}_full",
        default_inputs={**FULL, **inputs, "profile": "8xA100"},
        fixed_inputs={"source": "gsm8k"},
        notify_on=TERMINAL_PHASES,
    )


def agents_launch(name: str, config: str, source: str) -> Launch:
    """Make a launch plan of `agents` on one data source."""
    return launch_plan(
        agents,
        name,
        default_inputs={"config": settings(config)},
        fixed_inputs={"source": source, "path": ""},
    )


rlhf_smoke = launch_plan(
    rlhf,
    "rlhf_smoke",
    default_inputs={"config": settings("smoke"), "seed": 0},
    fixed_inputs={"source": "arithmetic", "path": "", "model": "", "profile": "laptop"},
)
rlhf_full = full(rlhf)
preference_full = full(preference)
reward_model_full = full(reward_model)
classic_rlhf_full = full(classic_rlhf, config=settings("classic_rlhf_full"))
agents_guessing = agents_launch("agents_guessing", "guessing_agent", "guessing")
agents_calculator = agents_launch("agents_calculator", "calculator_agent", "products")
agents_python = agents_launch("agents_python", "python_agent", "python_tasks")

# The problems of rlhf_full: the same settings give the same dataset.
evaluate_only = launch_plan(
    evaluate_only_workflow,
    "evaluate_only",
    default_inputs={**FULL, "source": "gsm8k", "baseline": FULL["model"], "profile": "one-gpu"},
)

promote = launch_plan(
    promote_only,
    "promote",
    default_inputs={"config": settings("full"), "profile": "one-gpu"},
    notify_on=TERMINAL_PHASES,
    one_at_a_time=True,
)

# At 2 in the morning, UTC. Files written until then belong to this run.
nightly_retraining = launch_plan(
    retraining,
    "nightly_retraining",
    default_inputs={"config": settings("nightly"), "profile": "8xA100"},
    schedule=CronSchedule(schedule="0 2 * * *", kickoff_time_input_arg="kickoff"),
    notify_on=TERMINAL_PHASES,
    one_at_a_time=True,
)

rollback = launch_plan(rollback_workflow, "rollback", notify_on=TERMINAL_PHASES)
