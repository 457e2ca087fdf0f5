"""The warm start: supervised fine-tuning on prompt/response pairs.

The loss is on response tokens only; micro-batches have rows of similar length within a token
budget, and their gradients add up to that of the whole batch. Of a model with adapters, on a
quantised base or not, only these are trained. The caller reads rows and saves the model.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.checkpoint.lock import hold_lock
from engine.checkpoint.rank_state import RankState
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.checkpoint.state_dict import StateDict
from engine.config import ParallelConfig, SFTConfig
from engine.data.collate import collate_completions
from engine.errors import CheckpointError, DataError
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.loss_scale import update_metrics
from engine.runtime.sharded_model import Metrics, ShardedModel
from engine.runtime.sharded_train_state import ShardedTrainState
from engine.runtime.token_outputs import LogProbReader, Outputs
from engine.trainers.preemption import PreemptionNotice
from engine.trainers.run_settings import changed_settings, flat
from engine.trainers.shutdown import ensure_last_save, finish_save_on_error, raise_preempted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One encoded pair."""

    prompt_ids: list[int]  # e.g. [2, 17, 9, 3]
    response_ids: list[int]  # ends with the end token, e.g. [21, 30, 1]


OnStep = Callable[[int, int, dict[str, float]], None]  # step (1-based), total steps, metrics
OnResume = Callable[[str, int], None]  # the checkpoint's address, its step


