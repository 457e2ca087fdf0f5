"""The loop of training on rows of a dataset, and the warm start (SFT)."""

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from engine.batch import Batch, Future
from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.checkpoint.format import RankState
from engine.checkpoint.run_lock import hold_lock
from engine.checkpoint.state_dict import BOXES, StateDict, process_rng, set_process_rng
from engine.config import LoRAConfig, OfflineConfig
from engine.controller.groups import Roles
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.data.collate import SFTExample, collate_completions, pad
from engine.data.training_examples import AnyExample, check_examples
from engine.errors import CheckpointError, ConfigError, DataError
from engine.models import resolve_dtype, text_config
from engine.parallel.layout import Layout
from engine.runtime.policy_runtime import StartModel
from engine.tracking.connection import flatten
from engine.trainers import resume
from engine.trainers.layout_checks import check_parallel
from engine.workers.role import WorkerContext
from engine.workers.supervised import OfflineWorker, SFTWorker

T = TypeVar("T")
W = TypeVar("W", bound=OfflineWorker)


def is_on_ray(config: OfflineConfig) -> bool:
    """Whether the model is in Ray actors: as `placement` says, or where there are several ranks."""
    several = Layout.of(config.parallel).world_size > 1
    return several if config.placement is None else config.placement == "ray"


