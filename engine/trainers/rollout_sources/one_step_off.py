"""trainer.mode=one_step_off: a sampler works on step k+1 during the update of step k."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict
from engine.config.rl import TrainerConfig
from engine.controller.weight_publisher import PublishedWeights, WeightPublisher
from engine.errors import WeightSyncError
from engine.futures import Future, Ready
from engine.trainers.rollout_sources.source import (
    RolloutSource,
    SourceInputs,
    register_rollout_source,
)
from engine.trainers.rollout_state import Rollout

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingRollout:
    """Completions that the sampler is working on."""

    prompts: Batch
    completions: Future[Batch]
    weights: PublishedWeights | None = None  # that they are sampled under; None: from a checkpoint
    loading: Future[int] | None = None  # of `weights`, ahead of the sampling; None: already loaded


@register_rollout_source("one_step_off")
class OneStepOffSource(RolloutSource):
    """Keeps the rollout of one step pending on the role `sampler`."""

    off_policy = True
    extra_roles = frozenset({"sampler"})

    def __init__(self, inputs: SourceInputs) -> None:
        super().__init__(inputs)
        self._deltas = inputs.spec.config.trainer.delta_sync
        self._pending: _PendingRollout | None = None
        self._version = self._last_step = 0
        self._weights: PublishedWeights | None = None
        self._sampler_version = -1  # of the sampler's weights; -1: unknown

    @classmethod
    def samplers(cls, config: TrainerConfig) -> int:
        return config.rollout_workers

    @contextmanager
    def running(self, last_step: int) -> Iterator[None]:
        self._last_step, self._sampler_version = last_step, -1
        self._publisher = WeightPublisher(self.roles.actor, deltas=self._deltas)
        yield

    def update_weights(self, version: int) -> None:
        self._version = version
        if self._pending is None or self._another_step:
            self._weights = self._publisher.publish(version)

    def next_prompts(self) -> Batch:
        rollout, self._pending = self._pending or self._sample(), None
        completions = self._completions(rollout)
        if self._another_step:
            self._pending = self._sample()
        self.roles["rollout"].provide_result("generate", rollout.prompts, completions)
        return rollout.prompts

    def state_dict(self) -> StateDict:
        queue: list[StateDict] = []
        if self._pending is not None:
            completions = self._completions(self._pending).result()
            queue = [Rollout(self._pending.prompts, completions).to_tree()]
        return {"queue": queue, "prompts": self.prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.roles.sampler.load_weights(self.roles.actor.weights()).result()
        super().load_state_dict(state)
        self._pending = None
        for tree in state["queue"]:  # one at most
            rollout = Rollout.from_tree(tree)
            self._pending = _PendingRollout(rollout.prompts, Ready(rollout.completions))

    @property
    def _another_step(self) -> bool:
        """Whether a step follows the next one."""
        return self._version + 1 < self._last_step

    def _sample(self) -> _PendingRollout:
        """Start sampling the next prompts under the weights that were published last."""
        assert self._weights is not None
        prompts, weights, loading = self.prompts.next_batch(), self._weights, None
        if self._sampler_version < weights.version:
            loading = self.roles.sampler.load_weights(weights.update_from(self._sampler_version))
            self._sampler_version = weights.version
        return _PendingRollout(prompts, self.roles.sampler.generate(prompts), weights, loading)

    def _completions(self, rollout: _PendingRollout) -> Future[Batch]:
        """Wait until the weights are loaded; after a failed delta send the full ones, and sample
        again."""
        if rollout.loading is not None:
            loading, rollout.loading = rollout.loading, None
            try:
                loading.result()
            except WeightSyncError as error:
                assert rollout.weights is not None
                log.warning("the sampler gets the full weights: %s", error)
                self.roles.sampler.load_weights(rollout.weights.full).result()
                rollout.completions = self.roles.sampler.generate(rollout.prompts)
        return rollout.completions
