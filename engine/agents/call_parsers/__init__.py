"""Calls in what a policy wrote, by the format of its chat template: a parser each."""

from engine.agents.call_parsers._base import (
    CallParser,
    ParsedTurn,
    parse_turn,
    parsed_action,
    register_call_parser,
    resolve_call_parser,
)

__all__ = [
    "CallParser",
    "ParsedTurn",
    "parse_turn",
    "parsed_action",
    "register_call_parser",
    "resolve_call_parser",
]