def check_offline_layout(
    config: OfflineConfig, lora: LoRAConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for a layout that the settings, or the model, don't allow."""
    layout, section = Layout.of(config.parallel), config.section
    check_parallel(f"{section}.parallel", config.parallel, lora, model_config)
    if config.parallel.offload_params:
        raise ConfigError(
            f"{section}.parallel.offload_params moves weights away between training and rollout, "
            f"and here is no rollout; set {section}.parallel.offload_policy"
        )
    if layout.world_size > 1 and config.placement == "local":
        raise ConfigError(
            f"{section}.parallel is a layout of {layout.world_size} ranks ({layout}), and "
            f"{section}.placement=local runs one process; set {section}.placement=ray"
        )
    if (roles := [pool.roles for pool in config.pools]) not in ([], [(section,)]):
        raise ConfigError(
            f"{section}.pools has the roles {roles}; there is one pool here, of roles [{section}]"
        )


def offline_dtype(dtype: str, model_path: str, config: OfflineConfig) -> str:
    """The dtype of the weights, `auto` resolved for where they will be."""
    gpu = any(pool.gpus > 0 for pool in config.pools) if is_on_ray(config) else None
    width = text_config(model_path).hidden_size
    return resolve_dtype(dtype, width, gpu=gpu, compute_dtype=config.parallel.compute_dtype)


def offline_placement(config: OfflineConfig) -> Placement:
    """The pools of the section; by default the ranks share this machine's cores."""
    ranks, cores = Layout.of(config.parallel).world_size, config.threads or os.cpu_count() or 1
    pools = [Pool(world_size=ranks, **dict(pool)) for pool in config.pools]
    share = float(cores // ranks) if cores >= ranks else cores / ranks
    return Placement(
        tuple(pools) or (Pool((config.section,), ranks, cpus=share),),
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
    )


def done(value: T | Future[T]) -> T:
    """What a rank in this process returned, or what is waited for of ranks elsewhere."""
    return value.result() if isinstance(value, Future) else value


log = logging.getLogger(__name__)

OnResume = Callable[[str, int], None]  # the checkpoint's address, its step
# Read again at every start and part of no saved state.
MAY_CHANGE = ("optim", "max_tokens_per_micro_batch")
# How long, where and how a run is done: not recorded.
MAY_DIFFER = {
    *("skip", "reference_cache", "save_freq", "max_checkpoints_to_keep", "max_attempts"),
    *("on_damaged_checkpoints", "preemption_grace_s", "threads", "parallel", "placement", "pools"),
    *("start_timeout_s", "step_timeout_s"),
}


def recorded_settings(config: OfflineConfig) -> dict[str, object]:
    """The settings of a section that a checkpoint records, by dotted name, e.g. "sft.packing"."""
    return flatten({config.section: config.model_dump(mode="json", exclude=MAY_DIFFER)})


def run_settings(config: OfflineConfig, seed: int, start: str, rows: int) -> dict[str, object]:
    """What a checkpoint records: a resumed run must share it, but for what may change."""
    inputs = {"seed": seed, "start": start, "data": {"rows": rows}}
    return recorded_settings(config) | flatten(inputs)


def changed_settings(
    config: OfflineConfig, checkpoint: Checkpoint, settings: dict[str, object]
) -> list[StateDict]:
    """What changed since the run of a checkpoint began: see `resume.changed_settings`."""
    may_change = [f"{config.section}.{name}" for name in MAY_CHANGE]
    defaults = recorded_settings(type(config)())
    return resume.changed_settings(checkpoint, settings, may_change, defaults)


_CHUNK = 1024  # examples of one call to the ranks
Example = TypeVar("Example", bound=AnyExample)
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
    config: OfflineConfig

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

        Raises ConfigError for settings that are not this trainer's, ModelError for a model that it
        can't train, and PlacementError, before any rank starts.
        """
        self.config = config = self._checked(config)
        section, layout = config.section, Layout.of(config.parallel)
        if isinstance(model, StartModel):
            model = replace(model, dtype=offline_dtype(model.dtype, model.path, config))
            text = text_config(model.path)
        else:
            text = model.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        options: Any = {"model": model, "config": config, "seed": seed}
        self._worker: W | None = None
        self._roles: Roles | None = None
        if not is_on_ray(config):
            check_offline_layout(config, LoRAConfig())
            self._worker = self.worker_class(WorkerContext(section), **options)
        elif isinstance(model, StartModel):
            check_offline_layout(config, model.lora or LoRAConfig(), text_config(model.path))
            ranks = layout if layout.world_size > 1 else None
            spec = RoleSpec(section, self.worker_class, options, layout=ranks)
            self._roles = launch(offline_placement(config), [spec])
        else:
            raise ConfigError(
                f"{section}.parallel is {layout} on Ray, whose processes load the model "
                "themselves, and a model in memory was given; give StartModel(path, dtype), or "
                f"set {section}.placement=local"
            )
        self.seed, self.start = seed, start
        self.pad_token_id, self.on_step = pad_token_id, on_step
        self.on_resume: OnResume = lambda folder, step: None

    def _checked(self, config: Any) -> Any:
        return config

    @abstractmethod
    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Metrics of held-out examples, without dropout."""

    @abstractmethod
    def _collate(self, examples: Sequence[Example]) -> Batch:
        """The batch of some examples."""

    def _update(self, batch: Batch) -> dict[str, float]:
        """Take an optimizer step; return its metrics, without the section's name."""
        ranks: Any = self._ranks
        return done(ranks.update(batch))

    def _chunks(self, examples: Sequence[Example]) -> Iterator[Batch]:
        for start in range(0, len(examples), _CHUNK):
            yield self._collate(examples[start : start + _CHUNK])

    def _prepare(
        self, train: Sequence[Example], validation: Sequence[Example], folder: str | Path | None
    ) -> tuple[Sequence[Example], Sequence[Example]]:
        """Examples with what the start model has to say of them, before any step."""
        return train, validation

    @property
    def model(self) -> PreTrainedModel:
        """The model of a run in this process; raises ConfigError where it is on ranks."""
        if self._worker is None:
            raise ConfigError(
                f"the model is on the ranks of {self.config.section}.parallel; write it with "
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
        there, or else in `resume_from`, whatever layout wrote it. Raises DataError when there is
        nothing to train on, what `check_examples` raises, EngineError when training diverges,
        CheckpointError for a checkpoint of other settings or another `start`,
        LockedCheckpointsError while another run uses the folder, PreemptedError after a notice.
        """
        if not train:
            raise DataError(self.no_rows)
        check_examples(train, self._vocabulary, "training example")
        check_examples(validation, self._vocabulary, "held-out example")
        total = self.total_steps(len(train))
        with self._own_threads_and_draws(), hold_lock(checkpoint_dir):
            train, validation = self._prepare(train, validation, checkpoint_dir)
            done(self._ranks.begin(total))
            settings = run_settings(self.config, self.seed, self.start, len(train))
            section, limit = self.config.section, self.config.step_timeout_s
            groups = {} if self._roles is None else {section: self._roles[section]}
            saver = Saver(self._store(checkpoint_dir), groups, limit) if checkpoint_dir else None
            begin, metrics, changed = self._resume(saver, resume_from, settings)
            if begin >= total:
                log.warning("%s is at step %d of %d already", self.what, begin, total)
            recorded = {"settings": settings, "changed_settings": changed}
            with (
                resume.PreemptionNotice(self.config.preemption_grace_s) as notice,
                resume.finish_save_on_error(saver, notice),
            ):
                steps = range(begin, total)
                last = self._train(train, validation, steps, saver, recorded, notice) or metrics
                save = partial(self._save, saver, total, recorded, last)
                resume.ensure_last_save(saver, save)
                return last

    def _train(
        self,
        train: Sequence[Example],
        validation: Sequence[Example],
        steps: range,
        saver: Saver | None,
        recorded: StateDict,
        notice: resume.PreemptionNotice,
    ) -> dict[str, float]:
        total, config = steps.stop, self.config
        metrics: dict[str, float] = {}
        for step, rows in enumerate(self._batches(train, total)[steps.start :], steps.start + 1):
            notice.step, start = step, time.perf_counter()
            batch = self._collate([train[i] for i in rows])
            with resume.lost_workers_explained(notice):
                measured = self._update(batch)
                seconds = time.perf_counter() - start
                measured["tokens_per_s"] = int(batch["attention_mask"].sum()) / seconds
                if validation and (step % config.validate_every == 0 or step == total):
                    held_out = self.validate(validation).items()
                    measured |= {f"validation_{name}": value for name, value in held_out}
            metrics = {f"{config.section}/{name}": value for name, value in measured.items()}
            self.on_step(step, total, metrics)
            if step == total or step % config.save_freq == 0 or notice.received:
                self._save(saver, step, recorded, metrics)
            if notice.received and step < total:
                resume.raise_preempted(saver, step)
        return metrics

    def _resume(
        self, saver: Saver | None, elsewhere: str | Path | None, settings: dict[str, object]
    ) -> tuple[int, dict[str, float], list[StateDict]]:
        """Load the newest checkpoint; return its step, its metrics and what has changed since."""
        checkpoint = here = saver.store.latest() if saver is not None else None
        if saver is not None and here is None and elsewhere is not None:
            checkpoint = self._store(elsewhere).latest()
        if saver is None or checkpoint is None:
            return 0, {}, []
        changed = changed_settings(self.config, checkpoint, settings)
        self._load(saver, checkpoint)
        metrics = dict(checkpoint.state["metrics"])
        self.on_resume(checkpoint.folder, checkpoint.step)
        if here is None:  # the next attempt looks in the run's own folder
            recorded = {"settings": settings, "changed_settings": changed}
            self._save(saver, checkpoint.step, recorded, metrics)
        return checkpoint.step, metrics, changed

    def _load(self, saver: Saver, checkpoint: Checkpoint) -> None:
        """Load a checkpoint: of one rank, whose state is the controller's own, or of several."""
        state = checkpoint.state
        if self._worker is None:
            saver.restore(checkpoint)
        elif BOXES in state:
            rank_state = RankState.of(state)
            try:
                self._worker.load_sharded_state(rank_state, [rank_state])
            except CheckpointError as error:
                raise error.with_message(f"{checkpoint.folder}: {error}") from error
            set_process_rng(state["process_rng"])
        else:
            self._worker.load_state(checkpoint.folder)

    def _save(
        self, saver: Saver | None, step: int, recorded: StateDict, metrics: dict[str, float]
    ) -> None:
        """Begin to write a checkpoint; a failure is logged, and training continues."""
        if saver is None:
            return
        state = recorded | {"metrics": metrics, "process_rng": process_rng()}
        if self._worker is not None:
            state |= self._worker.state_dict()
        try:
            saver.save(step, state)
        except CheckpointError as error:
            log.warning("no checkpoint at step %d: %s; training continues", step, error)

    def total_steps(self, rows: int) -> int:
        return total_steps(self.config, rows)

    def save(self, folder: str | Path, tokenizer: str | Path) -> None:
        """Write the model, with the tokenizer of another folder, as a Hugging Face folder."""
        done(self._ranks.save(str(folder), str(tokenizer)))

    def close(self) -> None:
        if self._roles is not None:
            self._roles.close()

    @property
    def _ranks(self) -> W:
        """The worker in this process, or the group whose calls are futures."""
        group: Any = self._roles and self._roles[self.config.section]
        return self._worker or group

    @contextmanager
    def _own_threads_and_draws(self) -> Iterator[None]:
        """Compute with `threads` threads and leave the generator as it was, in this process."""
        if self._worker is None:
            yield
            return
        torch.set_num_threads(self.config.threads or os.cpu_count() or 1)
        with torch.random.fork_rng(devices=[]):
            yield

    def _store(self, folder: str | Path) -> CheckpointStore:
        config = self.config
        restart = config.on_damaged_checkpoints == "restart"
        return CheckpointStore(folder, config.max_checkpoints_to_keep, restart=restart)

    def _batches(self, train: Sequence[Example], total: int) -> list[list[int]]:
        """Row numbers of each of `total` steps; every epoch in a new order."""
        # Not by length, as micro-batches are: rows of one length have one answer style.
        generator = torch.Generator().manual_seed(self.seed)
        size = min(self.config.train_batch_size, len(train))
        batches: list[list[int]] = []
        while len(batches) < total:
            order = torch.randperm(len(train), generator=generator).tolist()
            batches += [order[i : i + size] for i in range(0, len(order), size)]
        return batches[:total]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def total_steps(config: OfflineConfig, rows: int) -> int:
    size = min(config.train_batch_size, rows)
    return config.max_steps or math.ceil(config.epochs * math.ceil(rows / size))


class SFTTrainer(OfflineTrainer[SFTExample, SFTWorker]):
    """Fine-tunes a model on pairs; see `OfflineTrainer`. Its configuration is an `SFTConfig`.

    Metrics of a step are `sft/loss` (mean negative log-likelihood a response token, nats),
    `sft/lr`, `sft/grad_norm`, `sft/tokens_per_s`, and, where one was taken, `sft/validation_loss`.
    """

    what = "the warm start"
    no_rows = "the warm start has no rows; check data.sft_size and the source"
    worker_class = SFTWorker

    def validation_loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood a response token, in nats, without dropout."""
        return done(self._ranks.validation_loss(self._collate(examples)))["validation_loss"]

    def validate(self, examples: Sequence[SFTExample]) -> dict[str, float]:
        return {"loss": self.validation_loss(examples)}

    def _collate(self, examples: Sequence[SFTExample]) -> Batch:
        return collate_examples(examples, self.pad_token_id)


def collate_examples(examples: Sequence[SFTExample], pad_token_id: int) -> Batch:
    """Lay pairs out as completions, their sampling log-probs being none (zeros)."""
    prompts = Batch(
        {"group_ids": torch.arange(len(examples))}, {"prompt_ids": [e.prompt_ids for e in examples]}
    )
    batch = collate_completions(
        prompts,
        range(len(examples)),
        [e.response_ids for e in examples],
        [[0.0] * len(e.response_ids) for e in examples],
        pad_token_id=pad_token_id,
    ).select(["input_ids", "attention_mask", "responses", "response_mask"])
    learned = [
        [1.0] * len(e.response_ids) if e.learned is None else list(map(float, e.learned))
        for e in examples
    ]
    return batch | {"response_mask": pad(learned, 0.0, side="right")}
