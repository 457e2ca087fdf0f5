"""Who waits for whom between rollout and update: the RL loop's three modes.

Each is a generator of steps: it yields what a dataflow's step left, and goes on once its updates
are done. The dataflow is the same in all of them; what differs is what answers its calls.

- sync: rollout, then update, on the same weights. Nothing is stale.
- one_step_off: the completions of step k+1 are sampled while step k updates, so they are one
  version behind.
- async: rollout workers never stop; the trainer takes what is fresh enough (AReaL,
  arXiv:2505.24298; in-flight weight updates as in PipelineRL, arXiv:2509.19128).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.batch import Batch
from engine.controller.async_rollout import AsyncRollout
from engine.controller.health import HealthPolicy
from engine.controller.launch import launch
from engine.controller.roles import Roles
from engine.controller.staleness import Limits
from engine.controller.weight_publisher import PublishedWeights, WeightPublisher
from engine.dataflows.algo import StepResult
from engine.errors import WeightSyncError
from engine.futures import Future, Ready
from engine.trainers.queue_state import Pending, Queued, nothing_pending
from engine.trainers.rl_setup import rollout_worker_placement, rollout_worker_spec

if TYPE_CHECKING:
    from engine.trainers.rl import RLTrainer

log = logging.getLogger(__name__)
Steps = Generator[StepResult]


def sync(trainer: RLTrainer, count: int) -> Steps:
    """Rollout and update take turns."""
    for _ in range(count):
        yield _step(trainer, trainer.roles, trainer.prompts.next_batch())


def one_step_off(trainer: RLTrainer, count: int) -> Steps:
    """The sampler works on the next step's prompts while this step's update runs."""
    roles = trainer.roles
    publisher = WeightPublisher(roles.actor, deltas=trainer.config.trainer.delta_sync)
    weights: PublishedWeights | None = None
    ahead: Ahead | Restored
    if trainer.restored:
        [queued], trainer.restored = trainer.restored, []
        prompts, ahead = queued.prompts, Restored(queued.done)
    else:
        prompts, weights = trainer.prompts.next_batch(), publisher.publish(trainer.step)
        ahead = Ahead(roles.sampler, prompts, weights, has=-1)
    for left in range(count, 0, -1):
        here, sampled = prompts, ahead.completions()
        trainer.pending = nothing_pending
        if left > 1:
            prompts, has = trainer.prompts.next_batch(), weights.version if weights else -1
            if weights is None or trainer.step != has:
                weights = publisher.publish(trainer.step)
            ahead = Ahead(roles.sampler, prompts, weights, has)
            trainer.pending = partial(_sampled, prompts, ahead)
        answering = View(roles, rollout=Answers(roles.rollout, generate=sampled))
        yield _step(trainer, answering, here)


def _step(trainer: RLTrainer, roles: Any, prompts: Batch) -> StepResult:
    """The dataflow's step; one that learns nothing counts for the policy's version all the same.

    So versions are numbers of steps, by which rollout and trainer understand each other.
    """
    result = trainer.dataflow.step(roles, prompts, trainer.algo)
    if not result.updates:
        result.updates.append(trainer.roles.actor.skip_update())
    return result


def _sampled(prompts: Batch, ahead: Ahead) -> AbstractContextManager[Pending]:
    """The next step's completions, once they are there."""
    return nullcontext(Pending([Queued(prompts, ahead.completions().result())]))


