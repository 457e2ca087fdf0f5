"""Episodes of several turns: environments, tools, and transcripts as exact token ids.

Read `environment_protocol` first: what an environment is. `agent_loop` plays episodes (`episode`)
on a rollout's stream; `environment_pool` runs environments in processes of their own. Shipped
`environments` are here, and `tools` and `builtin_tools`, which a policy calls.
"""
# ruff: noqa: F401  # what other rooms import

from engine.agents.environment_pool import EnvironmentPool
from engine.agents.environment_protocol import (
    Action,
    Environment,
    EnvironmentFailure,
    Message,
    Observation,
    ResumableEnvironment,
    ToolCall,
    make_environment,
    register_environment,
    tool_schemas,
)
