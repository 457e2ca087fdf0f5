"""The loop of training on rows of a dataset: batches, steps, checkpoints, resumption.

The warm start (`sft`), preference learning (`preference`) and reward models (`reward_model`) are
this loop over examples of their own. What a rank computes is in `engine.workers`, where ranks are
in `offline_ranks`, what is saved in `offline_checkpoints`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.checkpoint import CheckpointStore, Saver
from engine.checkpoint.lock import hold_lock
from engine.config import OfflineConfig
from engine.controller.roles import Roles
from engine.errors import ConfigError, DataError
from engine.runtime.save_policy import StartModel
from engine.trainers.offline_checkpoints import OfflineCheckpoints, OnResume, recorded
from engine.trainers.offline_ranks import done, is_on_ray, launch_ranks, make_worker, offline_dtype
from engine.trainers.preemption import PreemptionNotice
from engine.trainers.run_settings import flat
from engine.trainers.shutdown import (
    ensure_last_save,
    finish_save_on_error,
    lost_workers_explained,
    raise_preempted,
)
from engine.workers.sft import OfflineWorker

log = logging.getLogger(__name__)

Example = TypeVar("Example")
W = TypeVar("W", bound=OfflineWorker)
OnStep = Callable[[int, int, dict[str, float]], None]  # step (1-based), total steps, metrics


class OfflineTrainer(ABC, Generic[Example, W]):
    """Trains a model on examples, in this process or on ranks of a layout (`parallel`).

    A model in memory is trained in place, on the device of this process, which it is moved to; of a
    `StartModel` each rank loads what it keeps. A context manager: leaving it stops the ranks.

    `on_step(step, total_steps, metrics)` is called after every optimizer step; names of metrics
    begin with the section's. `on_resume(folder, step)` is called after a resumption.
    """

    what: ClassVar[str]  # is trained, e.g. "the warm start"
    no_rows: ClassVar[str]  # what to say where there is nothing to train on
    worker_class: type[W]

    def __init__(
        self,
        model: PreTrainedModel | StartModel,
        pad_token_id: int,
        config: OfflineConfig,
        *,
        seed: int,
        start: str = "",
        on_step: OnStep = lambda step, total, metrics: None,
    ) -> None:
        """`start` tells which weights `model` begins with, e.g. the digest of their folder.

        Raises ConfigError or PlacementError before any rank starts.
        """
        if isinstance(model, StartModel):
            model = replace(model, dtype=offline_dtype(model.dtype, model.path, config))
        self._worker: W | None = None
        self._roles: Roles | None = None
        if is_on_ray(config):
            self._roles = launch_ranks(self.worker_class, model, config, seed)
        else:
            self._worker = make_worker(self.worker_class, model, config, seed)
        self.seed, self.start, self._offline = seed, start, config
        self.pad_token_id, self.on_step = pad_token_id, on_step
        self.on_resume: OnResume = lambda folder, step: None

    @abstractmethod
    def _collate(self, examples: Sequence[Example]) -> Batch:
        """The batch of some examples."""

    @abstractmethod
    def _update(self, batch: Batch) -> dict[str, float]:
        """Take an optimizer step; return its metrics, without the section's name."""

    @abstractmethod
    def _validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Metrics of held-out examples, without the section's name."""

    def _prepare(
        self, train: Sequence[Example], validation: Sequence[Example], folder: str | Path | None
    ) -> tuple[Sequence[Example], Sequence[Example]]:
        """What the start model has to say of the examples, before any step."""
        return train, validation

    @property
    def model(self) -> PreTrainedModel:
        """The model of a run in this process; raises ConfigError where it is on ranks."""
        if self._worker is None:
            raise ConfigError(
                f"the model is on the ranks of {self._offline.section}.parallel; write it with "
                "save(folder, tokenizer)"
            )
        model: Any = self._worker.sharded.module
        return model

    def fit(
        self,
        train: Sequence[Example],
        validation: Sequence[Example] = (),
        checkpoint_dir: str | Path | None = None,
        resume_from: str | Path | None = None,
    ) -> dict[str, float]:
        """Train for the configured epochs or steps; return the last step's metrics.

        With `checkpoint_dir` (a folder or s3://…) a checkpoint is written every `save_freq` steps,
        at the end and on a pre-emption notice (SIGTERM), and training continues from the newest one
        there, or else from the newest one in `resume_from`, whatever layout wrote it. Raises
        DataError when there is nothing to train on, EngineError when training diverges,
        CheckpointError for a checkpoint of other settings or another `start`,
        LockedCheckpointsError while another run uses the folder, PreemptedError after a notice.
        """
        if not train:
            raise DataError(self.no_rows)
        total = self.total_steps(len(train))
        with self._own_threads_and_draws(), hold_lock(checkpoint_dir):
            train, validation = self._prepare(train, validation, checkpoint_dir)
            done(self._ranks.begin(total))
            saver = self._saver(checkpoint_dir) if checkpoint_dir else None
            settings, defaults = self._settings(len(train)), recorded(type(self._offline)())
            section = self._offline.section
            run = OfflineCheckpoints(
                self._worker, saver, section, settings, defaults, self.on_resume
            )
            begin, metrics = run.resume(self._store(resume_from) if resume_from else None)
            if begin >= total:
                log.warning("%s is at step %d of %d already", self.what, begin, total)
            grace_s = self._offline.preemption_grace_s
            with PreemptionNotice(grace_s) as notice, finish_save_on_error(saver, notice):
                steps = range(begin, total)
                found = self._train(train, validation, steps, run, notice) or metrics
                ensure_last_save(saver, lambda: run.save(total, found))
                return found

    def _train(
        self,
        train: Sequence[Example],
        validation: Sequence[Example],
        steps: range,
        run: OfflineCheckpoints,
        notice: PreemptionNotice,
    ) -> dict[str, float]:
        total, config = steps.stop, self._offline
        metrics: dict[str, float] = {}
        for step, rows in enumerate(self._batches(train, total)[steps.start :], steps.start + 1):
            start = time.perf_counter()
            batch = self._collate([train[i] for i in rows])
            with lost_workers_explained(notice, step):
                found = self._update(batch)
                seconds = time.perf_counter() - start
                found["tokens_per_s"] = int(batch["attention_mask"].sum()) / seconds
                if validation and (step % config.validate_every == 0 or step == total):
                    found |= self._validate(validation)
            metrics = {f"{config.section}/{name}": value for name, value in found.items()}
            self.on_step(step, total, metrics)
            if step == total or step % config.save_freq == 0 or notice.received:
                run.save(step, metrics)
            if notice.received and step < total:
                raise_preempted(run.saver, step)
        return metrics

    def total_steps(self, rows: int) -> int:
        """Optimizer steps that the configuration asks for over `rows` examples."""
        return total_steps(self._offline, rows)

    def save(self, folder: str | Path, tokenizer: str | Path) -> None:
        """Write the model, with the tokenizer of another folder, as a Hugging Face folder."""
        done(self._ranks.save(str(folder), str(tokenizer)))

    def close(self) -> None:
        """Stop the ranks, if they are other processes."""
        if self._roles is not None:
            self._roles.close()

    @property
    def _ranks(self) -> W:
        """The worker in this process, or the group of those elsewhere, whose calls are futures."""
        if self._worker is not None:
            return self._worker
        assert self._roles is not None
        group: Any = self._roles[self._offline.section]
        return group

    @contextmanager
    def _own_threads_and_draws(self) -> Iterator[None]:
        """In this process, compute with `threads` threads, and leave its generator as it was."""
        if self._worker is None:
            yield
            return
        torch.set_num_threads(self._offline.threads or os.cpu_count() or 1)
        with torch.random.fork_rng(devices=[]):
            yield

    def _saver(self, folder: str | Path) -> Saver:
        role = self._offline.section
        groups = {} if self._roles is None else {role: self._roles[role]}
        return Saver(self._store(folder), groups, self._offline.step_timeout_s)

    def _store(self, folder: str | Path) -> CheckpointStore:
        config = self._offline
        restart = config.on_damaged_checkpoints == "restart"
        return CheckpointStore(folder, config.max_checkpoints_to_keep, restart=restart)

    def _settings(self, rows: int) -> dict[str, object]:
        """What a checkpoint records: a resumed run must share it, but for what may change."""
        own = {"seed": self.seed, "start": self.start, "data": {"rows": rows}}
        return recorded(self._offline) | flat(own)

    def _batches(self, train: Sequence[Example], total: int) -> list[list[int]]:
        """Row numbers of each of `total` steps; every epoch in a new order.

        A batch is drawn at random and sorted by length only into micro-batches: batches of rows of
        one length would be batches of one answer style, and their token means would weigh the
        short ones many times over.
        """
        generator = torch.Generator().manual_seed(self.seed)
        size = self._batch_size(len(train))
        batches: list[list[int]] = []
        while len(batches) < total:
            order = torch.randperm(len(train), generator=generator).tolist()
            batches += [order[i : i + size] for i in range(0, len(order), size)]
        return batches[:total]

    def _batch_size(self, rows: int) -> int:
        return min(self._offline.train_batch_size, rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def total_steps(config: OfflineConfig, rows: int) -> int:
    """Optimizer steps that a configuration asks for over `rows` examples."""
    size = min(config.train_batch_size, rows)
    return config.max_steps or math.ceil(config.epochs * math.ceil(rows / size))
