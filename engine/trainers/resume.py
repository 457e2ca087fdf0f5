"""How a run ends and goes on: pre-emption, retries, checkpoints, settings, the final step."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, Literal, NoReturn, Self, TypeVar

from engine import errors
from engine.checkpoint import Checkpoint, CheckpointStore, Saver, find_latest
from engine.checkpoint.state_dict import StateDict
from engine.config import RLConfig
from engine.console import say
from engine.controller.groups import Roles
from engine.controller.local_groups import threads_left_behind
from engine.errors import CheckpointError, first_line
from engine.tracking.connection import flatten
from engine.trainers.huggingface_export import BackgroundExporter
from engine.trainers.run_spec import RunSpec
from engine.workers.role import StatefulWorker

log = logging.getLogger(__name__)

_MAX_LISTED = 3  # changed settings in an error message


def changed_settings(
    checkpoint: Checkpoint,
    settings: Mapping[str, object],
    may_change: Collection[str],
    defaults: Mapping[str, object],
) -> list[StateDict]:
    """What changed since the run began, an entry a change: those of earlier resumptions first.

    An entry is `{"step": 40, "setting": "rl.actor.optim.lr", "before": 1.0, "after": 0.1}`. New
    ones are logged. `may_change` are names of settings, or of sections as "rl.actor.optim". A
    setting that the checkpoint's version of the engine did not have counts with its value in
    `defaults`. Raises CheckpointError where another setting has changed.
    """
    there = checkpoint.state.get("settings")
    if not isinstance(there, dict):
        raise _refused(checkpoint, "another version of the engine wrote it")
    there = {name: defaults[name] for name in settings.keys() & defaults.keys()} | there
    names = sorted(n for n in there.keys() | settings.keys() if there.get(n) != settings.get(n))
    differences = {n: f"{n} is {there.get(n)!r} there and {settings.get(n)!r} here" for n in names}
    allowed = tuple(f"{name}." for name in may_change)
    refused = [differences[n] for n in names if not f"{n}.".startswith(allowed)]
    if len(refused) > _MAX_LISTED:
        refused[_MAX_LISTED:] = [f"{len(refused) - _MAX_LISTED} more"]
    if refused:
        raise _refused(checkpoint, ", ".join(refused))
    if differences:
        log.warning("%s: settings changed: %s", checkpoint.folder, ", ".join(differences.values()))
    new = [
        {"step": checkpoint.step, "setting": n, "before": there.get(n), "after": settings.get(n)}
        for n in names
    ]
    return [*checkpoint.state.get("changed_settings", []), *new]


def _refused(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder} was written under other settings: {why}; resume with its settings, "
        "or give another checkpoint folder (of a command line, trainer.experiment_name=NAME)"
    )


SCORE = "validation/reward"  # by which the best checkpoint is kept

_LOAD_ORDER = ("actor", "rollout", "critic", "sampler")  # actor first: others serve its weights
_MAY_DIFFER: dict[str, bool | set[str]] = {
    "trainer": True,
    "actor": {"parallel", "max_tokens_per_micro_batch"},
    "critic": {"parallel", "max_tokens_per_micro_batch"},
    "reference": True,
    "debug": True,
    "rollout": {"tensor_parallel_size", "val_kwargs"},
}
# Read again at every step and part of no saved state, so that a resumed run may have others.
MAY_CHANGE = (
    *("rl.actor.optim", "rl.actor.clip_ratio", "rl.actor.clip_ratio_low"),
    *("rl.actor.clip_ratio_high", "rl.actor.clip_ratio_c", "rl.actor.entropy_coeff"),
    *("rl.actor.kl_loss_coef", "rl.rollout.agent.save_freq_s", "rl.rollout.agent.num_workers"),
    *("rl.rollout.agent.concurrency", "rl.critic.optim", "rl.critic.cliprange_value"),
    *("rl.reward.timeout_s", "rl.reward.on_error", "rl.rollout.max_num_seqs"),
    "rl.rollout.vllm.gpu_memory_utilization",  # both are chosen by the card's memory
)


def make_saver(folder: str | Path, roles: Roles, spec: RunSpec) -> Saver:
    settings = spec.config.trainer
    store = CheckpointStore(
        folder,
        keep_last=settings.max_checkpoints_to_keep,
        metric=SCORE,
        restart=settings.on_damaged_checkpoints == "restart",
    )
    stateful = sorted(  # without what stands for a role
        r for r in roles if roles[r].role == r and issubclass(roles[r].worker_class, StatefulWorker)
    )
    ordered = dict.fromkeys((*_LOAD_ORDER, *stateful))
    groups = {role: roles[role] for role in ordered if role in stateful}
    exporter = None
    if settings.save_huggingface:
        exporter = BackgroundExporter(store, spec.model_path, settings.step_timeout_s)
    return Saver(store, groups, settings.step_timeout_s, exporter)


def save_episodes(
    folder: str | Path, before: str | Path | None, roles: Roles, spec: RunSpec
) -> None:
    """Have mode sync save a step's episodes beside its checkpoints while they are rolled out.

    They go on from there, or from `before`, the folder that the run resumes from.
    """
    if not spec.config.rollout.multi_turn.enable or spec.config.trainer.mode != "sync":
        return
    settings = run_settings(spec.config, spec.max_response_length, spec.seed)
    known = {name: value for name, value in settings.items() if not name.startswith(MAY_CHANGE)}
    text = json.dumps([known, spec.model_path, spec.dtype, spec.max_model_len], default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    roles["rollout"].save_episodes(str(folder), digest, str(before or "")).result()


def run_settings(config: RLConfig, max_response_length: int, seed: int) -> dict[str, object]:
    """The settings that a checkpoint records, by dotted name: a resumed run must share them.

    Those in `MAY_CHANGE` may have changed; length, save frequency, placement, layouts and deadlines
    are left out.
    """
    trainer = config.trainer
    rl = config.model_dump(mode="json", exclude=_MAY_DIFFER)
    recorded = {"mode": trainer.mode, "train_batch_size": trainer.train_batch_size}
    data = {"max_response_length": max_response_length}
    return flatten({"rl": rl | {"trainer": recorded}, "data": data, "seed": seed})


Rule = Literal["best", "last"]
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class FinalModel:
    step: int
    last: int  # step of the run
    score: float | None  # mean reward on the validation rows; None: not validated at that step
    rule: Rule
    checkpoint: str = ""  # that has the policy; empty: the trainer itself does

    def __str__(self) -> str:
        """E.g. `step 40 of 80, the best by validation (0.812)`."""
        shown = "" if self.score is None else f" ({self.score:.3f})"
        why = "the best by validation" if self.rule == "best" and shown else "the last"
        return f"step {self.step} of {self.last}, {why}{shown}"

    def metrics(self) -> Metrics:
        """The same as metrics of the run, e.g. {"final/step": 40.0, "final/last_step": 80.0, …}."""
        score = {} if self.score is None else {"final/validation_reward": self.score}
        return {"final/step": float(self.step), "final/last_step": float(self.last), **score}


def is_new_best(history: Sequence[Metrics]) -> bool:
    """Whether the last of the steps has the highest validation reward so far, or equals it."""
    return any(row is history[-1] for row in _ranked(history)[:1])


def choose_final_model(
    rule: Rule, history: Sequence[Metrics], store: CheckpointStore
) -> FinalModel:
    """The step to hand over, from a finished run's history (a row a step, at least one).

    `best` is the highest validation reward, the later one of equals; without validation the last
    step. Where a better step's checkpoint is gone, a warning says so and the next one counts.
    """
    last = history[-1]
    end = int(last["step"])
    for better, row in enumerate(_ranked(history) if rule == "best" else ()):
        step = int(row["step"])
        checkpoint = None if row is last else store.newest_of(step)
        if row is not last and checkpoint is None:
            continue
        if better:
            log.warning(
                "step %d is handed over: of %d steps with a better validation reward there is no "
                "checkpoint (a save failed, or the folder was changed)",
                step,
                better,
            )
        address = "" if checkpoint is None else checkpoint.folder
        return FinalModel(step, end, row[SCORE], "best", address)
    return FinalModel(end, end, last.get(SCORE), rule)


def carry_best(saver: Saver, history: Sequence[Metrics], resumed: Checkpoint) -> None:
    """Copy the best step's checkpoint from the folder that a run resumed from into its own."""
    ranked = _ranked(history)
    if not ranked or ranked[0] is history[-1]:  # the run resumed from the best step itself
        return
    step = int(ranked[0]["step"])
    try:
        best = CheckpointStore(resumed.folder.rpartition("/")[0]).newest_of(step)
        if best is not None:
            saver.wait()  # its commit removes folders that it doesn't know
            saver.store.adopt(best)
    except CheckpointError as error:
        log.warning("the best step so far, %d, may be lost: %s", step, error)


