"""The registry of dataflows, and which one a configuration runs on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine.algorithms import advantages
from engine.config import AlgorithmConfig, RLConfig
from engine.errors import ConfigError

Step = Callable[..., Any]

# What an estimator may need that any dataflow provides: log-probs come with rollout and actor,
# components with the reward.
_EVERYWHERE = frozenset({"old_log_probs", "sum_pi_squared", "reward_components"})


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A step of an algorithm and the roles that it calls."""

    name: str
    step: Step  # step(roles, prompts, algo) -> StepResult
    roles: frozenset[str]  # always called, e.g. {"actor", "rollout", "reward"}
    optional: frozenset[str]  # called where the settings need it, e.g. {"reference"}
    provides: frozenset[str]  # inputs of advantage estimators, e.g. {"values"}
    uses_advantages: bool  # False: learns from something else
    uses_reference: Callable[[RLConfig], bool] | None  # None: where a KL term is on
    refills: bool  # does dynamic sampling
    pairs: bool  # the actor learns from two completions of a prompt, not from all

    def rows_an_update(self, config: RLConfig) -> int:
        """Completions that one update of the actor learns from, at most."""
        return config.trainer.train_batch_size * (2 if self.pairs else config.rollout.n)


_DATAFLOWS: dict[str, Dataflow] = {}


def register_dataflow(
    name: str,
    roles: Iterable[str],
    *,
    optional: Iterable[str] = (),
    provides: Iterable[str] = (),
    uses_advantages: bool = True,
    uses_reference: Callable[[RLConfig], bool] | None = None,
    refills: bool = False,
    pairs: bool = False,
) -> Callable[[Step], Step]:
    """Make `step(roles, prompts, algo)` selectable as `algorithm.dataflow=<name>`.

    `roles` are those it calls, `optional` those it calls where `algo.needs` says so; `provides`
    the estimators' inputs that it makes beyond those that all dataflows have. A name can be taken
    once.
    """

    def add(step: Step) -> Step:
        present = _DATAFLOWS.get(name)
        if present is not None and _origin(present.step) != _origin(step):
            raise ConfigError(
                f"dataflow {name!r} is already registered by {_origin(present.step)}; choose "
                f"another name for {_origin(step)}"
            )
        _DATAFLOWS[name] = Dataflow(
            name,
            step,
            frozenset(roles),
            frozenset(optional),
            frozenset(provides),
            uses_advantages,
            uses_reference,
            refills,
            pairs,
        )
        return step

    return add


def choose_dataflow(config: AlgorithmConfig) -> Dataflow:
    """The dataflow that `algorithm.dataflow` names, or the one its estimator runs on.

    Raises ConfigError for an unknown name, and where the estimator needs what the dataflow
    doesn't provide.
    """
    package = importlib.import_module("engine.dataflows")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"engine.dataflows.{module.name}")
    needed = advantages.requires(config.adv_estimator) - _EVERYWHERE
    name = _by_estimator(config, needed) if config.dataflow == "auto" else config.dataflow
    dataflow = _by_path(name) if ":" in name else _by_name(name)
    missing = needed - dataflow.provides
    if missing and dataflow.uses_advantages:
        need = "; ".join(f"{field}: {advantages.REQUIREMENTS[field]}" for field in sorted(missing))
        raise ConfigError(
            f"algorithm.adv_estimator={config.adv_estimator} needs what dataflow "
            f"{dataflow.name!r} doesn't provide ({need}); set algorithm.dataflow=auto"
        )
    return dataflow


def _by_estimator(config: AlgorithmConfig, needed: frozenset[str]) -> str:
    if config.filter_groups.enable:
        return "dapo"
    if config.adv_estimator in _DATAFLOWS:
        return config.adv_estimator
    if not needed:
        return "grpo"
    able = [name for name, dataflow in _DATAFLOWS.items() if needed <= dataflow.provides]
    if not able:
        raise ConfigError(
            f"algorithm.adv_estimator={config.adv_estimator} needs {sorted(needed)}, which no "
            f"dataflow here provides; choose one of {sorted(_DATAFLOWS)}, or register one"
        )
    return able[0]


def _by_name(name: str) -> Dataflow:
    if name not in _DATAFLOWS:
        raise ConfigError(
            f"algorithm.dataflow={name!r} is unknown; choose one of {sorted(_DATAFLOWS)} or auto, "
            "or give your own as package.module:function"
        )
    return _DATAFLOWS[name]


def _by_path(path: str) -> Dataflow:
    module_name, _, attribute = path.partition(":")
    try:
        step = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            f"algorithm.dataflow={path!r} can't be imported ({type(error).__name__}: {error}); it "
            "must be on the Python path and import cleanly"
        ) from error
    for dataflow in _DATAFLOWS.values():
        if dataflow.step is step:
            return dataflow
    raise ConfigError(
        f"algorithm.dataflow={path!r} is not registered; put @register_dataflow(name, roles) on it"
    )


def _origin(step: Step) -> str:
    return f"{getattr(step, '__module__', '?')}:{getattr(step, '__qualname__', step)}"
