"""Episodes of several turns: what an environment is, its tools, and processes that it runs in."""

from engine.agents.environment_pool import EnvironmentPool, PooledEpisode
from engine.agents.environment_protocol import (
    Action,
    Environment,
    EnvironmentFailure,
    Message,
    Observation,
    ResumableEnvironment,
    ToolCall,
    is_resumable,
    make_environment,
    register_environment,
    tool_schemas,
)

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
