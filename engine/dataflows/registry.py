"""The registry of dataflows, and which one a configuration runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from engine.algorithms import advantages
from engine.config import AlgorithmConfig, RLConfig
from engine.errors import ConfigError
from engine.registry import Registry

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.controller.roles import Roles
    from engine.dataflows.algo import Algo, StepResult

    Step = Callable[[Roles, Batch, Algo], StepResult]

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


_registry: Registry[Dataflow] = Registry(
    "dataflow",
    "algorithm.dataflow",
    "engine.dataflows",
    "@register_dataflow(name, roles)",
)


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
        dataflow = Dataflow(
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
        _registry.add(name, dataflow, step)
        return step

    return add


def choose_dataflow(config: AlgorithmConfig) -> Dataflow:
    """The dataflow that `algorithm.dataflow` names, or the one its estimator runs on.

    Its step has the options of `algorithm.dataflow_options`, which are keyword-only parameters of
    the step with defaults. Raises ConfigError for an unknown name or option, and where the
    estimator needs what the dataflow doesn't provide.
    """
    needed = advantages.requires(config.adv_estimator) - _EVERYWHERE
    name = _by_estimator(config, needed) if config.dataflow == "auto" else config.dataflow
    dataflow = _registry.get(name)
    missing = needed - dataflow.provides
    if missing and dataflow.uses_advantages:
        need = "; ".join(f"{field}: {advantages.REQUIREMENTS[field]}" for field in sorted(missing))
        raise ConfigError(
            f"algorithm.adv_estimator={config.adv_estimator} needs what dataflow "
            f"{dataflow.name!r} doesn't provide ({need}); set algorithm.dataflow=auto"
        )
    options = _registry.options(name).parse(config.dataflow_options, "algorithm.dataflow_options")
    return replace(dataflow, step=partial(dataflow.step, **options)) if options else dataflow


def _by_estimator(config: AlgorithmConfig, needed: frozenset[str]) -> str:
    names = _registry.names()
    if config.filter_groups.enable:
        return "dapo"
    if config.adv_estimator in names:
        return config.adv_estimator
    if not needed:
        return "grpo"
    able = [dataflow.name for dataflow in _registry.values() if needed <= dataflow.provides]
    if not able:
        raise ConfigError(
            f"algorithm.adv_estimator={config.adv_estimator} needs {sorted(needed)}, which no "
            f"dataflow here provides; choose one of {', '.join(names)}, or register one"
        )
    return able[0]
