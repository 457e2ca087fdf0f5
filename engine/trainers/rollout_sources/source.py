"""What the training loop needs of a rollout source, and the registry of sources by mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict
from engine.config.rl import TrainerConfig
from engine.controller.timeline import Span
from engine.registry import Registry

if TYPE_CHECKING:
    from engine.controller.roles import Roles
    from engine.dataflows.algo import Algo
    from engine.trainers.prompts import PromptStream
    from engine.trainers.rl_setup import RunSpec


@dataclass(frozen=True, slots=True)
class SourceInputs:
    """What a source is built from."""

    spec: RunSpec
    roles: Roles
    prompts: PromptStream
    algo: Algo


class RolloutSource(ABC):
    """Gives each step its prompts, whose completions may be sampled already.

    Owns the prompts and everything that is sampled and not used yet, with its checkpoint state.
    The defaults are those of rollout that is not ahead of the trainer.
    """

    off_policy: ClassVar[bool] = False  # completions may be of older weights than the update's
    extra_roles: ClassVar[frozenset[str]] = frozenset()  # that it calls, besides the dataflow's
    filters_groups: ClassVar[bool] = False  # drops groups without signal itself (DAPO)

    def __init__(self, inputs: SourceInputs) -> None:
        self.roles, self.prompts = inputs.roles, inputs.prompts

    @classmethod
    def samplers(cls, config: TrainerConfig) -> int:
        """Number of processes that only decode, with a copy of the policy."""
        return 0

    @contextmanager
    def running(self, last_step: int) -> Iterator[None]:
        """Serve the steps up to `last_step` in this block; nothing is sampled beyond it."""
        yield

    def update_weights(self, version: int) -> None:
        """Send the actor's weights, after `version` updates, to the samplers. Called each step."""
        return

    @abstractmethod
    def next_prompts(self) -> Batch:
        """The prompts of the next step.

        What is sampled of them already is provided to the roles: the dataflow's
        `roles.rollout.generate(prompts)` returns it.
        """

    def prefetch(self) -> None:
        """Prepare the prompts of the step after this one while workers are busy."""
        self.prompts.prefetch()

    def observe(self, sampled: Batch) -> None:
        """Look at a rollout of the step that has just ended, with its scores."""
        self.prompts.observe(sampled)

    def metrics(self) -> dict[str, float]:
        """Metrics of the source itself."""
        return {}

    def take_spans(self) -> list[Span]:
        """Timeline spans since the last call, of processes that are not among the roles."""
        return []

    def state_dict(self) -> StateDict:
        """Everything that is drawn and not used yet: finished rollouts (`queue`) and `prompts`."""
        return {"queue": [], "prompts": self.prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore `state_dict`. The actor's weights are restored before."""
        self.prompts.load_state_dict(state["prompts"])


_SOURCES: Registry[type[RolloutSource]] = Registry(
    "rollout source",
    "trainer.mode",
    "engine.trainers.rollout_sources",
    "@register_rollout_source(mode)",
)


def register_rollout_source(
    mode: str,
) -> Callable[[type[RolloutSource]], type[RolloutSource]]:
    """Make a source selectable as `trainer.mode=<mode>`."""
    return _SOURCES.register(mode)


def get_rollout_source(mode: str) -> type[RolloutSource]:
    """The source of a mode; raise ConfigError for an unknown one."""
    return _SOURCES.get(mode)


def sampler_count(config: TrainerConfig) -> int:
    """Number of processes of a run that only decode, with a copy of the policy."""
    return get_rollout_source(config.mode).samplers(config)
