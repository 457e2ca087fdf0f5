"""Metrics and records of single RL steps; `python -m engine.replay` runs a recorded step again.

The metrics are of the batch that a step learned from.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self, cast

import torch

from engine.algorithms.masked import Groups
from engine.batch import Batch, Future, Ready
from engine.checkpoint import CheckpointStore, Saver
from engine.checkpoint.state_dict import StateDict, process_rng
from engine.config import LoRAConfig, RLConfig
from engine.config.rl import RECORDS
from engine.controller.groups import Roles, WorkerGroup
from engine.dataflows.algo import Algo
from engine.errors import CheckpointError, ConfigError, EngineError, PreemptedError
from engine.storage.folder import Folder
from engine.trainers.prompts import batch_from_tree, batch_to_tree, to_json_values
from engine.trainers.run_spec import RunSpec, layout_of, placement_of


def step_metrics(batch: Batch, seconds: float) -> dict[str, float]:
    """Reward, lengths, truncation, group signal and throughput of a step.

    Means of rewards leave out the rows whose reward failed.
    """
    width = batch["responses"].shape[1]
    lengths = batch["attention_mask"][:, -width:].sum(1).float()
    tokens = float(batch["attention_mask"].sum())
    failed, last_rows = batch["reward_error"], whole_rows(batch)
    scored = last_rows & ~failed
    scores, group_ids = completion_scores(batch)[scored], batch["group_ids"][scored]
    groups = Groups.of(group_ids, torch.ones_like(group_ids, dtype=torch.bool))
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(correction=0)),
        "reward/errors": float(failed[last_rows].float().mean()),
        "reward/groups_with_signal": float((groups.range(scores) > 0).float().mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(batch["truncated"].float().mean()),
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
    }
    if "has_format" in batch:
        metrics["reward/format_rate"] = float(batch.columns["has_format"].astype(float).mean())
    return metrics | reward_metrics(batch, "reward") | episode_metrics(batch, "episode")


def validation_metrics(batch: Batch) -> dict[str, float]:
    """`validation/reward`, the mean of all completions; of several a prompt also `reward_best`, the
    mean over prompts of the best one. `reward_metrics` and `episode_metrics` below `validation/`.
    """
    last_rows = whole_rows(batch)
    scores, groups = completion_scores(batch)[last_rows], batch["group_ids"][last_rows]
    metrics = {"validation/reward": float(scores.mean())}
    members = torch.unique(groups, return_inverse=True)[1]
    if (count := int(members.max()) + 1) < len(scores):
        best = torch.full((count,), -torch.inf).scatter_reduce(0, members, scores.float(), "amax")
        metrics["validation/reward_best"] = float(best.mean())
    metrics |= reward_metrics(batch, "validation")
    return metrics | episode_metrics(batch, "validation/episode")


def completion_scores(batch: Batch) -> torch.Tensor:
    """Each row's score `[B]`; that of the whole episode, where it has several rows."""
    scores = batch["token_level_scores"].sum(1)
    if "episode_ids" not in batch:
        return scores
    episode = torch.unique(batch["episode_ids"], return_inverse=True)[1]
    return torch.zeros_like(scores).index_add(0, episode, scores)[episode]


def whole_rows(batch: Batch) -> torch.Tensor:
    """One row of each completion, bool `[B]`: the last, where an episode has several."""
    if "continues" in batch:
        return ~batch["continues"]
    return torch.ones(len(batch), dtype=torch.bool)


