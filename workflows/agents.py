"""Agents: a policy that acts in an environment or calls tools, warm-started, trained, judged.

    pyflyte run workflows/agents.py agents
    pyflyte run workflows/agents.py agents --config preset:calculator_agent
    pyflyte run workflows/agents.py agents --config preset:python_agent

Composition only: what a stage does is in `engine/stages/`; environments are in docs/agents.md.
"""

from flytekit import workflow
from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import plan
from workflows.launching import settings
from workflows.parts import improve_and_promote, warm_start_of


@workflow(on_failure=failure.agents_failed)
def agents(
    config: RLHFConfig = settings("guessing_agent"),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteFile:
    """Warm-start a model on demonstrations, improve it by RL on episodes, promote it if better.

    Args:
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text. The environment is
            rl.rollout.agent.environment.
        source: Data source of rows and demonstrations, guessing, products, python_tasks, files or
            your own; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the data; empty: as in config.
        model: Hugging Face model folder to start from; empty: as in config.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = plan(
        config=config,
        source=source,
        path=path,
        model=model,
        seed=seed,
        profile=profile,
        workflow="agents",
    )
    dataset, warm_start = warm_start_of(p)
    return improve_and_promote(p, dataset, warm_start)
