"""The registry of dataflows, and which one an advantage estimator runs on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.algorithms import advantages
from engine.errors import ConfigError

Metrics = dict[str, float]
Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A step of an algorithm and the roles that it calls."""

    name: str
    step: Step  # step(roles, prompts, algo) -> StepResult
    roles: frozenset[str]


_DATAFLOWS: dict[str, Dataflow] = {}


def register_dataflow(name: str, roles: set[str]) -> Callable[[Step], Step]:
    """Make `step(roles, prompts, algo)` selectable by name; `roles` are those it calls."""

    def add(step: Step) -> Step:
        _DATAFLOWS[name] = Dataflow(name, step, frozenset(roles))
        return step

    return add


def choose_dataflow(adv_estimator: str) -> Dataflow:
    """The dataflow of an estimator: its own if one has its name, PPO's if it needs values."""
    package = importlib.import_module("engine.dataflows")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"engine.dataflows.{module.name}")
    if adv_estimator in _DATAFLOWS:
        return _DATAFLOWS[adv_estimator]
    needs = advantages.requires(adv_estimator) - {"values", "old_log_probs"}
    if needs:
        raise ConfigError(
            f"algorithm.adv_estimator={adv_estimator} needs {sorted(needs)}, which no dataflow "
            f"here provides; choose one of {sorted(_DATAFLOWS)}, or register a dataflow for it"
        )
    return _DATAFLOWS["ppo" if "values" in advantages.requires(adv_estimator) else "grpo"]
