"""Rollout sources by `trainer.mode`: who waits for whom between rollout and update.

- sync: rollout, then update, on the same weights. Nothing is stale.
- one_step_off: step k+1 is sampled during the update of step k, so it is one version behind.
- async: rollout workers never stop; a step takes what is fresh enough (AReaL, arXiv:2505.24298;
  in-flight weight updates as in PipelineRL, arXiv:2509.19128).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from engine.batch import Batch, Future, Ready
from engine.checkpoint.state_dict import StateDict
from engine.config.rl import TrainerConfig
from engine.controller.async_rollout import (
    AsyncRollout,
    PublishedWeights,
    WeightBroadcasts,
    WeightPublisher,
)
from engine.controller.groups import Roles, WorkerGroup
from engine.controller.launch import launch
from engine.controller.rollout_queue import AdmissionLimits
from engine.controller.supervision import HealthPolicy
from engine.controller.timeline import Span
from engine.dataflows.algo import Algo
from engine.errors import WeightSyncError
from engine.rollout.protocol import engine_capabilities
from engine.trainers import run_spec
from engine.trainers.prompts import PromptStream, Rollout
from engine.workers.rollout_worker import Draws


@run_spec.register_rollout_source("sync")
class SyncSource(run_spec.RolloutSource):
    """Gives prompts only; the dataflow samples them with the trainer's own weights."""

    def next_prompts(self) -> Batch:
        return self.prompts.next_batch()


log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingRollout:
    prompts: Batch
    completions: Future[Batch]
    weights: PublishedWeights | None = None  # that they are sampled under; None: from a checkpoint
    loading: Future[int] | None = None  # of `weights`, ahead of the sampling; None: already loaded


class _AheadSource(run_spec.RolloutSource):
    """Samples in processes of their own, which get the actor's weights and validate, too."""

    off_policy = True

    def __init__(
        self, spec: run_spec.RunSpec, roles: Roles, prompts: PromptStream, algo: Algo
    ) -> None:
        super().__init__(spec, roles, prompts, algo)
        self._spec, self._config = spec, spec.config.trainer
        self._last_step = 0  # while it is running; else 0
        self._restart_weights()

    @classmethod
    def samplers(cls, config: TrainerConfig) -> int:
        return config.rollout_workers

    @contextmanager
    def running(self, last_step: int) -> Iterator[None]:
        self._last_step = last_step
        try:
            yield
        finally:
            self._last_step = 0

    def load_state_dict(self, state: StateDict) -> None:
        self._restart_weights()
        super().load_state_dict(state)

    def _restart_weights(self) -> None:
        """Forget which weights were sent: the actor's are others now."""
        self._publisher = WeightPublisher(self.roles.actor, deltas=self._config.delta_sync)