def episode_metrics(batch: Batch, prefix: str) -> dict[str, float]:
    """Turns, tokens, ends and what environments said, of a batch of episodes; else nothing.

    Numbers and booleans of `info` that all finished episodes have are averaged.
    """
    if "episode_turns" not in batch:
        return {}
    rows = whole_rows(batch)
    columns = {name: values[rows.numpy()] for name, values in batch.columns.items()}
    turns, ends = columns["episode_turns"].astype(float), columns["episode_end"]
    width = batch["responses"].shape[1]
    response, sampled = batch["attention_mask"][:, -width:].sum(), batch["response_mask"].sum()
    metrics = {
        f"{prefix}/turns_mean": float(turns.mean()),
        f"{prefix}/turns_max": float(turns.max()),
        f"{prefix}/observed_tokens": float(response - sampled) / len(turns),
        f"{prefix}/environment_s": float(columns["environment_seconds"].astype(float).mean()),
    }
    for end in ("done", "turns", "tokens", "seconds", "turn_seconds", "failed"):
        metrics[f"{prefix}/end_{end}"] = float((ends == end).mean())
    metrics[f"{prefix}/dropped"] = float(batch["episode_failed"][rows].float().mean())
    infos = [info for info, end in zip(columns["episode_info"], ends, strict=True) if end == "done"]
    for name in sorted(set.intersection(*map(set, infos)) if infos else ()):
        values = [info[name] for info in infos]
        if all(isinstance(value, bool | int | float) for value in values):
            metrics[f"{prefix}/{name}"] = sum(map(float, values)) / len(values)
    return metrics


def reward_metrics(batch: Batch, prefix: str) -> dict[str, float]:
    """Share of right completions and means of the components, of all and by source.

    A batch of one source has no metrics by source. Rows whose reward failed count as wrong, and
    are left out of means.
    """
    last_rows = whole_rows(batch)
    scored = last_rows & ~batch["reward_error"]
    right = torch.tensor(batch.columns["reward_correct"].astype(float))
    means: dict[str, torch.Tensor] = {}
    if "reward_components" in batch:
        names = batch.columns["reward_component_names"][0]
        means = dict(zip(names, batch["reward_components"].unbind(1), strict=True))
    metrics = {f"{prefix}/correct": float(right[last_rows].mean())}
    metrics |= {f"{prefix}/{name}": float(column[scored].mean()) for name, column in means.items()}
    means = {"mean": completion_scores(batch)} | means
    sources = [str(source) for source in batch.columns.get("data_source", ())]
    names = sorted(set(sources))
    for source in names if len(names) > 1 else ():
        rows = last_rows & torch.tensor([other == source for other in sources])
        metrics[f"{prefix}/{source}/correct"] = float(right[rows].mean())
        if (rows & scored).any():
            for name, column in means.items():
                metrics[f"{prefix}/{source}/{name}"] = float(column[rows & scored].mean())
    return metrics


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """How many updates behind the trainer's `version` the completions were started."""
    behind = (version - batch["policy_version"]).float()
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


log = logging.getLogger(__name__)

RUN_AGAIN = ("actor", "reference", "teacher", "critic")  # others' results are part of the record
STATE = "state"
_LEARN = ("actor", "critic")  # of those: have a state
_FILE = "step.pt"
_VERSION = 1
_RUN = ("model_path", "max_response_length", "max_model_len", "seed", "dtype")
_MORE_PROMPTS = ("prompts", "next_batch")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step whose result is recorded."""

    role: str  # e.g. "rollout"
    method: str  # e.g. "generate"
    result: Future[object]


@dataclass
class OpenRecord:
    """What a step fills in while it runs; `roles` note the calls that are made through them."""

    step: int
    roles: Roles
    calls: list[Call] = field(default_factory=list)
    prompts: Batch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A record that was read."""

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


class _RecordingGroup:
    """A worker group whose calls are recorded with their futures."""

    def __init__(self, group: WorkerGroup, calls: list[Call]) -> None:
        self._group, self._calls = group, calls

    def __getattr__(self, name: str) -> object:
        method = getattr(self._group, name)
        if not callable(method):
            return method

        def recorded(*arguments: object, **keywords: object) -> Future[object]:
            result: Future[object] = method(*arguments, **keywords)
            self._calls.append(Call(self._group.role, name, result))
            return result

        return recorded


