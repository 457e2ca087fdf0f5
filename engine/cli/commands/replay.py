"""`python -m engine.replay FOLDER`: run a recorded RL step again, in one process or on ranks.

What rollout and rewards gave is taken from the record (`engine.trainers.step_record`);
log-probs,
values, advantages and updates are computed again, from the recorded weights and generators.
Exit status: 0, all is as recorded; 1, something differs; 2, there is no such record.
"""

from __future__ import annotations

import argparse
import math
import pdb
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from engine.batch import Batch, Future
from engine.checkpoint import CheckpointStore, Saver
from engine.checkpoint.state_dict import set_process_rng
from engine.config import RLConfig
from engine.console import exit_130_on_ctrl_c, say
from engine.controller.groups import Roles, WorkerGroup
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo
from engine.errors import CheckpointError, EngineError
from engine.registry import import_plugins
from engine.trainers.auto_placement import run_roles
from engine.trainers.run_spec import RunSpec, default_pools, layout_of, role_specs
from engine.trainers.step_record import RUN_AGAIN, STATE, StepRecord, read_record, step_metrics

_ONE_RANK = {
    **dict.fromkeys(("dp", "fsdp", "sp", "tp", "pp"), 1),
    **dict.fromkeys(("offload_params", "offload_optimizer"), False),
}
_OTHER_LAYOUT = 1e-3  # relative: sums over ranks come in another order
_ALWAYS_SHOWN = ("loss", "grad_norm")  # ends of names


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


def _has_mini_batches(config: RLConfig) -> bool:
    """Whether a role takes several steps on parts of a step's completions."""
    rows = config.trainer.train_batch_size * config.rollout.n
    sizes = (config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size)
    return any(0 < size < rows for size in sizes)


def compare(record: StepRecord, metrics: dict[str, float]) -> list[Compared]:
    """Every metric that a replay has, without times, and those of updates that it lacks."""
    gone = [name for name in record.metrics if name.startswith(("actor/", "critic/"))]
    names = dict.fromkeys([*metrics, *gone])
    return [
        Compared(name, record.metrics.get(name, math.nan), metrics.get(name, math.nan))
        for name in names
        if not name.startswith("perf/")
    ]


@exit_130_on_ctrl_c
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        record = read_record(options.folder)
    except EngineError as error:
        say(f"error: {error}", error=True)
        return 2
    alike, tolerance = options.on_ranks or record.ranks == 1, options.tolerance
    if tolerance is None:
        tolerance = 0.0 if alike else _OTHER_LAYOUT
    where = "as many" if record.ranks > 1 and alike else "one"
    say(f"step {record.step}, recorded on {record.ranks} rank(s), run again on {where}")
    if not alike and _has_mini_batches(record.config):
        say(
            "note: ranks draw mini-batches of their own rows, one rank draws others; see --on-ranks"
        )
    try:
        metrics = replay(record, options.model, options.threads, on_ranks=options.on_ranks)
    except Exception as error:
        return _failed(record, error, options.pdb)
    compared = compare(record, metrics)
    for line in _table(compared, tolerance, options.all or bool(record.error)):
        say(line)
    if record.error:
        say(f"different: the recorded step failed ({record.error}), this one did not")
        return 1
    differ = [one for one in compared if not one.same(tolerance)]
    exactly = "to the bit" if not tolerance else f"within {tolerance:g}"
    if differ:
        say(f"different: {len(differ)} of {len(compared)} metrics, {exactly}")
        return 1
    say(f"same: {len(compared)} metrics, {exactly}")
    return 0


def _failed(record: StepRecord, error: Exception, post_mortem: bool) -> int:
    """Say how a replay failed; as recorded, that is status 0."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    named = record.error.partition(":")[0]  # another rank's error has another text
    same = text == record.error or (record.ranks > 1 and type(error).__name__ == named)
    if isinstance(error, CheckpointError) and not same:
        say(f"error: {error}", error=True)
        return 2
    say(f"{'same: it fails as recorded' if same else 'different: it fails'}: {text}")
    if post_mortem:
        cause: BaseException = error
        while cause.__cause__ is not None and cause.__cause__.__traceback__ is not None:
            cause = cause.__cause__
        pdb.post_mortem(cause.__traceback__)
    return 0 if same else 1


def _table(compared: list[Compared], tolerance: float, everything: bool) -> Iterator[str]:
    """Loss and gradient norm, and what differs; or everything."""
    for one in compared:
        same = one.same(tolerance)
        if everything or not same or one.name.endswith(_ALWAYS_SHOWN):
            mark = "" if same else "  differs"
            yield f"  {one.name:<32} {one.recorded!r:>24} {one.replayed!r:>24}{mark}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m engine.replay",
        description="Run a recorded RL step again in one process, and compare its metrics.",
        epilog="exit status: 0 as recorded; 1 something differs; 2 no good record",
    )
    parser.add_argument("folder", help="a record, e.g. out/checkpoints/recorded/step_3")
    parser.add_argument("--all", action="store_true", help="show all metrics, not what differs")
    parser.add_argument("--pdb", action="store_true", help="open pdb where the step fails")
    parser.add_argument(
        "--on-ranks", action="store_true", help="on as many ranks as recorded, by Ray"
    )
    parser.add_argument("--model", default="", help="the start model, if it is elsewhere now")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default: as recorded")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="relative difference that counts as the same; default: 0, or "
        f"{_OTHER_LAYOUT:g} for a step of several ranks",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
