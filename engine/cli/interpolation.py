"""`${…}` in files of settings, as in OmegaConf: another key's value, or an environment variable.

`${a.b}` and `${.b}` (beside the key) are other keys, `${oc.select:a.b,default}` one that may be
missing, `${oc.env:NAME,default}` a variable. Others stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import yaml

_ONE = re.compile(r"\$\{([^${}]+)\}")
_DEPTH = 20  # of references to references


def resolved_values(values: Mapping[str, object]) -> dict[str, object]:
    """The values by dotted key, with what they refer to; a reference that leads nowhere stays.

    `???`, OmegaConf's mark for a value that is still missing, is none.
    """
    values = {key: None if value == "???" else value for key, value in values.items()}
    return {key: _value(value, key, values, _DEPTH) for key, value in values.items()}


def _value(value: object, key: str, values: Mapping[str, object], depth: int) -> object:
    if not isinstance(value, str) or "${" not in value or depth == 0:
        return value
    whole = _ONE.fullmatch(value)
    if whole:
        found, there = _looked_up(whole[1].strip(), key, values, depth)
        return found if there else value

    def text(match: re.Match[str]) -> str:
        found, there = _looked_up(match[1].strip(), key, values, depth)
        return str(found) if there else match[0]

    replaced = _ONE.sub(text, value)
    return replaced if replaced == value else _value(replaced, key, values, depth - 1)


def _looked_up(
    reference: str, key: str, values: Mapping[str, object], depth: int
) -> tuple[object, bool]:
    """What a reference stands for, and whether there is such a thing."""
    kind, colon, rest = reference.partition(":")
    if not colon:
        path = _absolute(reference, key)
        if path in values:
            return _value(values[path], path, values, depth - 1), True
        return None, False
    name, comma, default = (part.strip() for part in rest.partition(","))
    if kind == "oc.env" and name in os.environ:
        return os.environ[name], True
    if kind == "oc.select":
        found, there = _looked_up(name, key, values, depth)
        if there:
            return found, True
    if kind in ("oc.env", "oc.select") and comma:
        return yaml.safe_load(default), True
    return None, kind == "oc.select"  # without a default it is null


def _absolute(reference: str, key: str) -> str:
    """The dotted key of a reference: each dot before it after the first goes up one section."""
    name = reference.lstrip(".")
    up = len(reference) - len(name)
    if not up:
        return name
    sections = key.split(".")[:-up]
    return ".".join([*sections, name])
