"""What MLflow accepts: flat parameters, bounded texts, and a small alphabet in names.

Credentials are left out of what it is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from engine.redaction import redact_values

MAX_KEY = 250  # characters; the limits are those of MLflow 3's own validation
MAX_PARAMETER = 6000
MAX_TAG = 8000


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as dotted keys; lists and tuples stay one value.

    >>> flatten({"rl": {"actor": {"lr": 0.1}}, "betas": (0.9, 0.95)})
    {'rl.actor.lr': 0.1, 'betas': (0.9, 0.95)}
    """
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def parameters(values: Mapping[str, object], by_section: bool = False) -> dict[str, str]:
    """Return nested settings as MLflow parameters, texts cut to the limit.

    One a setting, with dotted names, or one a section, as JSON.
    """
    values = redact_values(values)
    flat = _as_json(values) if by_section else flatten(values)
    return {name(k): shorten(_text(v), MAX_PARAMETER) for k, v in flat.items()}


def tags(values: Mapping[str, object]) -> dict[str, str]:
    """Return texts that MLflow takes as tags."""
    return {name(k): shorten(_text(v), MAX_TAG) for k, v in redact_values(values).items()}


def name(text: str) -> str:
    """Return `text` in MLflow's alphabet for names: `pass@1` becomes `pass_at_1`."""
    return re.sub(r"[^\w\-./ ]", "_", text.replace("@", "_at_"), flags=re.ASCII)[:MAX_KEY]


def shorten(text: str, limit: int) -> str:
    """Cut `text` to `limit` characters, the last of them an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _as_json(values: Mapping[str, object]) -> dict[str, object]:
    return {
        k: json.dumps(v, default=str) if isinstance(v, Mapping) else v for k, v in values.items()
    }


def _text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