class StepRecorder:
    """Records the steps that `debug` asks for, in `recorded/` under the folder of checkpoints.

    A record is a folder: `state/`, a checkpoint of what learns from just before the step, and
    `step.pt`: settings, prompts, what rollout and rewards gave, and what was measured.

    A context manager around the steps: it records the one that fails. What can't be written costs
    a warning, never the run. Raises ConfigError without a folder.
    """

    def __init__(self, spec: RunSpec, roles: Roles, algo: Algo, root: Folder | None) -> None:
        self._spec, self._roles, self._algo = spec, roles, algo
        self._settings, self._root = spec.config.debug, root
        self._open: tuple[OpenRecord, Folder] | None = None  # of the step that is being recorded
        self._more_prompts = algo.more_prompts
        if root is None and self._settings.enabled:
            raise ConfigError(
                "debug.record_steps and debug.record_failed write beside the checkpoints, and this "
                "run has none; give fit a checkpoint_dir, or leave them out"
            )

    def begin(self, step: int) -> OpenRecord:
        """What a step fills in, which goes on until `end`; it is recorded if it is to be."""
        record = OpenRecord(step, self._roles)
        chosen = step in self._settings.record_steps
        if self._root is None or not (chosen or self._settings.record_failed):
            return record
        folder = self._root / RECORDS / f"step_{step}"
        if self._try(lambda: self._save_state(folder, step)):
            record.roles = self._recording_roles(record.calls)
            self._algo.more_prompts = _recording_prompts(self._more_prompts, record.calls)
            self._open = record, folder
        return record

    def end(self, failure: str = "") -> None:
        """Write the step's record if it was asked for, failed, or measured what is not finite."""
        self._algo.more_prompts = self._more_prompts
        if self._open is None:
            return
        (record, folder), self._open = self._open, None
        finite = all(map(math.isfinite, record.metrics.values()))
        if failure or not finite or record.step in self._settings.record_steps:
            self._try(lambda: self._write(record, folder, failure))
        else:
            self._try(folder.remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write the record of a step that failed; none of one that was pre-empted."""
        if isinstance(error, PreemptedError) and self._open is not None:
            self._try(self._open[1].remove)
        elif isinstance(error, Exception):
            self.end(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _save_state(self, folder: Folder, step: int) -> None:
        """Write the models and optimizers, before the step changes them."""
        groups = {name: self._roles[name] for name in _LEARN if name in self._roles}
        limit = self._spec.config.trainer.step_timeout_s
        saver = Saver(CheckpointStore((folder / STATE).uri, keep_last=1), groups, limit)
        saver.save(step - 1, {"algo": self._algo.state_dict(), "rng": process_rng()})
        saver.wait()

    def _recording_roles(self, calls: list[Call]) -> Roles:
        groups = {
            name: self._roles[name]
            if name in RUN_AGAIN
            else cast(WorkerGroup, _RecordingGroup(self._roles[name], calls))
            for name in self._roles
        }
        return Roles(groups, close=lambda: None, recorder=self._roles.recorder)

    def _write(self, record: OpenRecord, folder: Folder, failure: str) -> None:
        spec, config = self._spec, self._spec.config
        if record.prompts is None:
            raise CheckpointError("the step failed before it had prompts")
        pool = next(p for p in placement_of(spec).pools if "actor" in p.roles)
        tree = {
            "version": _VERSION,
            "step": record.step,
            "config": config.model_dump(mode="json"),
            "run": {name: getattr(spec, name) for name in _RUN}
            | {"lora": spec.lora.model_dump(mode="json")},
            "ranks": layout_of("actor", config).world_size,
            "threads": max(1, int(pool.cpus)),
            "prompts": batch_to_tree(record.prompts),
            "calls": list(_finished(record.calls)),
            "metrics": {name: float(value) for name, value in record.metrics.items()},
            "error": failure,
        }
        file = io.BytesIO()
        torch.save(tree, file)
        folder.write(_FILE, [file.getbuffer()])
        log.warning("step %d is recorded: python -m engine.replay %s", record.step, folder)

    def _try(self, action: Callable[[], None]) -> bool:
        """Whether the action succeeded; a failure is a warning."""
        try:
            action()
        except Exception as error:  # whatever it is: the run goes on
            log.warning("no record of this step (%s): %s", type(error).__name__, error)
            return False
        return True


def _recording_prompts(
    more: Callable[[], Batch] | None, calls: list[Call]
) -> Callable[[], Batch] | None:
    def recorded() -> Batch:
        assert more is not None
        batch = more()
        calls.append(Call(*_MORE_PROMPTS, Ready(batch)))
        return batch

    return None if more is None else recorded


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
