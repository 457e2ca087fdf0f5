"""From verl's values to ours, where they differ. A converter gets the value and its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError

Convert = Callable[[Any, str], Any]

NEVER = 10**9  # steps: longer than any run


def same(value: Any, key: str) -> Any:
    """As it is."""
    return value


def text(value: Any, key: str) -> str:
    """A name that YAML may have read as a number or a date."""
    return str(value)


def listed(value: Any, key: str) -> list[Any]:
    """One value, or a list of them."""
    return list(value) if isinstance(value, list | tuple) else [value]


def loggers(value: Any, key: str) -> list[Any]:
    """Names of loggers; those that only verl has are refused with the way out."""
    names = listed(value, key)
    foreign = [name for name in names if name not in ("console", "file", "mlflow")]
    if foreign:
        raise ConfigError(
            f"{key}: {', '.join(map(str, foreign))} is not a logger here; choose from console, "
            "file and mlflow"
        )
    return names


def zero_is_off(value: Any, key: str) -> Any:
    """verl switches top-k off with -1, we with 0."""
    return 0 if value == -1 else value


def never_below_one(value: Any, key: str) -> Any:
    """verl's -1 (or 0) steps between two validations: only the first and the last are done."""
    return NEVER if isinstance(value, int) and value < 1 else value


def pair(value: Any, key: str) -> list[Any]:
    """Two numbers, such as AdamW's betas."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return list(value)


def engine_name(value: Any, key: str) -> Any:
    """verl's `hf` decodes with the trainer's own model, as our `native` does."""
    return "native" if value == "hf" else value


def group_metric(value: Any, key: str) -> Any:
    """What verl's DAPO compares in a group; its sequence scores and `acc` are our raw score."""
    return {"acc": "score", "seq_reward": "score", "seq_final_reward": "reward"}.get(value, value)


def bypass(value: Any, key: str) -> str:
    """Whether the log-probs of sampling stand for the trainer's own."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return "rollout" if value else "auto"
