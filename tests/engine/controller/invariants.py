"""The invariants of asynchronous rollout's state machines, checked on a single value."""

from __future__ import annotations

from engine.controller.rollout_queue import Admission
from engine.controller.supervision import Fleet, HealthState
from engine.errors import RolloutError, WorkerError


def check_admission(state: Admission) -> None:
    """Raise RolloutError naming each invariant of the module's docstring that is broken."""
    size, bound = state.limits.batch, state.limits.staleness
    groups = (*state.in_flight.values(), *state.queue)
    keys = [*state.resample, *(group.ticket.key for group in groups)]
    step = state.consumed // size
    invariants = {
        "1: a key is in two places": len(set(keys)) == len(keys),
        "1: a key is lost or doubled": state.drawn == state.consumed + state.rejected + len(keys)
        and all(0 <= key < state.drawn for key in keys),
        "2: more groups than places": len(groups) <= (bound + 1) * size,
        "2: more prompts than updates": len(keys)
        <= (state.version + bound + 1) * size - state.consumed,
        "3: a group is too old": all(state.version - g.oldest <= bound for g in groups),
        "3: a version is unknown": all(g.oldest <= g.newest <= state.version for g in groups),
        "4: not one batch an update": state.consumed % size == 0 and step - state.version in (0, 1),
        "5: a group can't be consumed in time": state._in_time(state._ages(), step),
    }
    broken = [name for name, holds in invariants.items() if not holds]
    if broken:
        raise RolloutError(f"admission breaks {'; '.join(broken)}: {state}")


def check_fleet(fleet: Fleet) -> None:
    """Raise WorkerError for a worker that breaks an invariant of the module's docstring."""
    for worker in fleet.workers.values():
        lag = fleet.version - worker.version
        known = 0 <= worker.version <= fleet.version
        if worker.state is HealthState.SERVING and not (known and lag <= fleet.max_lag):
            raise WorkerError(f"{worker} serves at trainer version {fleet.version}")
        if (worker.state is HealthState.FAILED) != (len(worker.deaths) > fleet.policy.max_restarts):
            raise WorkerError(f"{worker} doesn't keep its restart budget")
    failed = all(worker.state is HealthState.FAILED for worker in fleet.workers.values())
    if failed != (fleet.stopped is not None):
        raise WorkerError(f"fleet stopped={fleet.stopped} with workers {fleet.workers}")