@run_spec.register_rollout_source("one_step_off")
class OneStepOffSource(_AheadSource):
    """Keeps the rollout of one step pending on the role `sampler`."""

    extra_roles = frozenset({"sampler"})

    def __init__(
        self, spec: run_spec.RunSpec, roles: Roles, prompts: PromptStream, algo: Algo
    ) -> None:
        super().__init__(spec, roles, prompts, algo)
        self._pending: _PendingRollout | None = None
        self._version = 0
        roles.stand_in("rollout", roles["sampler"])

    def update_weights(self, version: int) -> None:
        self._version = version
        if self._pending is None or self._another_step:
            self._publish(version)

    def next_prompts(self) -> Batch:
        rollout, self._pending = self._pending or self._sample(), None
        completions = self._completions(rollout)
        if self._another_step:
            self._pending = self._sample()
        self.roles["rollout"].provide_result("generate", rollout.prompts, completions)
        return rollout.prompts

    def validate(self, prompts: Batch, version: int) -> Future[Batch]:
        if self._pending is not None:
            self._pending.completions = self._completions(self._pending)
        self._publish(version)
        self._wait_loaded(self._load(), self._weights)
        return self.roles.sampler.generate_validation(prompts)

    def state_dict(self) -> StateDict:
        queue: list[StateDict] = []
        if self._pending is not None:
            completions = self._completions(self._pending).result()
            queue = [Rollout(self._pending.prompts, completions).to_tree()]
        return {"queue": queue, "prompts": self.prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        rollouts = [Rollout.from_tree(tree) for tree in state["queue"]]  # one at most
        pending = [_PendingRollout(r.prompts, Ready(r.completions)) for r in rollouts]
        self._pending = pending[0] if pending else None

    @property
    def _another_step(self) -> bool:
        return self._version + 1 < self._last_step

    def _restart_weights(self) -> None:
        super()._restart_weights()
        self._weights: PublishedWeights | None = None
        self._sampler_version = -1  # of the sampler's weights; -1: unknown

    def _publish(self, version: int) -> None:
        if self._weights is None or self._weights.version != version:
            self._weights = self._publisher.publish(version)

    def _load(self) -> Future[int] | None:
        """Have the sampler load the weights that were published last; None: it has them."""
        assert self._weights is not None
        if self._sampler_version >= self._weights.version:
            return None
        update = self._weights.update_from(self._sampler_version)
        self._sampler_version = self._weights.version
        return self.roles.sampler.load_weights(update)

    def _wait_loaded(self, loading: Future[int] | None, weights: PublishedWeights | None) -> bool:
        """Whether the weights came as they were sent; else the sampler has got them in full."""
        try:
            if loading is not None:
                loading.result()
        except WeightSyncError as error:
            assert weights is not None
            assert weights.full is not None
            log.warning("the sampler gets the full weights: %s", error)
            self.roles.sampler.load_weights(weights.full).result()
            return False
        return True

    def _sample(self) -> _PendingRollout:
        """Start sampling the next prompts under the weights that were published last."""
        prompts, loading = self.prompts.next_batch(), self._load()
        completions = self.roles.sampler.generate(prompts)
        return _PendingRollout(prompts, completions, self._weights, loading)

    def _completions(self, rollout: _PendingRollout) -> Future[Batch]:
        """Wait for the weights; where a delta failed, sample again with the full ones."""
        loading, rollout.loading = rollout.loading, None
        if not self._wait_loaded(loading, rollout.weights):
            rollout.completions = self.roles.sampler.generate(rollout.prompts)
        return rollout.completions


_START_GRACE_S = 5.0  # after its deadline, for a start that failed to say why


class _SampledRollout:
    """The role `rollout` of a trainer without a copy of the policy: what its samplers give."""

    role, worker_class, world_size = "rollout", object, 0

    def __init__(self, sample: Callable[[Batch, Draws], Batch]) -> None:
        self._sample = sample
        self._provided: tuple[Batch, Future[Batch]] | None = None

    def provide_result(self, method: str, prompts: Batch, completions: Future[Batch]) -> None:
        self._provided = prompts, completions

    def generate(self, prompts: Batch) -> Future[Batch]:
        provided, self._provided = self._provided, None
        if provided is not None and provided[0] is prompts:
            return provided[1]
        return Ready(self._sample(prompts, "training"))

    def generate_greedy(self, prompts: Batch) -> Future[Batch]:
        return Ready(self._sample(prompts, "greedy"))


@run_spec.register_rollout_source("async")
class AsyncSource(_AheadSource):
    """Runs an `AsyncRollout` on processes of its own; its groups arrive with their scores.

    It is started by the first step or validation, and ends with the steps or with the run.
    """

    filters_groups = True

    def __init__(
        self, spec: run_spec.RunSpec, roles: Roles, prompts: PromptStream, algo: Algo
    ) -> None:
        self._rollout: AsyncRollout | None = None
        super().__init__(spec, roles, prompts, algo)
        self._filter = SignalFilter(algo, prompts.observe)
        self._restored: list[Rollout] = []  # of a checkpoint, until steps begin
        stand_in = _SampledRollout(lambda prompts, draws: self._running.sample(prompts, draws))
        roles.stand_in("rollout", cast(WorkerGroup, stand_in))

    @contextmanager
    def running(self, last_step: int) -> Iterator[None]:
        try:
            with super().running(last_step):
                if self._rollout is not None:  # a validation has started it
                    self._rollout.begin(self._limits(), self._take_restored())
                yield
        finally:
            self.close()

    def close(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.close()

    def update_weights(self, version: int) -> None:
        if self._rollout is None:
            self._rollout = self._start(self._publisher.publish(version))
        elif self._rollout.queue.admission.version != version:
            self._rollout.update_weights(self._publisher.publish(version))

    def next_prompts(self) -> Batch:
        prompts, completions = self._running.take()
        self.roles["rollout"].provide_result("generate", prompts, Ready(completions))
        self.roles["reward"].provide_result("score", completions, Ready(completions))
        return prompts

    def validate(self, prompts: Batch, version: int) -> Future[Batch]:
        self.update_weights(version)
        return Ready(self._running.sample(prompts, "validation"))

    def prefetch(self) -> None:
        """Prompts are drawn one by one, by the rollout's own thread."""

    def observe(self, sampled: Batch) -> None:
        """Groups were looked at when they were scored, in the rollout's own thread."""

    def metrics(self) -> dict[str, float]:
        return self._running.metrics()

    def take_spans(self) -> list[Span]:
        return self._running.take_spans()

    def state_dict(self) -> StateDict:
        if self._rollout is None or not self._last_step:
            return self._state(self._restored, [])
        with self._rollout.paused() as (finished, unfinished):
            return self._state([Rollout(*group) for group in finished], unfinished)

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._restored = [Rollout.from_tree(tree) for tree in state["queue"]]

    def _restart_weights(self) -> None:
        self.close()
        super()._restart_weights()
        backend, config = run_spec.broadcast_backend(self._spec), self._config
        if backend is not None:
            import ray  # not there in a run without it

            self._publisher = WeightBroadcasts(
                self.roles.actor,
                backend,
                ray.util.get_node_ip_address(),
                ranks=self._spec.config.rollout.tensor_parallel_size,
                deadline_s=config.rollout_silence_s,
                wait_s=config.step_timeout_s,
            )

    def _state(self, finished: list[Rollout], unfinished: list[Batch]) -> StateDict:
        prompts = self.prompts.state_dict(unfinished)
        return {"queue": [rollout.to_tree() for rollout in finished], "prompts": prompts}

    @property
    def _running(self) -> AsyncRollout:
        assert self._rollout is not None, "update_weights starts the rollout"
        return self._rollout

    def _limits(self) -> AdmissionLimits:
        config = self._config
        return AdmissionLimits(config.train_batch_size, config.staleness, steps=self._last_step)

    def _take_restored(self) -> list[tuple[Batch, Batch]]:
        restored, self._restored = self._restored, []
        return [(group.prompts, group.completions) for group in restored]

    def _start(self, weights: PublishedWeights) -> AsyncRollout:
        config = self._config
        # A server that loads, or finishes what it has begun first, is silent that long.
        rollout = self._spec.config.rollout
        loading = rollout.server.timeout_s if engine_capabilities(rollout).remote else 0.0
        silence = config.rollout_silence_s + loading
        return AsyncRollout(
            [f"sampler{i}" for i in range(config.rollout_workers)],
            self._limits(),
            HealthPolicy(
                suspect_after=silence / 4,
                dead_after=silence,
                start_timeout=config.start_timeout_s + _START_GRACE_S,
                sync_timeout=silence,
                max_restarts=config.max_rollout_restarts,
            ),
            spawn=self._spawn,
            next_prompt=self.prompts.next_prompt,
            score=self.roles.reward.score_part,
            weights=weights,
            keep=self._filter.accepts,
            finished=self._take_restored() if self._last_step else (),
            timeout_s=config.step_timeout_s,
        )

    def _spawn(self, name: str, attempt: int) -> Roles:
        spec = run_spec.rollout_worker_spec(name, self._spec)
        placement = run_spec.rollout_worker_placement(name, self._spec)
        return launch(placement, [spec], recorder=self.roles.recorder)


class SignalFilter:
    """Dynamic sampling (DAPO) by the group: those without signal are rejected.

    After as many in a row as `filter_groups.max_num_gen_batches` rollouts have, one is accepted.
    """

    def __init__(self, algo: Algo, observe: Callable[[Batch], None] = lambda group: None) -> None:
        """`observe` gets every group before it is accepted or rejected."""
        self._observe = observe
        self._algo, self._settings = algo, algo.config.algorithm.filter_groups
        self._limit = self._settings.max_num_gen_batches * algo.config.trainer.train_batch_size
        self._in_a_row = 0  # groups without signal

    def accepts(self, group: Batch) -> bool:
        self._observe(group)
        if not self._settings.enable:
            return True
        has_signal = bool(self._algo.rows_with_signal(group).any())
        self._in_a_row = 0 if has_signal else self._in_a_row + 1
        return self._in_a_row % self._limit == 0
