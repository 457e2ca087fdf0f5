"""The RL trainer: prompts in, an improved policy out; `RLTrainer._train` is the loop.

What a step computes is in `engine.dataflows`, what a role does in `engine.workers`, where roles run
in `engine.controller`, and what is sampled ahead in `rollout_modes`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from engine.batch import Batch, LazyBatch
from engine.checkpoint import Checkpoint, Saver, open_checkpoint
from engine.checkpoint.run_lock import hold_lock
from engine.checkpoint.state_dict import StateDict, process_rng, set_process_rng
from engine.config import LoRAConfig, RLConfig
from engine.controller.launch import launch
from engine.controller.timeline import Span, write_trace
from engine.data.loader import PromptLoader
from engine.dataflows.algo import Algo
from engine.errors import CheckpointError
from engine.evaluation import drift
from engine.runtime.policy_runtime import open_tokenizer
from engine.storage.json_rows import Row
from engine.trainers import resume, run_spec, step_metrics
from engine.trainers.huggingface_export import resolve_checkpoint, start_model_info
from engine.trainers.prompts import PromptStream
from engine.trainers.resume import PreemptionNotice
from engine.trainers.run_plan import plan_run
from engine.trainers.step_record import StepRecorder

log = logging.getLogger(__name__)

Metrics = dict[str, float]
OnStep = Callable[[int, int, Metrics], None]  # step (1-based), total steps, metrics
OnResume = Callable[[str, int], None]  # the checkpoint's address, its step
OnRollouts = Callable[[str, int, Batch], None]  # "train" or "validation", step, its batch


class RLTrainer(AbstractContextManager["RLTrainer"]):
    """Improves the policy in `model_path` on the prompts of `loader`.

    A context manager: leaving it stops the workers. `on_step(step, total_steps, metrics)` is called
    after every step; every `trainer.test_freq` steps and after the last one the metrics have
    `validation/reward`, the mean reward on the rows `validation`. Raises ConfigError or
    PlacementError before any worker starts.
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
        dtype: str = "auto",
        lora: LoRAConfig | None = None,
        validation: Sequence[Row] = (),
        on_step: OnStep = lambda step, total, metrics: None,
    ) -> None:
        self.tokenizer = open_tokenizer(model_path)
        self.spec = spec = plan_run(
            config,
            model_path=str(model_path),
            max_response_length=max_response_length,
            max_model_len=max_model_len,
            seed=seed,
            dtype=dtype,
            lora=lora,
            template_variables=loader.template_variables,
        )
        self.config, self.dataflow = spec.config, spec.dataflow
        self.on_step, self.validation = on_step, validation
        self.on_resume: OnResume = lambda folder, step: None
        self.on_rollouts: OnRollouts = lambda split, step, batch: None
        prompts = PromptStream(loader, self.tokenizer)
        source_class = run_spec.rollout_source(self.config.trainer)
        self.algo = Algo(
            self.config,
            spec.needs,
            max_response_length=max_response_length,
            seed=seed,
            more_prompts=None if source_class.filters_groups else prompts.next_batch,
        )
        self.roles = launch(run_spec.placement_of(spec), run_spec.role_specs(spec))
        self.source = source_class(spec, self.roles, prompts, self.algo)
        self.step = 0
        self.history: list[Metrics] = []  # a row a step, since step 1
        self.changed_settings: list[StateDict] = []  # when this run was resumed, see `run_settings`
        self.spans: list[Span] = []

    def fit(
        self,
        num_steps: int | None = None,
        checkpoint_dir: str | Path | None = None,
        resume_from: str | Path | None = None,
    ) -> Metrics:
        """Run `num_steps` steps, or up to the configured total; return the last step's metrics.

        With `checkpoint_dir` (a folder or s3://…) a checkpoint is written every `trainer.save_freq`
        steps, at the end and on a pre-emption notice (SIGTERM), and a run that has just begun
        resumes from the newest one there, in `resume_from`, or in `trainer.resume_from`. Raises
        CheckpointError when that is of other settings, LockedCheckpointsError while another run
        uses the folder, PreemptedError after a notice.
        """
        with hold_lock(checkpoint_dir):
            saver = self._open_checkpoints(checkpoint_dir, resume_from)
            settings = self.config.trainer
            stop = settings.total_training_steps if num_steps is None else self.step + num_steps
            if self.step >= stop:
                log.warning(
                    "all %d steps are done already; nothing to train (a new run has another "
                    "checkpoint folder: of a command line, trainer.experiment_name=NAME)",
                    stop,
                )
            root = None if saver is None else saver.store.root
            with PreemptionNotice(settings.preemption_grace_s) as notice:
                with (
                    resume.finish_save_on_error(saver, notice),
                    self.source.running(stop),
                    resume.lost_workers_explained(notice),
                    StepRecorder(self.spec, self.roles, self.algo, root) as recorder,
                ):
                    metrics = self._train(stop, saver, notice, recorder)
                if saver is not None:
                    saver.finish()
            return metrics

    def _train(
        self, stop: int, saver: Saver | None, notice: PreemptionNotice, recorder: StepRecorder
    ) -> Metrics:
        settings, metrics = self.config.trainer, Metrics()
        while self.step < stop:
            notice.step = self.algo.step = self.step + 1
            recorder.begin(self.step + 1)
            started = time.perf_counter()
            self.roles.begin_step(self.step + 1)

            self.source.update_weights(self.step)
            recorder.prompts = self.source.next_prompts()
            result = self.dataflow.step(recorder.roles, recorder.prompts, self.algo)
            # A step that learns nothing counts as a version of the policy as well.
            updates = result.updates or [self.roles.actor.skip_update()]
            self.source.prefetch()
            update_metrics = [update.result() for update in updates]
            self.step += 1

            recorder.metrics = metrics = self._metrics(result.batch, update_metrics, started)
            recorder.end()
            self.on_rollouts("train", self.step, result.batch.resolve())
            if saver is not None:
                metrics = metrics | saver.take_metrics()
            if self.validation and _is_due(self.step, stop, settings.test_freq):
                started = time.perf_counter()
                metrics = metrics | self.validate(self.validation)
                metrics |= {"perf/validation_s": time.perf_counter() - started}
            metrics = metrics | drift.metrics([*self.history, metrics])
            self.on_step(self.step, stop, metrics)
            self.history.append({"step": float(self.step)} | metrics)

            save_due = notice.received or _is_due(self.step, stop, settings.save_freq)
            keeps_best = settings.final_model == "best" and resume.SCORE in metrics
            if saver and (save_due or (keeps_best and resume.is_new_best(self.history))):
                self.save_checkpoint(saver, metrics)
            if notice.received and self.step < stop:
                resume.raise_preempted(saver, self.step)
        if saver is not None:
            resume.ensure_last_save(saver, lambda: self.save_checkpoint(saver, metrics))
        return metrics

    def validate(self, rows: Sequence[Row]) -> Metrics:
        """Metrics of completions to the prompts of `rows`, decoded as `rollout.val_kwargs` says."""
        prompts = self.source.prompts.encode(rows)
        batch = LazyBatch(self.source.validate(prompts, self.step))
        batch |= self.roles.reward.score(batch)
        self.on_rollouts("validation", self.step, batch.resolve())
        return step_metrics.validation_metrics(batch.resolve())

    def resume(self, checkpoint_dir: str | Path) -> Checkpoint | None:
        """Resume from the newest good checkpoint of a folder and return it; None without one."""
        saver = self.make_saver(checkpoint_dir)
        checkpoint = saver.store.latest()
        if checkpoint is not None:
            self._restore(saver, checkpoint)
        return checkpoint

    def load_checkpoint(self, folder: str | Path) -> Checkpoint:
        """Resume from a checkpoint like "ckpt/step_500"; raise CheckpointError for a bad one."""
        checkpoint = open_checkpoint(folder)
        self._restore(self.make_saver(checkpoint.folder.rpartition("/")[0]), checkpoint)
        return checkpoint

    def make_saver(self, folder: str | Path) -> Saver:
        return resume.make_saver(folder, self.roles, self.spec)

    def save_checkpoint(self, saver: Saver, metrics: Metrics) -> None:
        """Begin to write a checkpoint; a failure is logged, and training continues."""
        score = {resume.SCORE: metrics[resume.SCORE]} if resume.SCORE in metrics else {}
        try:
            saver.save(self.step, self.state_dict(), score)
        except CheckpointError as error:
            log.warning("no checkpoint at step %d: %s; training continues", self.step, error)

    def state_dict(self) -> StateDict:
        """What a checkpoint holds besides the states of the roles."""
        return {
            "step": self.step,
            "settings": self._settings(),
            "changed_settings": self.changed_settings,
            "policy": start_model_info(self.spec),
            "algo": self.algo.state_dict(),
            "history": self.history,
            **self.source.state_dict(),
            "rng": process_rng(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.source.load_state_dict(state)
        self.step = int(state["step"])
        self.algo.load_state_dict(state["algo"])
        self.history = [dict(row) for row in state["history"]]
        set_process_rng(state["rng"])

    def write_timeline(self, path: str | Path) -> Path | None:
        """Write the first `trainer.timeline_steps` steps as a trace for Perfetto, if any."""
        return write_trace(self.spans, path) if self.spans else None

    def save(self, folder: str | Path) -> None:
        self.roles.actor.save(str(folder)).result()

    def close(self) -> None:
        self.source.close()
        self.roles.close()

    def _metrics(self, lazy: LazyBatch, updates: list[Metrics], start: float) -> Metrics:
        """The metrics of the step that began at `start` and has just ended; records its spans."""
        batch, seconds = lazy.resolve(), time.perf_counter() - start
        metrics = step_metrics.step_metrics(batch, seconds)
        metrics |= self.algo.take_metrics() | self.source.metrics()
        metrics |= step_metrics.staleness_metrics(batch, self.step - 1)
        sampled = self.algo.take_sampled() or [lazy]
        for rollout in sampled if self.source.prompts.wants_rates else ():
            self.source.observe(rollout.resolve())
        for update in updates:
            metrics |= update
        metrics |= {f"perf/{name}": value for name, value in self.roles.take_costs().items()}
        if self.step <= self.config.trainer.timeline_steps:
            self.spans += [*self.roles.timeline(), *self.source.take_spans()]
        return metrics

    def _open_checkpoints(
        self, checkpoint_dir: str | Path | None, resume_from: str | Path | None
    ) -> Saver | None:
        """The saver of `fit`; a run at step 0 resumes from the checkpoints that there are."""
        saver = None
        if checkpoint_dir is not None:
            saver = self.make_saver(checkpoint_dir)
            resume.save_episodes(checkpoint_dir, resume_from, self.roles, self.spec)
        if self.step > 0 or (checkpoint_dir is not None and self.resume(checkpoint_dir)):
            return saver
        resumed = None if resume_from is None else self.resume(resume_from)
        if resumed is None and self.config.trainer.resume_from:
            resumed = self.load_checkpoint(resolve_checkpoint(self.config.trainer.resume_from))
        if resumed is not None and saver is not None:  # the next attempt looks in `checkpoint_dir`
            self.save_checkpoint(saver, self.history[-1] if self.history else {})
            if self.config.trainer.final_model == "best":
                resume.carry_best(saver, self.history, resumed)
        return saver

    def _settings(self, config: RLConfig | None = None) -> dict[str, object]:
        spec = self.spec
        return resume.run_settings(config or self.config, spec.max_response_length, spec.seed)

    def _restore(self, saver: Saver, checkpoint: Checkpoint) -> None:
        settings, defaults = self._settings(), self._settings(RLConfig())
        changed = resume.changed_settings(checkpoint, settings, resume.MAY_CHANGE, defaults)
        self.load_state_dict(saver.restore(checkpoint))
        self.changed_settings = changed
        self.on_resume(checkpoint.folder, self.step)

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_due(step: int, stop: int, frequency: int) -> bool:
    return step == stop or step % frequency == 0
