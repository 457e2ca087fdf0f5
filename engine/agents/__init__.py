"""Episodes of several turns: what an environment is, its tools, and processes that it runs in."""

from engine.agents.failures import EnvironmentFailure
from engine.agents.pool import EnvironmentPool, PooledEpisode
from engine.agents.protocol import (
    Action,
    Environment,
    Message,
    Observation,
    ResumableEnvironment,
    ToolCall,
    is_resumable,
    tool_schemas,
)
from engine.agents.registry import make_environment, register_environment

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFailure",
    "EnvironmentPool",
    "Message",
    "Observation",
    "PooledEpisode",
    "ResumableEnvironment",
    "ToolCall",
    "is_resumable",
    "make_environment",
    "register_environment",
    "tool_schemas",
]
