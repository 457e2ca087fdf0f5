"""Agents: a policy that acts in an environment or calls tools, warm-started, trained, judged.

pyflyte run workflows/agents.py agents
pyflyte run workflows/agents.py agents --config preset:calculator_agent
pyflyte run workflows/agents.py agents --config preset:python_agent
"""

from tasks import failure  # by module: pyflyte can't list a handler's error input
from workflows import pipelines
from workflows.parts import workflow_of

agents = workflow_of(pipelines.agents, __name__, failure.agents_failed)
