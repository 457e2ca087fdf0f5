"""Agents on Flyte 2: a policy that acts in an environment or calls tools.

flyte run --local workflows/flyte2/agents.py agents
flyte run --local workflows/flyte2/agents.py agents --config preset:calculator_agent
"""

from workflows import pipelines
from workflows.flyte2 import entry

agents = entry.task_of(
    pipelines.agents,
    __name__,
    [
        entry.trigger(f"agents_{name}", preset=f"{name}_agent", source=source)
        for name, source in (
            ("guessing", "guessing"),
            ("calculator", "products"),
            ("python", "python_tasks"),
        )
    ],
)
