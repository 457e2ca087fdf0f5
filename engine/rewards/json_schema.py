"""Whether a completion is JSON that keeps a JSON schema.

A schema's patterns can take any time on a text, so it runs in a pool's process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine.errors import RewardError
from engine.rewards.registry import register_reward

_FENCE = "```"


def json_text(text: str) -> str:
    """The text in the last fenced block, or all of it."""
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text.strip()
    block = parts[-2] if len(parts) % 2 else parts[-3]
    return block.removeprefix("json").strip()


@register_reward("json_schema", pooled=True, imports=("jsonschema",), answer=json_text)
def json_schema(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    schema: dict[str, object] | None = None,
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0.

    Without `schema`, each row's ground truth is one, as JSON text. `$ref` reaches nothing outside
    of the schema. Raises RewardError for a schema that is none.
    """
    pairs = zip(completions, ground_truth, strict=True)
    return [float(_keeps(text, truth if schema is None else schema)) for text, truth in pairs]


def _keeps(text: str, schema: object) -> bool:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        wanted = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(wanted, Mapping | bool):
            raise ValueError(f"it is of type {type(wanted).__name__}")
        kind = validator_for(wanted)
        kind.check_schema(wanted)
    except (ValueError, SchemaError) as error:
        reason = getattr(error, "message", str(error))
        raise RewardError(
            f"the JSON schema is none ({reason}); correct reward.options.schema or the ground truth"
        ) from None
    try:
        said = json.loads(json_text(text), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    try:
        return bool(kind(wanted, registry=Registry()).is_valid(said))
    except RecursionError:  # deeper than any answer needs to be
        return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