def asynchronous(trainer: RLTrainer, count: int) -> Steps:
    """The trainer takes batches from a bounded queue that rollout workers keep full."""
    config, roles = trainer.config.trainer, trainer.roles
    limits = Limits(config.train_batch_size, config.staleness, steps=trainer.step + count)
    silence = config.rollout_silence_s
    health = HealthPolicy(
        suspect_after=silence / 4,
        dead_after=silence,
        start_timeout=config.start_timeout_s,
        sync_timeout=silence,
        max_restarts=config.max_rollout_restarts,
    )
    names = [f"sampler{i}" for i in range(config.rollout_workers)]
    publisher = WeightPublisher(roles.actor, deltas=config.delta_sync)
    with AsyncRollout(
        names,
        limits,
        health,
        spawn=lambda name, attempt: _spawn(trainer, name),
        next_prompt=trainer.prompts.next_prompt,
        score=roles.reward.score_part,
        weights=publisher.publish(trainer.step),
        keep=_signal(trainer),
        finished=[(queued.prompts, queued.done) for queued in trainer.restored],
        timeout_s=config.step_timeout_s,
    ) as rollout:
        trainer.restored = []
        trainer.pending = partial(_unused, rollout)
        trainer.other_spans = rollout.timeline
        for _ in range(count):
            prompts, batch = rollout.take()
            answering = View(
                roles,
                rollout=Answers(roles.rollout, generate=Ready(batch)),
                reward=Answers(roles.reward, score=Ready(batch)),
            )
            result = _step(trainer, answering, prompts)
            trainer.algo.metrics |= rollout.metrics()
            yield result
            rollout.updated(publisher.publish(trainer.step))


@contextmanager
def _unused(rollout: AsyncRollout) -> Iterator[Pending]:
    """All that no batch has had yet."""
    with rollout.held() as (finished, begun):
        yield Pending([Queued(*group) for group in finished], begun)


def _spawn(trainer: RLTrainer, name: str) -> Roles:
    spec = trainer.spec
    return launch(
        rollout_worker_placement(name, spec),
        [rollout_worker_spec(name, spec)],
        recorder=trainer.roles.recorder,
    )


def _signal(trainer: RLTrainer) -> Callable[[Batch], bool] | None:
    """Dynamic sampling by the group: what has no signal never enters the queue.

    After as many groups in a row as `max_num_gen_batches` rollouts have, one is let through.
    """
    settings, seen = trainer.config.algorithm.filter_groups, [0]
    bound = settings.max_num_gen_batches * trainer.config.trainer.train_batch_size

    def keep(group: Batch) -> bool:
        rows = trainer.algo.rows_with_signal(group)
        seen[0] = 0 if bool(rows.any()) else seen[0] + 1
        return seen[0] % bound == 0

    return keep if settings.enable else None


class Ahead:
    """Completions that a sampler works on, under weights that it is sent first."""

    def __init__(self, sampler: Any, prompts: Batch, weights: PublishedWeights, has: int) -> None:
        """`has` is the version of the weights that the sampler has already; -1: none."""
        self._sampler, self._prompts, self._weights = sampler, prompts, weights
        self._loaded = (
            sampler.load_weights(weights.update_from(has)) if has < weights.version else None
        )
        self._completions = sampler.generate(prompts)

    def completions(self) -> Future[Batch]:
        """The completions, once the weights are in place: sent whole where a delta has failed."""
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            try:
                loaded.result()
            except WeightSyncError as error:
                log.warning("the sampler gets the weights whole: %s", error)
                self._sampler.load_weights(self._weights.full).result()
                self._completions = self._sampler.generate(self._prompts)
        return self._completions


class Restored:
    """Completions that were there already when a run was resumed."""

    def __init__(self, done: Batch) -> None:
        self._done = done

    def completions(self) -> Future[Batch]:
        """They."""
        return Ready(self._done)


class View:
    """Roles of which some are answered otherwise."""

    def __init__(self, roles: Roles, **instead: Any) -> None:
        self._roles, self._instead = roles, instead

    def __getattr__(self, role: str) -> Any:
        return self._instead.get(role) or getattr(self._roles, role)


class Answers:
    """A group some of whose methods are answered once by futures that exist already.

    A second call, such as one for other prompts, goes to the group.
    """

    def __init__(self, group: Any, **answers: Future[Batch]) -> None:
        self._group, self._answers = group, answers

    def __getattr__(self, method: str) -> Any:
        if method not in self._answers:
            return getattr(self._group, method)

        def call(*arguments: Any) -> Any:
            answer = self._answers.pop(method, None)
            return getattr(self._group, method)(*arguments) if answer is None else answer

        return call


MODES: dict[str, Callable[[RLTrainer, int], Steps]] = {
    "sync": sync,
    "one_step_off": one_step_off,
    "async": asynchronous,
}