def _ranked(history: Sequence[Metrics]) -> list[Metrics]:
    """The validated steps, best first, the later one of equals before the other."""
    measured = [row for row in history if math.isfinite(row.get(SCORE, math.nan))]
    return sorted(measured, key=lambda row: (row[SCORE], row["step"]), reverse=True)


class PreemptionNotice:
    """Watches for SIGTERM while training runs; a context manager.

    After the signal `received` is true, and the training code has `grace_s` seconds to finish its
    step and save; then PreemptedError is raised wherever the main thread is. In another thread,
    where Python delivers no signals, `announce_preemption` tells it, and nothing is raised here.
    """

    elsewhere: ClassVar[list[PreemptionNotice]] = []  # those outside of the main thread

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._at = grace_s, 0.0
        self.step = 0  # the one that is being taken, for messages
        self._main = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def received(self) -> bool:
        return self._at > 0.0

    def seconds_left(self) -> float:
        """Seconds until the deadline; `grace_s` before the signal."""
        if not self.received:
            return self._grace_s
        return max(0.0, self._at + self._grace_s - time.monotonic())

    def __enter__(self) -> Self:
        if self._main:
            handlers = ((signal.SIGTERM, self._on_sigterm), (signal.SIGALRM, self._on_deadline))
            self._before = {number: signal.signal(number, handler) for number, handler in handlers}
        else:
            self.elsewhere.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        else:
            self.elsewhere.remove(self)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            self.announce()

    def announce(self) -> None:
        """Tell the training code that the machine is about to be taken away."""
        if not self.received:
            self._at = time.monotonic()
            log.warning(
                "SIGTERM: the current step is finished and saved, within %g s", self._grace_s
            )

    def _on_deadline(self, number: int, frame: FrameType | None) -> NoReturn:
        raise errors.PreemptedError(
            f"pre-empted, and no step was finished and saved in {self._grace_s:g} s; the run "
            "resumes from the checkpoint before (rl.trainer.save_freq, trainer.preemption_grace_s)"
        )