class SFTTrainer:
    """Fine-tunes `model` in place, on the device of this process, which it is moved to.

    `on_step(step, total_steps, metrics)` is called after every optimizer step with `sft/loss`
    (mean negative log-likelihood a response token, nats), `sft/lr`, `sft/grad_norm`,
    `sft/tokens_per_s`, and, where one was taken, `sft/validation_loss`. `on_resume(folder, step)`
    is called after a resumption.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pad_token_id: int,
        config: SFTConfig,
        *,
        seed: int,
        start: str = "",
        on_step: OnStep = lambda step, total, metrics: None,
    ) -> None:
        """`start` tells which weights `model` begins with, e.g. the digest of their folder."""
        parallel = ParallelConfig(packing=config.packing)
        self.sharded = ShardedModel(model, Ranks(Layout()), parallel)
        self.model, self.config, self.seed, self.start = model, config, seed, start
        self.pad_token_id, self.on_step = pad_token_id, on_step
        self.on_resume: OnResume = lambda folder, step: None

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
        there, or else from the newest one in `resume_from`. Raises DataError when there is nothing
        to train on, EngineError when training diverges, CheckpointError for a checkpoint of other
        settings or another `start`, LockedCheckpointsError while another run uses the folder,
        PreemptedError after a notice.
        """
        if not train:
            raise DataError("the warm start has no rows; check data.sft_size and the source")
        torch.set_num_threads(self.config.threads or os.cpu_count() or 1)
        total = self.total_steps(len(train))
        with hold_lock(checkpoint_dir), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # dropout, where the model has any
            state = ShardedTrainState(self.sharded, self.config.optim, total, self.seed)
            saver = Saver(self._store(checkpoint_dir), {}) if checkpoint_dir else None
            run = _Run(state, saver, self._settings(len(train)), self.on_resume)
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
        run: _Run,
        notice: PreemptionNotice,
    ) -> dict[str, float]:
        self.model.train()
        total, optimizer = steps.stop, run.train_state.optimizer
        metrics: dict[str, float] = {}
        for step, rows in enumerate(self._batches(train, total)[steps.start :], steps.start + 1):
            start = time.perf_counter()
            batch = _collate([train[i] for i in rows], self.pad_token_id)
            loss = self._accumulate(batch)
            norm = optimizer.step()
            tokens = int(batch["attention_mask"].sum())
            metrics = {
                "sft/loss": loss,
                "sft/lr": optimizer.lr,
                "sft/tokens_per_s": tokens / (time.perf_counter() - start),
            }
            updated = update_metrics([norm], optimizer.loss_scale)
            metrics |= {f"sft/{name}": value for name, value in updated.items()}
            if validation and (step % self.config.validate_every == 0 or step == total):
                metrics["sft/validation_loss"] = self.validation_loss(validation)
            self.on_step(step, total, metrics)
            if step == total or step % self.config.save_freq == 0 or notice.received:
                run.save(step, metrics)
            if notice.received and step < total:
                raise_preempted(run.saver, step)
        return metrics

    def _store(self, folder: str | Path) -> CheckpointStore:
        config = self.config
        restart = config.on_damaged_checkpoints == "restart"
        return CheckpointStore(folder, config.max_checkpoints_to_keep, restart=restart)

    def _settings(self, rows: int) -> dict[str, object]:
        """What a checkpoint records: a resumed run must share it, but for the optimizer's."""
        may_differ = {
            "skip",
            "save_freq",
            "max_checkpoints_to_keep",
            "on_damaged_checkpoints",
            "preemption_grace_s",
            "threads",
        }
        config = self.config.model_dump(mode="json", exclude=may_differ)
        data = {"rows": rows}
        return flat({"sft": config, "seed": self.seed, "data": data, "start": self.start})

    def total_steps(self, rows: int) -> int:
        """Optimizer steps that the configuration asks for over `rows` examples."""
        by_epochs = math.ceil(self.config.epochs * math.ceil(rows / self._batch_size(rows)))
        return self.config.max_steps or by_epochs

    def validation_loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood a response token, in nats, without dropout."""
        batch, training = _collate(examples, self.pad_token_id), self.model.training
        passes = self.sharded.micro_batches(batch, self.config.max_tokens_per_micro_batch)
        self.model.eval()
        log_probs = self.sharded.outputs(batch, passes, LogProbReader(1.0))["log_probs"]
        self.model.train(training)
        total = 0.0
        for rows, micro in passes:
            total -= float(log_probs[rows, : micro["responses"].shape[1]].sum())
        return total / float(batch["response_mask"].sum())

    def _accumulate(self, batch: Batch) -> float:
        """Add the gradients of the mean loss over the batch's response tokens; return it."""
        tokens = float(batch["response_mask"].sum())
        losses: list[float] = []

        def loss(got: Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            value = -got["log_probs"].sum() / tokens
            losses.append(float(value.detach()))
            return value, {}

        passes = self.sharded.micro_batches(batch, self.config.max_tokens_per_micro_batch)
        micros = [micro for _, micro in passes]
        self.sharded.accumulate(batch, micros, LogProbReader(1.0), loss)
        return sum(losses)

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


@dataclass(frozen=True, slots=True)
class _Run:
    """The state of one `fit`, and where it is saved."""

    train_state: ShardedTrainState
    saver: Saver | None  # None: nothing is saved
    settings: dict[str, object]  # that a checkpoint records
    on_resume: OnResume
    changed_settings: list[StateDict] = field(default_factory=list)  # when it was resumed

    def resume(self, elsewhere: CheckpointStore | None) -> tuple[int, dict[str, float]]:
        """Load the newest checkpoint, own or `elsewhere`; return its step and metrics (0, {})."""
        if self.saver is None:
            return 0, {}
        found, own = self.saver.store.latest(), True
        if found is None and elsewhere is not None:
            found, own = elsewhere.latest(), False
        if found is None:
            return 0, {}
        metrics = self._load(found)
        self.on_resume(found.folder, found.step)
        if not own:
            self.save(found.step, metrics)  # where this attempt's successor looks
        return found.step, metrics

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Begin to write a checkpoint; a failure is logged, and training continues."""
        if self.saver is None:
            return
        plain = {
            "settings": self.settings,
            "changed_settings": self.changed_settings,
            "metrics": metrics,
            "process_rng": process_rng(),
        }
        try:
            self.saver.save(step, plain | self.train_state.state_dict())
        except CheckpointError as error:
            log.warning("no checkpoint at step %d: %s; training continues", step, error)

    def _load(self, checkpoint: Checkpoint) -> dict[str, float]:
        state = checkpoint.state
        changed = changed_settings(checkpoint, self.settings, ("sft.optim",))
        own = RankState.of(state)
        try:
            self.train_state.load(own, [own])
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from error
        set_process_rng(state["process_rng"])
        self.changed_settings[:] = changed
        return dict(state["metrics"])


def _collate(examples: Sequence[SFTExample], pad_token_id: int) -> Batch:
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
