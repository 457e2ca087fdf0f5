"""The RL loop: prompts in, an improved policy out.

One ordinary program: take prompts, run the dataflow's step over the roles, report. What a step
does is in `engine.dataflows`, what a role does in `engine.workers`, where they run in
`engine.controller`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from engine.algorithms.masked import Groups
from engine.batch import Batch
from engine.checkpoint import Checkpoint, Saver, open_checkpoint
from engine.config import LoRAConfig, RLConfig
from engine.controller.launch import launch
from engine.controller.timeline import Span, write_trace
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.required_passes import RequiredPasses
from engine.errors import PreemptedError, WorkerError
from engine.futures import LazyBatch
from engine.models import resolve_lora, text_config
from engine.trainers.auto_placement import resolve_auto
from engine.trainers.layouts import check_layouts
from engine.trainers.preemption import PreemptionNotice
from engine.trainers.prompts import PromptStream
from engine.trainers.queue_state import Pending, Queued, nothing_pending
from engine.trainers.resume import make_saver, restore, save
from engine.trainers.rl_checks import check_config, check_teacher
from engine.trainers.rl_setup import RunSpec, check_lora, effective_config, placement_of, role_specs
from engine.trainers.rollout_sources import MODES
from engine.trainers.shutdown import ensure_last_save, finish_save_on_error, raise_preempted

log = logging.getLogger(__name__)

OnStep = Callable[[int, int, dict[str, float]], None]  # step (1-based), total steps, metrics


class RLTrainer:
    """Improves the policy in `model_path` on the prompts of `loader`.

    A context manager: leaving it stops the workers. `on_step(step, total_steps, metrics)` is
    called after every step. Raises ConfigError or PlacementError before any worker starts.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: RLConfig,
        loader: PromptLoader,
        *,
        max_response_length: int,
        max_model_len: int,
        seed: int = 0,
        dtype: str = "float32",
        lora: LoRAConfig | None = None,
        on_step: OnStep = lambda step, total, metrics: None,
    ) -> None:
        self.dataflow = check_config(config, max_response_length)
        lora = resolve_lora(model_path, lora or LoRAConfig())
        check_lora(lora, config)
        mode = config.trainer.mode
        needs = RequiredPasses.of(effective_config(config), self.dataflow)
        roles = needs.roles(self.dataflow) | ({"sampler"} if mode == "one_step_off" else set())
        config = resolve_auto(
            config,
            roles,
            needs,
            model_path=str(model_path),
            lora=lora,
            dtype=dtype,
            max_response_length=max_response_length,
            max_model_len=max_model_len,
        )
        check_layouts(config, lora, text_config(model_path))
        self.config, self.on_step = effective_config(config), on_step
        self.tokenizer = load_tokenizer(model_path)
        self.prompts = PromptStream(loader, self.tokenizer)
        if "teacher" in self.dataflow.roles:
            check_teacher(config.algorithm.teacher, self.tokenizer)
        self.algo = Algo(
            self.config,
            needs,
            max_response_length=max_response_length,
            seed=seed,
            # Asynchronous rollout sorts groups without signal out by itself.
            more_prompts=None if mode == "async" else self.prompts.next_batch,
        )
        self.step = 0
        self.history: list[dict[str, float]] = []  # a row a step, since step 1
        # What rollout has ahead of the trainer; while the context is open, it draws no prompt.
        self.pending: Callable[[], AbstractContextManager[Pending]] = nothing_pending
        self.restored: list[Queued] = []  # those of a checkpoint
        self.other_spans: Callable[[], list[Span]] = list  # of processes beside the roles
        self.spec = RunSpec(
            str(model_path),
            self.config,
            needs,
            roles,
            max_response_length,
            max_model_len,
            seed,
            dtype,
            lora,
        )
        self.roles = launch(placement_of(self.spec), role_specs(self.spec))
        self.spans: list[Span] = []

    def fit(
        self,
        num_steps: int | None = None,
        checkpoint_dir: str | Path | None = None,
        resume_from: str | Path | None = None,
    ) -> dict[str, float]:
        """Run `num_steps` more steps (default: up to the configured total); return the last
        step's metrics.

        With `checkpoint_dir` (a folder or s3://…) a checkpoint is written every
        `trainer.save_freq` steps, at the end and on a pre-emption notice (SIGTERM), and a run
        that has just begun goes on from the newest one there, or else from the newest one in
        `resume_from`. Raises CheckpointError when that is of other settings, PreemptedError after
        a notice.
        """
        saver = None
        if checkpoint_dir is not None:
            saver = make_saver(self, checkpoint_dir)
            fresh = self.step == 0 and not self.resume(checkpoint_dir)
            if fresh and resume_from is not None and self.resume(resume_from):
                save(self, saver, {})  # where this attempt's own successor looks
        total = self.config.trainer.total_training_steps
        stop = total if num_steps is None else self.step + num_steps
        if self.step >= stop:
            log.warning("this run is at step %d of %d already; nothing to train", self.step, stop)
        with PreemptionNotice(self.config.trainer.preemption_grace_s) as notice:
            with finish_save_on_error(saver, notice):
                metrics = self._steps(stop, saver, notice)
            if saver is not None:
                saver.finish()
        return metrics

    def _steps(self, stop: int, saver: Saver | None, notice: PreemptionNotice) -> dict[str, float]:
        """Run up to step `stop`; return its metrics."""
        metrics: dict[str, float] = {}
        steps = MODES[self.config.trainer.mode](self, max(0, stop - self.step))
        with closing(steps):
            while self.step < stop:
                metrics = self._one_unless(notice, steps)
                if saver is not None:
                    metrics |= saver.take_metrics()
                self.on_step(self.step, stop, metrics)
                self.history.append({"step": float(self.step)} | metrics)
                due = self.step == stop or self.step % self.config.trainer.save_freq == 0
                if saver is not None and (due or notice.received):
                    save(self, saver, metrics)
                if notice.received and self.step < stop:
                    raise_preempted(saver, self.step)
            if saver is not None:
                ensure_last_save(saver, lambda: save(self, saver, metrics))
        return metrics

    def _one_unless(
        self, notice: PreemptionNotice, steps: Generator[StepResult]
    ) -> dict[str, float]:
        """One step; whoever ends this process may have ended the workers before."""
        try:
            return self._one(steps)
        except WorkerError as error:
            if not notice.received:
                raise
            raise PreemptedError(
                f"pre-empted in step {self.step + 1}, whose workers are gone; the run goes on from "
                "its last checkpoint"
            ) from error

    def resume(self, checkpoint_dir: str | Path) -> Checkpoint | None:
        """Go on from the newest good checkpoint of a folder; return it, or None without one."""
        saver = make_saver(self, checkpoint_dir)
        found = saver.store.latest()
        if found is not None:
            restore(self, saver, found)
            log.info("resumed from %s, step %d", found.folder, self.step)
        return found

    def load_checkpoint(self, folder: str | Path) -> None:
        """Go on from a checkpoint, such as "ckpt/step_500"; raise CheckpointError for a bad one."""
        checkpoint = open_checkpoint(folder)
        restore(self, make_saver(self, Path(str(folder)).parent), checkpoint)

    def _one(self, steps: Generator[StepResult]) -> dict[str, float]:
        """Take one step, wait for its updates, and say how it went."""
        start = time.perf_counter()
        self.roles.begin_step(self.step + 1)
        result = next(steps)
        if self.config.trainer.mode != "async":
            self.prompts.prefetch()
        updates = [future.result() for future in result.updates]
        self.step += 1
        metrics = summarise(result.batch, time.perf_counter() - start)
        metrics |= self.algo.take_metrics() | staleness(result.batch, self.step - 1)
        for update in updates:
            metrics |= update
        self._record()
        return metrics

    def write_timeline(self, path: str | Path) -> Path | None:
        """Write the first `trainer.timeline_steps` steps as a trace for Perfetto, if any."""
        return write_trace(self.spans, path) if self.spans else None

    def _record(self) -> None:
        if self.step <= self.config.trainer.timeline_steps:
            self.spans += [*self.roles.timeline(), *self.other_spans()]

    def validate(self, rows: Sequence[dict[str, Any]]) -> float:
        """Mean reward of greedy completions to the prompts of `rows`."""
        batch = LazyBatch(self.roles.rollout.generate_greedy(self.prompts.encode(rows)))
        batch |= self.roles.reward.score(batch)
        return float(batch["token_level_scores"].sum(1).mean())

    def save(self, folder: str | Path) -> None:
        """Write the policy and tokenizer as a Hugging Face folder."""
        self.roles.actor.save(str(folder)).result()

    def close(self) -> None:
        """Stop the workers and free what they hold."""
        self.roles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def summarise(lazy: LazyBatch, seconds: float) -> dict[str, float]:
    """Facts of one step's batch: reward, lengths, truncation, group signal, throughput.

    Means of rewards leave out the rows whose reward failed.
    """
    batch = lazy.resolve()
    width = batch["responses"].shape[1]
    lengths = batch["attention_mask"][:, -width:].sum(1).float()
    tokens = float(batch["attention_mask"].sum())
    failed = batch["reward_error"]
    scores = batch["token_level_scores"].sum(1)[~failed]
    facts = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(correction=0)),
        "reward/errors": float(failed.float().mean()),
        "reward/format_rate": float(batch.columns["has_format"].astype(float).mean()),
        "reward/groups_with_signal": _groups_with_signal(scores, batch["group_ids"][~failed]),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(batch["truncated"].float().mean()),
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
    }
    for name, column in _component_columns(batch):
        facts[f"reward/{name}"] = float(column[~failed].mean())
    return facts


def staleness(lazy: LazyBatch, version: int) -> dict[str, float]:
    """How many updates behind the trainer's `version` a batch's completions were begun."""
    behind = (version - lazy.resolve()["policy_version"]).float()
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def _component_columns(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """The reward's components `[B]` by name, if it has any."""
    if "reward_components" not in batch:
        return []
    names = batch.columns["reward_component_names"][0]
    return list(zip(names, batch["reward_components"].unbind(1), strict=True))


def _groups_with_signal(scores: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Share of groups whose completions don't all have the same score."""
    every = torch.ones_like(group_ids, dtype=torch.bool)
    groups = Groups.of(group_ids, every)
    return float((groups.spread(scores) > 0).float().mean())
