"""Records of single RL steps, and `replay`, which runs one again (`python -m engine.replay`).

What rollout and rewards gave is recorded; log-probs, values, advantages and updates are computed
again, from the recorded weights and generators, in one process or on ranks as it was recorded.
"""

import io
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from engine.batch import Batch, Future, Ready
from engine.checkpoint import CheckpointStore, Saver
from engine.checkpoint.state_dict import StateDict, process_rng, set_process_rng
from engine.config import LoRAConfig, RLConfig
from engine.config.rl import RECORDS
from engine.controller.groups import Roles, WorkerGroup
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo
from engine.errors import CheckpointError, ConfigError, EngineError, PreemptedError
from engine.registry import import_plugins
from engine.storage.folder import Folder
from engine.trainers import run_spec
from engine.trainers.prompts import batch_from_tree, batch_to_tree, to_json_values
from engine.trainers.step_metrics import step_metrics

log = logging.getLogger(__name__)

_RUN_AGAIN = ("actor", "reference", "teacher", "critic")  # others' results are recorded
_STATE = "state"
_LEARNING = ("actor", "critic")
_FILE = "step.pt"
_VERSION = 1
_RUN = ("model_path", "max_response_length", "max_model_len", "seed", "dtype")
_MORE_PROMPTS = ("prompts", "next_batch")


@dataclass(frozen=True, slots=True)
class Call:
    role: str  # e.g. "rollout"
    method: str  # e.g. "generate"
    result: Future[object]


@dataclass(frozen=True, slots=True)
class StepRecord:
    folder: Folder
    step: int
    config: RLConfig
    run: StateDict  # the other fields of its RunSpec
    ranks: int  # of the policy
    threads: int  # of each
    prompts: Batch
    calls: list[Call]
    metrics: dict[str, float]  # none of a step that failed
    error: str  # "" of one that did not


