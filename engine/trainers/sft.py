"""The warm start: supervised fine-tuning on prompt/response pairs.

The loss is on response tokens only; micro-batches have rows of similar length within a token
budget, and their gradients add up to that of the whole batch. Of a model with adapters, on a
quantised base or not, only these are trained. The caller reads rows. What a rank computes is in
`engine.workers.sft`, where ranks are in `sft_ranks`, what is saved in `sft_checkpoints`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.checkpoint import CheckpointStore, Saver
from engine.checkpoint.lock import hold_lock
from engine.config import SFTConfig
from engine.controller.roles import Roles
from engine.data.collate import collate_completions
from engine.errors import ConfigError, DataError
from engine.runtime.save_policy import StartModel
from engine.trainers.preemption import PreemptionNotice
from engine.trainers.run_settings import flat
from engine.trainers.sft_checkpoints import MAY_DIFFER, OnResume, SFTCheckpoints
from engine.trainers.sft_ranks import (
    ROLE,
    done,
    is_on_ray,
    launch_ranks,
    make_worker,
    sft_dtype,
)
from engine.trainers.shutdown import (
    ensure_last_save,
    finish_save_on_error,
    lost_workers_explained,
    raise_preempted,
)

if TYPE_CHECKING:
    from engine.controller.roles import SFTGroup
    from engine.workers.sft import SFTWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One encoded pair."""

    prompt_ids: list[int]  # e.g. [2, 17, 9, 3]
    response_ids: list[int]  # ends with the end token, e.g. [21, 30, 1]


OnStep = Callable[[int, int, dict[str, float]], None]  # step (1-based), total steps, metrics


