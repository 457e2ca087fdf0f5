"""Tools that a policy calls: Python functions, MCP servers, and those that are shipped."""

from engine.agents.tools.registry import register_tool, resolve_tools
from engine.agents.tools.running import ToolLimits, answer
from engine.agents.tools.tool import Tool, function_tool

__all__ = ["Tool", "ToolLimits", "answer", "function_tool", "register_tool", "resolve_tools"]