class StepRecorder(AbstractContextManager["StepRecorder"]):
    """Records the steps that `debug` asks for, in `recorded/` under the folder of checkpoints.

    A record is a folder: `state/`, a checkpoint of what learns from just before the step, and
    `step.pt`: settings, prompts, what rollout and rewards gave, and what was measured. A step calls
    `roles`, and sets `prompts` and `metrics`.

    A context manager around the steps: it records the one that fails. What can't be written costs
    a warning, never the run. Raises ConfigError without a folder.
    """

    def __init__(
        self, spec: run_spec.RunSpec, roles: Roles, algo: Algo, root: Folder | None
    ) -> None:
        self._spec, self._all_roles, self._algo = spec, roles, algo
        self._settings, self._root = spec.config.debug, root
        self._more_prompts = algo.more_prompts
        self._folder: Folder | None = None  # of the step that is being recorded
        if root is None and self._settings.enabled:
            raise ConfigError(
                "debug.record_steps and debug.record_failed write beside the checkpoints, and this "
                "run has none; give fit a checkpoint_dir, or leave them out"
            )

    def begin(self, step: int) -> None:
        """Begin a step, which goes on until `end`; it is recorded if it is to be."""
        self._step, self.roles = step, self._all_roles
        self.prompts: Batch | None = None
        self.metrics: dict[str, float] = {}
        self._calls: list[Call] = []
        chosen = step in self._settings.record_steps
        if self._root is None or not (chosen or self._settings.record_failed):
            return
        folder = self._root / RECORDS / f"step_{step}"
        if self._try(lambda: self._save_state(folder)):
            self._folder, self.roles = folder, self._recording_roles()
            self._algo.more_prompts = self._record_more_prompts if self._more_prompts else None

    def end(self, failure: str = "") -> None:
        """Write the step's record if it was asked for, failed, or measured what is not finite."""
        self._algo.more_prompts = self._more_prompts
        folder, self._folder = self._folder, None
        if folder is None:
            return
        finite = all(map(math.isfinite, self.metrics.values()))
        if failure or not finite or self._step in self._settings.record_steps:
            self._try(lambda: self._write(folder, failure))
        else:
            self._try(folder.remove)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write the record of a step that failed; none of one that was pre-empted."""
        if isinstance(error, PreemptedError) and self._folder is not None:
            self._try(self._folder.remove)
        elif isinstance(error, Exception):
            self.end(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _save_state(self, folder: Folder) -> None:
        """Write the models and optimizers, before the step changes them."""
        roles, limit = self._all_roles, self._spec.config.trainer.step_timeout_s
        groups = {name: roles[name] for name in _LEARNING if name in roles}
        saver = Saver(CheckpointStore((folder / _STATE).uri, keep_last=1), groups, limit)
        saver.save(self._step - 1, {"algo": self._algo.state_dict(), "rng": process_rng()})
        saver.wait()

    def _recording_roles(self) -> Roles:
        groups = {name: self._all_roles[name] for name in self._all_roles}
        for name in groups.keys() - {*_RUN_AGAIN}:
            groups[name] = cast(WorkerGroup, _RecordingGroup(name, groups[name], self._calls))
        return Roles(groups, close=lambda: None, recorder=self._all_roles.recorder)

    def _record_more_prompts(self) -> Batch:
        assert self._more_prompts is not None
        batch = self._more_prompts()
        self._calls.append(Call(*_MORE_PROMPTS, Ready(batch)))
        return batch

    def _write(self, folder: Folder, failure: str) -> None:
        spec, config = self._spec, self._spec.config
        if self.prompts is None:
            raise CheckpointError("the step failed before it had prompts")
        pool = next(p for p in run_spec.placement_of(spec).pools if "actor" in p.roles)
        tree = {
            "version": _VERSION,
            "step": self._step,
            "config": config.model_dump(mode="json"),
            "run": {name: getattr(spec, name) for name in _RUN}
            | {"lora": spec.lora.model_dump(mode="json")},
            "ranks": run_spec.layout_of("actor", config).world_size,
            "threads": max(1, int(pool.cpus)),
            "prompts": batch_to_tree(self.prompts),
            "calls": list(_finished(self._calls)),
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "error": failure,
        }
        file = io.BytesIO()
        torch.save(tree, file)
        folder.write(_FILE, [file.getbuffer()])
        log.warning("step %d is recorded: python -m engine.replay %s", self._step, folder)

    def _try(self, action: Callable[[], None]) -> bool:
        """Whether the action succeeded; a failure is a warning."""
        try:
            action()
        except Exception as error:  # whatever it is: the run goes on
            log.warning("no record of this step (%s): %s", type(error).__name__, error)
            return False
        return True


class _RecordingGroup:
    """A worker group whose calls are recorded with their futures."""

    def __init__(self, role: str, group: WorkerGroup, calls: list[Call]) -> None:
        self._role, self._group, self._calls = role, group, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if not callable(method):
            return method

        def recorded(*arguments: object, **keywords: object) -> Future[object]:
            result: Future[object] = method(*arguments, **keywords)
            self._calls.append(Call(self._role, name, result))
            return result

        return recorded


def _finished(calls: list[Call]) -> Iterator[StateDict]:
    """The calls as tensors and plain values, up to the first one without a result."""
    for call in calls:
        if not call.result.done():
            return
        try:
            result = call.result.result()
        except Exception:  # the step's own failure, which is recorded as such
            return
        kind = "batch" if isinstance(result, Batch) else "value"
        packed = batch_to_tree(result) if isinstance(result, Batch) else to_json_values(result)
        yield {"role": call.role, "method": call.method, kind: packed}


def read_record(folder: str) -> StepRecord:
    """Read a record; raises CheckpointError for a folder that has none, or a damaged one."""
    record = Folder(folder)
    data = record.read(_FILE)
    try:
        tree = torch.load(io.BytesIO(data), weights_only=True)
        version = tree["version"]
        if version != _VERSION:
            raise CheckpointError(
                f"{record} is a record of version {version}, this program reads {_VERSION}; replay "
                "it with the version of the code that wrote it"
            )
        calls = []
        for call in tree["calls"]:
            value = batch_from_tree(call["batch"]) if "batch" in call else call["value"]
            calls.append(Call(call["role"], call["method"], Ready(value)))
        names = ("step", "ranks", "threads", "metrics", "error")
        return StepRecord(
            folder=record,
            config=RLConfig.model_validate(tree["config"]),
            run=tree["run"] | {"lora": LoRAConfig.model_validate(tree["run"]["lora"])},
            prompts=batch_from_tree(tree["prompts"]),
            calls=calls,
            **{name: tree[name] for name in names},
        )
    except EngineError:
        raise
    except Exception as error:  # torch and pydantic name what they can't read in many ways
        raise CheckpointError(
            f"{record}/{_FILE} can't be read as a record ({type(error).__name__}); it is damaged "
            "or of another program: record the step again"
        ) from error


class _RecordedGroup:
    """Stands for a role that is not run again: gives out its results in the order of the calls."""

    def __init__(self, record: StepRecord, calls: Iterator[Call], role: str) -> None:
        self._record, self._calls, self._role = record, calls, role

    def __getattr__(self, method: str) -> Callable[..., Future[object]]:
        return lambda *arguments, **keywords: self._next(method)

    def _next(self, method: str) -> Future[object]:
        call = next(self._calls, None)
        if call is None:
            failed = self._record.error
            why = f"it failed there: {failed}" if failed else "this code asks for more"
            raise CheckpointError(f"the record ends before {self._role}.{method}: {why}")
        if (call.role, call.method) != (self._role, method):
            raise CheckpointError(
                f"the step asks for {self._role}.{method} where the record has "
                f"{call.role}.{call.method}; replay it with the code that recorded it"
            )
        return call.result


def replay(
    record: StepRecord, model: str = "", threads: int = 0, *, on_ranks: bool = False
) -> dict[str, float]:
    """The metrics of the step, run again in this process, or on ranks as it was recorded.

    `model`: where the start model is now; `threads`: of a process, as recorded without. Raises the
    EngineError that the step ends with, CheckpointError for a damaged record.
    """
    import_plugins(record.config.plugins)
    dataflow = choose_dataflow(record.config.algorithm)
    needs, used = run_spec.run_roles(record.config)
    again = used & frozenset(_RUN_AGAIN)
    run = record.run | ({"model_path": model} if model else {})
    config = record.config if on_ranks else _one_rank(record.config)
    spec = run_spec.RunSpec(config=config, needs=needs, roles=again, **run)
    size = run_spec.layout_of("actor", config).world_size
    gpus = next((p.gpus for p in config.trainer.pools if "actor" in p.roles), 0.0)
    pool = Pool(run_spec.default_pools(again)[0], size, float(threads or record.threads), gpus)
    limit = record.config.trainer.step_timeout_s
    kind: Literal["local", "ray"] = "local" if size == 1 else "ray"
    placement = Placement((pool,), kind=kind, call_timeout_s=limit)
    with launch(placement, run_spec.role_specs(spec)) as live:
        calls = iter(record.calls)
        recorded = {
            name: cast(WorkerGroup, _RecordedGroup(record, calls, name)) for name in used - again
        }
        more_prompts, method = _MORE_PROMPTS
        prompts = _RecordedGroup(record, calls, more_prompts)
        algo = Algo(
            record.config,
            needs,
            max_response_length=spec.max_response_length,
            seed=spec.seed,
            more_prompts=lambda: cast(Batch, getattr(prompts, method)().result()),
        )
        groups = {name: live[name] for name in again}
        store = CheckpointStore((record.folder / _STATE).uri)
        if (state := store.latest()) is None:
            raise CheckpointError(f"{store.root} has no checkpoint; record the step again")
        learning = {name: groups[name] for name in _LEARNING if name in groups}
        begin = Saver(store, learning, limit).restore(state)
        algo.load_state_dict(begin["algo"])
        set_process_rng(begin["rng"])
        algo.step, start = record.step, time.perf_counter()
        roles = Roles(groups | recorded, close=lambda: None)
        result = dataflow.step(roles, record.prompts, algo)
        updates = [update.result() for update in result.updates]
        metrics = step_metrics(result.batch.resolve(), time.perf_counter() - start)
        metrics |= algo.take_metrics()
        for update in updates:
            metrics |= update
        return metrics


def _one_rank(config: RLConfig) -> RLConfig:
    """The settings with every role on one rank, and no process that only decodes."""
    one = {
        **dict.fromkeys(("dp", "fsdp", "sp", "tp", "pp"), 1),
        **dict.fromkeys(("offload_params", "offload_policy", "offload_optimizer"), False),
    }
    critic = config.critic.parallel
    changes: dict[str, object] = {"actor.parallel": config.actor.parallel.replaced(one)}
    changes |= {"critic.parallel": critic.replaced(one)} if critic else {}
    changes |= {"reference.offload_params": False, "rollout.tensor_parallel_size": 1}
    sync = {"trainer.pools": (), "trainer.mode": "sync", "trainer.placement": "local"}
    return config.replaced(changes | sync)


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


def compare(record: StepRecord, metrics: dict[str, float]) -> list[Compared]:
    """Every metric that a replay has, without times, and those of updates that it lacks."""
    gone = [name for name in record.metrics if name.startswith(("actor/", "critic/"))]
    names = dict.fromkeys([*metrics, *gone])
    return [
        Compared(name, record.metrics.get(name, math.nan), metrics.get(name, math.nan))
        for name in names
        if not name.startswith("perf/")
    ]
