"""Values of verl's keys as ours: other units, other words, other ways to say "off"."""

from __future__ import annotations

import os
from collections.abc import Callable

from engine.errors import ConfigError

Convert = Callable[[object, str], object]  # the value, and its key for messages

NEVER = 10**9  # steps: longer than any run


def same(value: object, key: str) -> object:
    """As it is."""
    return value


def text(value: object, key: str) -> str:
    """A name that YAML may have read as a number or a date."""
    return str(value)


def path(value: object, key: str) -> str:
    """A path or name; the shell leaves a ~ that stands after a = as it is."""
    return os.path.expanduser(str(value))


def paths(value: object, key: str) -> list[object]:
    """One path, or a list of them."""
    return [path(one, key) if isinstance(one, str) else one for one in listed(value, key)]


def listed(value: object, key: str) -> list[object]:
    """One value, or a list of them."""
    return list(value) if isinstance(value, list | tuple) else [value]


_LOGGERS = ("console", "file", "jsonl", "mlflow", "tensorboard", "wandb")


def loggers(value: object, key: str) -> list[object]:
    """Names of loggers; those that only verl has are rejected with the way out."""
    names = listed(value, key)
    foreign = [name for name in names if name not in _LOGGERS]
    if foreign:
        raise ConfigError(
            f"{key}: {', '.join(map(str, foreign))} is not a logger here; choose from "
            f"{', '.join(_LOGGERS)}"
        )
    return names


def zero_is_off(value: object, key: str) -> object:
    """verl switches top-k off with -1, we with 0."""
    return 0 if value == -1 else value


def negative_is_none(value: object, key: str) -> object:
    """verl's -1 leaves a setting to its default."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value < 0 else value


def zero_is_none(value: object, key: str) -> object:
    """verl's temperature of 0 goes with do_sample=False, which decodes greedily by itself."""
    return None if value == 0 else value


def device(value: object, key: str) -> object:
    """Processors of other vendors are rejected."""
    if value not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"{key}={value!r} is not available here; choose cuda, cpu or auto")
    return value


def never_below_one(value: object, key: str) -> object:
    """verl's -1 (or 0) steps between two validations: only the first and the last are done."""
    return NEVER if isinstance(value, int) and value < 1 else value


def pair(value: object, key: str) -> list[object]:
    """Two numbers, such as AdamW's betas."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return list(value)


def optimizer(value: object, key: str) -> object:
    """torch's names; Megatron's own Adam is AdamW."""
    return {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD"}.get(str(value), value)


def zero_alone(value: object, key: str) -> object:
    """Megatron's least learning rate; other ones are given as a share of the peak."""
    if value != 0:
        raise ConfigError(f"{key}={value!r} is not available here: set min_lr_ratio, over lr")
    return value


def size_or_auto(value: object, key: str) -> list[object]:
    """A number of ranks, or `auto`, with which the planner chooses it."""
    return [None, "auto"] if value == "auto" else [value, None]


def engine_name(value: object, key: str) -> object:
    """verl's `hf` decodes with the trainer's own model, as our `native` does."""
    return "native" if value == "hf" else value


def sleep_level(value: object, key: str) -> int:
    """verl frees the KV cache and the weights, which the next update loads again."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return 2 if value else 0


def group_metric(value: object, key: str) -> object:
    """What verl's DAPO compares in a group; its sequence scores and `acc` are our raw score."""
    ours = {"acc": "score", "seq_reward": "score", "seq_final_reward": "reward"}
    return ours.get(value, value) if isinstance(value, str) else value


def bypass(value: object, key: str) -> str:
    """Whether the log-probs of sampling stand for the trainer's own."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return "rollout" if value else "auto"
