"""Runs a recorded RL step again (`step_record`), in one process or on ranks as it was recorded.

What rollout and rewards gave is taken from the record; log-probs, values, advantages and updates
are computed again, from the recorded weights and generators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from engine.batch import Batch, Future
from engine.checkpoint import CheckpointStore, Saver
from engine.checkpoint.state_dict import set_process_rng
from engine.config import RLConfig
from engine.controller.groups import Roles, WorkerGroup
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo
from engine.errors import CheckpointError
from engine.registry import import_plugins
from engine.trainers.auto_placement import run_roles
from engine.trainers.run_spec import RunSpec, default_pools, layout_of, role_specs
from engine.trainers.step_record import RUN_AGAIN, STATE, StepRecord, step_metrics

_ONE_RANK = {
    **dict.fromkeys(("dp", "fsdp", "sp", "tp", "pp"), 1),
    **dict.fromkeys(("offload_params", "offload_optimizer"), False),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric, as recorded and as it is now; NaN for one that is not there."""

    name: str
    recorded: float
    replayed: float

    def same(self, tolerance: float) -> bool:
        """Whether both are equal, or differ by a share of at most `tolerance`; near 0 by less."""
        a, b, least = self.recorded, self.replayed, tolerance * tolerance
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=least)


class _Tape:
    """The recorded results, given out in the order in which the step asked for them."""

    def __init__(self, record: StepRecord) -> None:
        self._record, self._calls = record, iter(record.calls)

    def group(self, role: str) -> WorkerGroup:
        """A stand-in for the group of a role that is not run again."""
        return cast(WorkerGroup, _TapedGroup(self, role))

    def more_prompts(self) -> Batch:
        """The prompts of a further rollout of the step."""
        return cast(Batch, self.take("prompts", "next_batch").result())

    def take(self, role: str, method: str) -> Future[object]:
        """The result of the next call, which must be this one."""
        call = next(self._calls, None)
        if call is None:
            failed = self._record.error
            why = f"it failed there: {failed}" if failed else "this code asks for more"
            raise CheckpointError(f"the record ends before {role}.{method}: {why}")
        if (call.role, call.method) != (role, method):
            raise CheckpointError(
                f"the step asks for {role}.{method} where the record has "
                f"{call.role}.{call.method}; replay it with the code that recorded it"
            )
        return call.result


class _TapedGroup:
    def __init__(self, tape: _Tape, role: str) -> None:
        self._tape, self._role = tape, role

    def __getattr__(self, method: str) -> Callable[..., Future[object]]:
        return lambda *arguments, **keywords: self._tape.take(self._role, method)


def replay(
    record: StepRecord, model: str = "", threads: int = 0, *, on_ranks: bool = False
) -> dict[str, float]:
    """The metrics of the step, run again in this process, or on ranks as it was recorded.

    `model`: where the start model is now; `threads`: of a process, as recorded without. Raises the
    EngineError that the step ends with, CheckpointError for a damaged record.
    """
    import_plugins(record.config.plugins)
    dataflow = choose_dataflow(record.config.algorithm)
    needs, used = run_roles(record.config)
    again = used & frozenset(RUN_AGAIN)
    run = record.run | ({"model_path": model} if model else {})
    config = record.config if on_ranks else _one_rank(record.config)
    spec = RunSpec(config=config, needs=needs, roles=again, **run)
    size = layout_of("actor", config).world_size
    gpus = next((p.gpus for p in config.trainer.pools if "actor" in p.roles), 0.0)
    pool = Pool(default_pools(again)[0], size, float(threads or record.threads), gpus)
    limit = record.config.trainer.step_timeout_s
    kind: Literal["local", "ray"] = "local" if size == 1 else "ray"
    place = Placement((pool,), kind=kind, call_timeout_s=limit)
    with launch(place, role_specs(spec)) as live:
        tape = _Tape(record)
        roles = Roles(
            {name: live[name] if name in again else tape.group(name) for name in used},
            close=lambda: None,
        )
        algo = Algo(
            record.config,
            needs,
            max_response_length=spec.max_response_length,
            seed=spec.seed,
            more_prompts=tape.more_prompts,
        )
        store = CheckpointStore((record.folder / STATE).uri)
        if (state := store.latest()) is None:
            raise CheckpointError(f"{store.root} has no checkpoint; record the step again")
        names: tuple[str, ...] = ("actor", "critic")
        learning = {name: live[name] for name in names if name in again}
        begin = Saver(store, learning, limit).restore(state)
        algo.load_state_dict(begin["algo"])
        set_process_rng(begin["rng"])
        algo.step, start = record.step, time.perf_counter()
        result = dataflow.step(roles, record.prompts, algo)
        updates = [update.result() for update in result.updates]
        metrics = step_metrics(result.batch.resolve(), time.perf_counter() - start)
        metrics |= algo.take_metrics()
        for update in updates:
            metrics |= update
        return metrics


def _one_rank(config: RLConfig) -> RLConfig:
    """The settings with every role on one rank, and no process that only decodes."""
    actor, critic = config.actor, config.critic
    own = critic.parallel and critic.parallel.model_copy(update=_ONE_RANK)
    changes = {
        "actor": {"parallel": actor.parallel.model_copy(update=_ONE_RANK)},
        "critic": {"parallel": own},
        "reference": {"offload_params": False},
        "rollout": {"tensor_parallel_size": 1},
        "trainer": {"pools": (), "mode": "sync", "placement": "local"},
    }
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    return config.model_copy(update=sections)


def compare(record: StepRecord, metrics: dict[str, float]) -> list[Compared]:
    """Every metric that a replay has, without times, and those of updates that it lacks."""
    gone = [name for name in record.metrics if name.startswith(("actor/", "critic/"))]
    names = dict.fromkeys([*metrics, *gone])
    return [
        Compared(name, record.metrics.get(name, math.nan), metrics.get(name, math.nan))
        for name in names
        if not name.startswith("perf/")
    ]
