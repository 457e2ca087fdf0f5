"""Chat messages: the one place that lists their fields.

A message of a data file has a role, its text, and what `FIELDS` names: all of it is rendered, or
the row is refused. In canonical form `content` is text, arguments of calls are JSON text, and no
field is None.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.data.cells import brief, is_missing, plain
from engine.errors import DataError

FIELDS: dict[str, tuple[str, ...]] = {  # by field, the roles whose messages may have it; (): all
    "content": (),  # text, or parts {"type": "text", "text": …}; none beside tool_calls
    "name": (),  # of a tool or a speaker; a template may leave it out
    "tool_call_id": ("tool",),  # the call that is answered; a template may leave it out
    "tool_calls": ("assistant",),  # [{"type": "function", "function": {"name", "arguments"}}]
    "reasoning_content": ("assistant",),  # its thought, before the content
    "weight": ("assistant",),  # 0: fine-tuning doesn't learn this turn; 1: it does
}
_ALIASES = {"reasoning": "reasoning_content", "thinking": "reasoning_content"}
_TEXTS = ("name", "tool_call_id", "reasoning_content")


def canonical_messages(cell: object, where: str) -> list[dict[str, object]]:
    """Messages in canonical form; DataError that begins with `where` for what none of them has."""
    if not isinstance(cell, list | tuple | np.ndarray):
        raise DataError(f"{where}: {brief(cell)} is no list of messages")
    return [canonical_message(message, where) for message in cell]


def canonical_message(message: object, where: str) -> dict[str, object]:
    """One message in canonical form; see `canonical_messages`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(
            f'{where}: {brief(message)} is no message; give {{"role": "user", "content": …}}'
        )
    role, fields = str(message["role"]), dict[str, Any]()
    for name, value in message.items():
        if name != "role" and not is_missing(value):
            fields[_ALIASES.get(str(name), str(name))] = value
    for name, value in fields.items():
        roles = FIELDS.get(name)
        if roles is None or (roles and role not in roles):
            known = ", ".join(f for f, roles in FIELDS.items() if not roles or role in roles)
            raise DataError(
                f"{where}: a message of the role {role!r} has the field {name!r}, {brief(value)}, "
                f"and would be put into tokens without it; its fields are {known}: remove it"
            )
        if name in _TEXTS and not isinstance(value, str):
            raise DataError(f"{where}: {name} of a message is {brief(value)}; give text")
    calls = _calls(fields.pop("tool_calls", ()), where)
    content = _text(fields.pop("content", "" if calls else None), role, where)
    if (weight := fields.get("weight", 1)) not in (0, 1):
        raise DataError(f"{where}: weight of a message is {brief(weight)}; give 0 or 1")
    if not fields.get("reasoning_content", "-").strip():
        del fields["reasoning_content"]
    return {"role": role, "content": content, **fields} | ({"tool_calls": calls} if calls else {})


def _text(content: object, role: str, where: str) -> str:
    """A message's content as one text."""
    if isinstance(content, list | tuple | np.ndarray):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where}: a message of the role {role!r} has a part of type {kind!r}; only "
                    'text is learned from: give {"type": "text", "text": …}'
                )
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(
            f"{where}: the content of a message of the role {role!r} is {brief(content)}; give "
            "text, a list of text parts, or null with tool_calls"
        )
    return content


def _calls(cell: object, where: str) -> list[dict[str, object]]:
    """Calls of tools in OpenAI's form."""
    if not isinstance(cell, list | tuple | np.ndarray):
        raise DataError(f"{where}: tool_calls is {brief(cell)}; give a list")
    calls = []
    for call in cell:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise DataError(
                f"{where}: {brief(call)} is no call of a tool; give "
                '{"type": "function", "function": {"name": …, "arguments": …}}'
            )
        arguments = _arguments(function.get("arguments"), where)
        calls.append(_call(call.get("id"), {"name": name, "arguments": arguments}))
    return calls


def _call(call_id: object, function: dict[str, object]) -> dict[str, object]:
    """A call of a tool in OpenAI's form."""
    call = {} if is_missing(call_id) else {"id": str(call_id)}
    return call | {"type": "function", "function": function}


def _as_json(value: object) -> str:
    return json.dumps(value, default=plain, ensure_ascii=False)


def _arguments(value: object, where: str) -> str:
    """A call's arguments as JSON text; as an object without what is None."""
    if is_missing(value) or (isinstance(value, str) and not value):
        return "{}"
    if isinstance(value, Mapping):
        return _as_json({key: entry for key, entry in value.items() if not is_missing(entry)})
    try:
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise DataError(
        f"{where}: the arguments of a tool's call are {brief(value)}; give an object, or one as "
        "JSON text"
    )


def for_template(message: Mapping[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """A message as chat templates read it: arguments are an object, or `as_text` JSON text."""
    fields = {k: v for k, v in message.items() if v is not None and k != "weight"}
    calls = list[dict[str, Any]]()
    for call in fields.pop("tool_calls", ()):
        function = dict(call.get("function", call))
        arguments: Any = function.get("arguments") or {}
        if as_text != isinstance(arguments, str):
            arguments = _as_json(arguments) if as_text else json.loads(arguments)
        calls.append(_call(call.get("id"), {**function, "arguments": arguments}))
    return fields | ({"tool_calls": calls} if calls else {})


def row_tools(cell: object, where: str) -> list[dict[str, object]]:
    """The JSON schemas in a row's column `tools`, a list or JSON text; empty where it has none."""
    try:
        tools = json.loads(cell) if isinstance(cell, str) and cell.strip() else cell
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: column 'tools' is no JSON ({error})") from None
    if is_missing(tools) or (isinstance(tools, Sequence | np.ndarray) and not len(tools)):
        return []
    each = tools if isinstance(tools, list | tuple | np.ndarray) else [tools]
    return canonical_tools(map(_without_none, each), f"{where}: column 'tools'")


def canonical_tools(tools: Iterable[object], where: str) -> list[dict[str, object]]:
    """JSON schemas of functions as templates read them; DataError for what is none."""
    schemas = []
    for tool in tools:
        schema: Any = dict(tool) if isinstance(tool, Mapping) else tool
        if isinstance(schema, dict) and "function" not in schema and "name" in schema:
            schema = {"type": "function", "function": schema}
        function = schema.get("function") if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where} has {brief(tool)}; give JSON schemas of functions, "
                '{"type": "function", "function": {"name": …, "parameters": …}}'
            )
        schemas.append(schema)
    return schemas


def _without_none(value: object) -> Any:
    """A JSON schema without the fields that are None, which are other schemas' in Parquet."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [_without_none(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value
