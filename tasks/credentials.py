"""Credentials of pods, by Flyte's secrets: which are asked for, and where a task finds them.

    HYBRIDFLYTE_SECRETS="MLFLOW_TRACKING_TOKEN=hybridflyte/mlflow,HF_TOKEN=hybridflyte/hub"

Variable, then group and key of the secret. They are part of a task's template, so the setting is
read when tasks are registered (`python -m workflows.register --secret …`). On a laptop variables
are what they are, and without the setting nothing changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flytekit import Secret, current_context

from engine.errors import ConfigError
from tasks.images import VARIABLES

VARIABLE = "HYBRIDFLYTE_SECRETS"
Need = Literal["hub", "loggers"]

# Variables that only tasks with that need get; all others are every task's.
_OF: Mapping[Need, re.Pattern[str]] = {
    "hub": re.compile(r"HF_|HUGGING_?FACE_"),
    "loggers": re.compile(r"WANDB_"),
}
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ENTRY = re.compile(rf"([A-Z_][A-Z0-9_]*)=({_WORD})/({_WORD})")


class SecretName(NamedTuple):
    """A secret of Flyte's: on Kubernetes a Secret's name, and a key in it."""

    group: str
    key: str


def read_secrets(text: str) -> dict[str, SecretName]:
    """The secrets by variable; ConfigError for what is none."""
    found: dict[str, SecretName] = {}
    for entry in (part.strip() for part in text.split(",") if part.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"{VARIABLE}: {entry!r} is no VARIABLE=GROUP/KEY; give the variable and the "
                "secret's name, never its value, such as HF_TOKEN=hybridflyte/hub"
            )
        variable, group, key = match.groups()
        if variable in found:
            raise ConfigError(f"{VARIABLE} names {variable} twice; leave one out")
        found[variable] = SecretName(group, key)
    return found


def with_secrets(*needs: Need) -> dict[str, Any]:
    """Options of a task: the secrets that it asks for, and what its pod must know to read them."""
    text = os.environ.get(VARIABLE, "")
    asked = {name: one for name, one in read_secrets(text).items() if _is_for(name, needs)}
    if not asked:
        return {}
    requests = [
        # Flyte sets the variable itself where it is new enough; else `load_secrets` does.
        Secret(
            group=one.group,
            key=one.key,
            mount_requirement=Secret.MountType.ENV_VAR,
            env_var=name,
        )
        for name, one in asked.items()
    ]
    names = ",".join(f"{name}={one.group}/{one.key}" for name, one in asked.items())
    return {"secret_requests": requests, "environment": {VARIABLE: names}}


def of_registration() -> dict[str, str]:
    """Variables of a pod that writes templates of tasks: what those read while they are loaded."""
    return {v: os.environ[v] for v in (*VARIABLES.values(), VARIABLE) if v in os.environ}


def _is_for(variable: str, needs: tuple[Need, ...]) -> bool:
    return all(need in needs or not rule.match(variable) for need, rule in _OF.items())


def load_secrets() -> None:
    """In a pod: set the variables of the task's secrets that are not set; ConfigError without."""
    for variable, name in read_secrets(os.environ.get(VARIABLE, "")).items():
        if variable in os.environ:
            continue
        try:
            os.environ[variable] = current_context().secrets.get(name.group, name.key)
        except ValueError:
            raise ConfigError(
                f"the secret {name.group}/{name.key} for {variable} is not in this pod; create it "
                "in the project's namespace, or register without it"
            ) from None