def announce_preemption() -> bool:
    """Tell training outside of the main thread of a SIGTERM; return whether there is any."""
    for notice in PreemptionNotice.elsewhere:
        notice.announce()
    return bool(PreemptionNotice.elsewhere)


def ensure_last_save(saver: Saver | None, save: Callable[[], None]) -> None:
    """Wait for the last save; if it failed, start it once more with `save`.

    A second failure is logged as an error and not raised: the trained model is worth more than its
    last checkpoint, and the caller saves it.
    """
    if saver is None or _is_durable(saver):
        return
    save()
    if not _is_durable(saver):
        log.error(
            "the last step, %d, has NO CHECKPOINT: its save failed twice. The trained model is "
            "handed over all the same; a run that is started again trains once more from %s. Look "
            "at %s before it is needed",
            saver.unsaved_step,
            _next_start(saver),
            saver.store.root,
        )


def raise_preempted(saver: Saver | None, step: int) -> NoReturn:
    """Wait for the save of `step`, if the run has checkpoints, and raise PreemptedError."""
    if saver is None:
        raise errors.PreemptedError(
            f"pre-empted after step {step}, without a checkpoint folder: the run starts again from "
            "the beginning"
        )
    _is_durable(saver)
    saved = "" if saver.unsaved_step is None else ", which was not saved"
    raise errors.PreemptedError(
        f"pre-empted after step {step}{saved}; the run continues from {_next_start(saver)}"
    )