class SFTTrainer:
    """Fine-tunes a model, in this process or on ranks of a layout (`sft.parallel`).

    A model in memory is trained in place, on the device of this process, which it is moved to; of a
    `StartModel` each rank loads what it keeps. A context manager: leaving it stops the ranks.

    `on_step(step, total_steps, metrics)` is called after every optimizer step with `sft/loss`
    (mean negative log-likelihood a response token, nats), `sft/lr`, `sft/grad_norm`,
    `sft/tokens_per_s`, and, where one was taken, `sft/validation_loss`. `on_resume(folder, step)`
    is called after a resumption.
    """

    def __init__(
        self,
        model: PreTrainedModel | StartModel,
        pad_token_id: int,
        config: SFTConfig,
        *,
        seed: int,
        start: str = "",
        on_step: OnStep = lambda step, total, metrics: None,
    ) -> None:
        """`start` tells which weights `model` begins with, e.g. the digest of their folder.

        Raises ConfigError or PlacementError before any rank starts.
        """
        if isinstance(model, StartModel):
            model = replace(model, dtype=sft_dtype(model.dtype, model.path, config))
        self._worker: SFTWorker | None = None
        self._roles: Roles | None = None
        if is_on_ray(config):
            self._roles = launch_ranks(model, config, seed)
        else:
            self._worker = make_worker(model, config, seed)
        self.config, self.seed, self.start = config, seed, start
        self.pad_token_id, self.on_step = pad_token_id, on_step
        self.on_resume: OnResume = lambda folder, step: None

    @property
    def model(self) -> PreTrainedModel:
        """The model of a run in this process; raises ConfigError where it is on ranks."""
        if self._worker is None:
            raise ConfigError(
                "the model is on the ranks of sft.parallel; write it with save(folder, tokenizer)"
            )
        model: Any = self._worker.sharded.module
        return model

    def fit(
        self,
        train: Sequence[SFTExample],
        validation: Sequence[SFTExample],
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
            raise DataError("the warm start has no rows; check data.sft_size and the source")
        total = self.total_steps(len(train))
        with self._own_threads_and_draws(), hold_lock(checkpoint_dir):
            done(self._ranks.begin(total))
            saver = self._saver(checkpoint_dir) if checkpoint_dir else None
            settings = self._settings(len(train))
            run = SFTCheckpoints(self._worker, saver, settings, self.on_resume)
            begin, metrics = run.resume(self._store(resume_from) if resume_from else None)
            if begin >= total:
                log.warning("the warm start is at step %d of %d already", begin, total)
            grace_s = self.config.preemption_grace_s
            with PreemptionNotice(grace_s) as notice, finish_save_on_error(saver, notice):
                steps = range(begin, total)
                found = self._train(train, validation, steps, run, notice) or metrics
                ensure_last_save(saver, lambda: run.save(total, found))
                return found

    def _train(
        self,
        train: Sequence[SFTExample],
        validation: Sequence[SFTExample],
        steps: range,
        run: SFTCheckpoints,
        notice: PreemptionNotice,
    ) -> dict[str, float]:
        total = steps.stop
        metrics: dict[str, float] = {}
        for step, rows in enumerate(self._batches(train, total)[steps.start :], steps.start + 1):
            start = time.perf_counter()
            batch = collate_examples([train[i] for i in rows], self.pad_token_id)
            with lost_workers_explained(notice, step):
                updated = done(self._ranks.update(batch))
                seconds = time.perf_counter() - start
                metrics = {f"sft/{name}": value for name, value in updated.items()}
                metrics["sft/tokens_per_s"] = int(batch["attention_mask"].sum()) / seconds
                if validation and (step % self.config.validate_every == 0 or step == total):
                    metrics["sft/validation_loss"] = self.validation_loss(validation)
            self.on_step(step, total, metrics)
            if step == total or step % self.config.save_freq == 0 or notice.received:
                run.save(step, metrics)
            if notice.received and step < total:
                raise_preempted(run.saver, step)
        return metrics

    def total_steps(self, rows: int) -> int:
        """Optimizer steps that the configuration asks for over `rows` examples."""
        by_epochs = math.ceil(self.config.epochs * math.ceil(rows / self._batch_size(rows)))
        return self.config.max_steps or by_epochs

    def validation_loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood a response token, in nats, without dropout."""
        batch = collate_examples(examples, self.pad_token_id)
        return done(self._ranks.validation_loss(batch))["validation_loss"]

    def save(self, folder: str | Path, tokenizer: str | Path) -> None:
        """Write the model, with the tokenizer of another folder, as a Hugging Face folder."""
        done(self._ranks.save(str(folder), str(tokenizer)))

    def close(self) -> None:
        """Stop the ranks, if they are other processes."""
        if self._roles is not None:
            self._roles.close()

    @property
    def _ranks(self) -> SFTWorker | SFTGroup:
        if self._worker is not None:
            return self._worker
        assert self._roles is not None
        return self._roles.sft

    @contextmanager
    def _own_threads_and_draws(self) -> Iterator[None]:
        """In this process, compute with `threads` threads, and leave its generator as it was."""
        if self._worker is None:
            yield
            return
        torch.set_num_threads(self.config.threads or os.cpu_count() or 1)
        with torch.random.fork_rng(devices=[]):
            yield

    def _saver(self, folder: str | Path) -> Saver:
        groups = {} if self._roles is None else {ROLE: self._roles[ROLE]}
        return Saver(self._store(folder), groups, self.config.step_timeout_s)

    def _store(self, folder: str | Path) -> CheckpointStore:
        config = self.config
        restart = config.on_damaged_checkpoints == "restart"
        return CheckpointStore(folder, config.max_checkpoints_to_keep, restart=restart)

    def _settings(self, rows: int) -> dict[str, object]:
        """What a checkpoint records: a resumed run must share it, but for what may change."""
        config = self.config.model_dump(mode="json", exclude=MAY_DIFFER)
        data = {"rows": rows}
        return flat({"sft": config, "seed": self.seed, "data": data, "start": self.start})

    def _batches(self, train: Sequence[SFTExample], total: int) -> list[list[int]]:
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
        return min(self.config.train_batch_size, rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def collate_examples(examples: Sequence[SFTExample], pad_token_id: int) -> Batch:
    """Lay pairs out as completions, their sampling log-probs being none (zeros)."""
    prompts = Batch(
        {"group_ids": torch.arange(len(examples))}, {"prompt_ids": [e.prompt_ids for e in examples]}
    )
    return collate_completions(
        prompts,
        range(len(examples)),
        [e.response_ids for e in examples],
        [[0.0] * len(e.response_ids) for e in examples],
        pad_token_id=pad_token_id,
    ).select(["input_ids", "attention_mask", "responses", "response_mask"])
