"""Agents: a policy that acts in an environment or calls tools, warm-started, trained, judged.

pyflyte run workflows/agents.py agents
pyflyte run workflows/agents.py agents --config preset:calculator_agent
pyflyte run workflows/agents.py agents --config preset:python_agent
"""

from typing import Any

from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from workflows.launching import settings
from workflows.parts import INPUTS, improve_and_promote, pipeline, warm_start_of


@pipeline(
    failure.agents_failed,
    settings=settings("guessing_agent"),
    source="Data source of rows and demonstrations, guessing, products, python_tasks, files or "
    "your own; empty: as in config.",
    config=f"{INPUTS['config'][0]} The environment is rl.rollout.agent.environment.",
)
def agents(p: Any) -> FlyteFile:
    """Warm-start a model on demonstrations, improve it by RL on episodes, promote it if better.

    Returns:
        The run's summary.json.
    """
    dataset, warm_start = warm_start_of(p)
    return improve_and_promote(p, dataset, warm_start)