@contextmanager
def finish_save_on_error(saver: Saver | None, notice: PreemptionNotice) -> Iterator[None]:
    """Give the save in flight as long as a pre-emption notice would, on any exception.

    After an interruption it says from which checkpoint a run that is started again continues.
    """
    try:
        yield
    except BaseException as error:
        if saver is not None:
            saver.drain(notice.seconds_left())
        if saver is not None and isinstance(error, KeyboardInterrupt | SystemExit):
            start = _next_start(saver)
            say(f"interrupted in step {notice.step}; started again, the run continues from {start}")
        if saver is None or not isinstance(error, errors.DivergedError):
            raise
        raise errors.DivergedError(
            f"{error}; the last good step is that of {_next_start(saver)}: a run that is started "
            "again with a lower learning rate continues from there"
        ) from error


@contextmanager
def lost_workers_explained(notice: PreemptionNotice) -> Iterator[None]:
    """Raise PreemptedError for workers that are lost after a notice: they may be stopped first."""
    try:
        yield
    except errors.WorkerError as error:
        if not notice.received:
            raise
        raise errors.PreemptedError(
            f"pre-empted in step {notice.step}, whose workers are gone; the run continues from its "
            "last checkpoint"
        ) from error


def _next_start(saver: Saver) -> str:
    """Where a run that is started again begins; files are not hashed, which can take minutes."""
    try:
        names = saver.store.complete()
    except errors.CheckpointError as error:
        return f"the newest good checkpoint in {saver.store.root}, which can't be read now: {error}"
    return (saver.store.root / names[-1]).uri if names else "the beginning"


def _is_durable(saver: Saver) -> bool:
    """Wait for the save in flight; return whether the last one is durable. Logs a failure."""
    try:
        saver.wait()
    except errors.CheckpointError as error:
        log.warning("no checkpoint at step %s: %s", saver.unsaved_step, error)
    return saver.unsaved_step is None


T = TypeVar("T")


def run_with_retries(
    make: Callable[[], AbstractContextManager[T]],
    work: Callable[[T], None],
    checkpoint_dir: str | Path,
    max_attempts: int,
) -> None:
    """Call `work` with a trainer; after a WorkerError again with a new one, which resumes.

    A trainer rank isn't replaced alone, as a rollout worker is: all ranks share each step. Raises
    the last WorkerError when `max_attempts` attempts in a row got past no new checkpoint (so rare
    failures in a long run don't count), or where a call in this process can't be ended.
    """
    failed = newest = 0  # attempts that got past no new checkpoint; the step of the newest
    while True:
        try:
            with make() as trainer:
                work(trainer)
            return
        except errors.WorkerError as error:
            try:
                checkpoint = find_latest(checkpoint_dir)
            except errors.DamagedCheckpointError:  # the next attempt says that all are
                checkpoint = None
            step, cause = checkpoint.step if checkpoint else 0, first_line(error)
            failed = 1 if step > newest else failed + 1
            newest = max(newest, step)
            if failed >= max_attempts or threads_left_behind():
                raise
            log.warning("a worker was lost (%s); resuming from step %d", cause, step)
