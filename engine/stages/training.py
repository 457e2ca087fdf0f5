"""Stages `sft` and `rl`, and what all training stages share: attempts, progress, metrics, loggers.

Training on preferences is in `preferences`, reward models are in `reward_model`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.cli.rl_run import (
    RLRun,
    RunLog,
    WriteModel,
    headline,
    placed,
    prompt_room,
    train_policy,
)
from engine.config import ModelConfig, OfflineConfig, SamplingConfig, SFTConfig
from engine.console import progress, say
from engine.controller.launch import ray_session, require_shared
from engine.data.loader import PromptLoader
from engine.data.templates import encode_prompts, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.errors import StorageError
from engine.evaluation.policy_steps import FILE, MODEL, read_overoptimisation
from engine.models import (
    adapter_parameters,
    build_model,
    has_adapters,
    load_policy_model,
    save_model,
    saved_dtype,
)
from engine.parallel.layout import Layout
from engine.preferences import by_reward_model
from engine.runtime.policy_runtime import StartModel
from engine.samples.sample_files import FOLDER as ROLLOUTS
from engine.samples.sample_files import copy_samples
from engine.stages.fetch import publish_start_model
from engine.stages.settings import RLSettings, RunContext, SFTSettings
from engine.stages.stage import (
    LOCAL_OBJECT_STORE_BYTES,
    Artifact,
    Stage,
    host,
    run_folder,
    stage,
)
from engine.storage.filesystem import shared_store
from engine.storage.s3 import Objects
from engine.tracking.metric_logs import FILE as METRICS_FILE
from engine.tracking.metric_logs import PACKAGES, MetricLogs, open_metric_logs, require_packages
from engine.trainers.offline import (
    OfflineTrainer,
    SFTExample,
    SFTTrainer,
    is_on_ray,
    offline_dtype,
)
from engine.trainers.resume import run_with_retries

if TYPE_CHECKING:
    from engine.console import Progress

COPY_SECONDS = 30.0  # between two looks at what has grown
CLOSE_SECONDS = 60.0  # for the last copy

_log = logging.getLogger(__name__)


# The logs that `tracking.logger` names. A stage's files are in its run's folder,
# `runs/<run id>/<stage>/`. Where there is a shared store they are copied to the same path there,
# again while they grow, as a pod's disk ends with the pod.


@contextlib.contextmanager
def open_loggers(run: RunContext, this: Stage) -> Iterator[MetricLogs]:
    """Open a stage's logs for the block; none where `tracking.logger` names only MLflow.

    Raises ConfigError for a package that this machine lacks, StorageError and TrackingError, all
    before the block. A store that fails later costs the copy and a sentence in the log.
    """
    names = [name for name in run.logger if name in ("file", *PACKAGES)]
    if not names:
        yield MetricLogs()
        return
    require_packages(names, "tracking.logger")
    folder, below = run_folder(run, this.kind), f"{run.run_id}/{this.kind}"
    with (
        _copied(folder, below),
        open_metric_logs(
            names,
            folder,
            project=run.experiment,
            run_name=f"{this.kind}-{run.run_id}",
            settings=this.config,
            keep=True,
            below=below,
        ) as logs,
    ):
        yield logs


@contextlib.contextmanager
def _copied(folder: Path, below: str) -> Iterator[None]:
    """Copy a folder's files to the shared store for the block, and say where they are.

    The file of metrics that an earlier attempt left there is fetched first.
    """
    store = shared_store()
    if not store:
        lost = bool(host().execution) * "; without HYBRIDFLYTE_STORE they end with this pod"
        say(f"{folder.name}: files of metrics are in {folder}{lost}")
        yield
        return
    copy = _StoreCopy(folder, f"{store}/runs/{below}")
    copy.fetch()
    say(f"{folder.name}: files of metrics are in {copy.uri}")
    try:
        copy.start()
        yield
    finally:
        copy.close()


class _StoreCopy:
    """A folder of small files in the shared store, brought up to date by a thread."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.uri = uri
        self._folder, self._objects = folder, Objects(uri)
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of change, by name
        self._closed = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="metrics-copy", daemon=True)

    def fetch(self) -> None:
        """Download the file of metrics unless there is one here."""
        if not (self._folder / METRICS_FILE).exists():
            with contextlib.suppress(FileNotFoundError):
                (self._folder / METRICS_FILE).write_bytes(self._objects.read(METRICS_FILE))

    def start(self) -> None:
        """Start to copy."""
        self._thread.start()

    def close(self) -> None:
        """Copy the files that have grown since, within `CLOSE_SECONDS`."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("%s is too slow; the last metrics are in %s", self.uri, self._folder)

    def _work(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(COPY_SECONDS)
            self._send()

    def _send(self) -> None:
        try:
            for path in sorted(self._folder.rglob("[!.]*")):  # a hidden one is being written
                # Weights & Biases links its newest run, and removes what it is done with.
                if path.is_file() and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):
                        self._send_file(path)
        except (OSError, StorageError) as error:
            if not self._warned:
                _log.warning("%s; its metrics wait in %s", error, self._folder)
            self._warned = True

    def _send_file(self, path: Path) -> None:
        name, now = path.relative_to(self._folder).as_posix(), path.stat()
        if self._sent.get(name) != (now.st_size, now.st_mtime_ns):
            self._objects.put(name, path.read_bytes())
            self._sent[name] = (now.st_size, now.st_mtime_ns)


Example = TypeVar("Example")


@dataclass
class TrainedOnRows:
    """The results of training beside the model."""

    metrics: dict[str, float]  # of the last step
    steps: int
    history: dict[int, dict[str, float]] = field(default_factory=dict)  # of steps of this process

    def write_history(self, path: Path) -> None:
        """Write a row a step, as `engine.evaluation.policy_steps` reads them.

        Nothing where an attempt on another machine made some of the steps.
        """
        if len(self.history) < self.steps:
            return
        rows = [{"step": step, **self.history[step]} for step in sorted(self.history)]
        frame = pd.DataFrame(rows)
        frame["model"] = frame["step"] == self.steps
        frame.to_parquet(path, index=False)


def train_on_rows(
    this: Stage,
    logs: MetricLogs,
    config: OfflineConfig,
    make: Callable[[], OfflineTrainer[Example, Any]],
    train: Sequence[Example],
    validation: Sequence[Example],
    tokenizer: Path,
) -> TrainedOnRows:
    """Train, in new attempts after lost workers, and write the model into the stage's folder.

    `make` gives a trainer of its own to each attempt. A stage that has checkpoints resumes from the
    newest. `tokenizer`: its folder.
    """
    checkpoints, name = this.checkpoints(), config.section
    this.record_origin(checkpoints)
    trained = TrainedOnRows({}, 0)

    def attempt(trainer: OfflineTrainer[Example, Any]) -> None:
        trained.steps = trainer.total_steps(len(train))
        losses: dict[str, float] = {}
        bar: Progress[None] = progress(trained.steps, name, unit="step")

        def report(step: int, total: int, metrics: dict[str, float]) -> None:
            trained.history[step] = metrics
            losses.update({k: v for k, v in metrics.items() if k.endswith(("loss", "accuracy"))})
            this.tracked.log_metrics(metrics, step)
            logs.log_metrics(metrics, step)
            shown = {k.removeprefix(f"{name}/"): v for k, v in losses.items()}
            bar.update(step - bar.count, **shown)

        trainer.on_step = report
        trainer.on_resume = lambda folder, step: say(
            f"{name}: continues from {folder}, step {step}"
        )
        with bar:
            trained.metrics |= trainer.fit(
                train, validation, checkpoints.folder, checkpoints.previous
            )
        trainer.save(this.folder, tokenizer)

    run_with_retries(make, attempt, checkpoints.folder, config.max_attempts)
    return trained


def publish_trained(this: Stage, trained: TrainedOnRows) -> Artifact:
    """Publish what `train_on_rows` left in the stage's folder, and drop its checkpoints."""
    this.tracked.log_folder(this.folder, "checkpoint")
    published = this.publish(trained.metrics, step=trained.steps)
    this.delete_local_checkpoints()
    return published


def sft(run: RunContext, settings: SFTSettings, dataset: Artifact) -> Artifact:
    """Fine-tune the start model on the dataset's prompt/response pairs, unless `config.skip`.

    Artifact `sft`: a Hugging Face model folder with its tokenizer; `start_model` without a warm
    start. On a profile with several GPUs ranks share the model (`sft.parallel`).
    """
    start, config, seed = settings.start, settings.config, settings.seed
    if config.skip:
        return publish_start_model(run, dataset, start, settings.start_digest)
    recorded = {
        "model": start.model_dump(mode="json"),
        "start_digest": settings.start_digest,
        "sft": config.model_dump(mode="json"),
        "seed": seed,
    }
    ray = ray_session("ray" if is_on_ray(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("sft", run, recorded) as this, open_loggers(run, this) as logs, ray:
        data = this.load_parent("dataset", dataset)
        this.log_splits(data, ("sft_train", "sft_validation"))
        tokenizer = load_tokenizer(data / "tokenizer")
        train, validation = (read_examples(data, n, tokenizer) for n in ("train", "validation"))
        scratch = this.folder / "scratch"
        model = start_model(start, config, tokenizer, seed, scratch)
        if is_on_ray(config):
            folders = [start.path] if start.path and Path(start.path).is_dir() else []
            require_shared([str(this.folder), *folders])

        def make() -> SFTTrainer:
            digest = settings.start_digest
            return SFTTrainer(model, tokenizer.pad_token_id, config, seed=seed, start=digest)

        trained = train_on_rows(this, logs, config, make, train, validation, data / "tokenizer")
        shutil.rmtree(scratch, ignore_errors=True)
        return publish_trained(this, trained)


def start_model(
    start: ModelConfig,
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    scratch: Path,
) -> PreTrainedModel | StartModel:
    """Return the model that training starts from; where it is on ranks, what they load it from.

    Ranks load one from scratch from the folder `scratch`.
    """
    on_ray = is_on_ray(config)
    dtype = offline_dtype(start.dtype, start.path, config) if start.path else start.dtype
    if on_ray and start.path:
        say(f"sft: {start.path} on Ray, {Layout.of(config.parallel)}, {dtype}")
        return StartModel(start.path, dtype, start.lora, seed)
    model = (
        load_policy_model(start.path, dtype, start.lora, seed)
        if start.path
        else build_model(start, tokenizer, seed)
    )
    size, kind = sum(p.numel() for p in model.parameters()), next(model.parameters()).dtype
    named = f"{model.config.model_type} model with {size / 1e6:.2f}M parameters"
    say(f"sft: {named}, {str(kind).removeprefix('torch.')}")
    if has_adapters(model):  # a model from scratch has none
        size = sum(p.numel() for p in adapter_parameters(model).values())
        say(f"sft: trains adapters of {size / 1e6:.2f}M parameters")
    if not on_ray:
        return model
    save_model(model, tokenizer, scratch)
    return StartModel(str(scratch), dtype, seed=seed)


def read_examples(data: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> list[SFTExample]:
    """Encode the pairs of a split of the dataset."""
    frame = pd.read_parquet(data / f"sft_{split}.parquet")
    prompts = encode_prompts(tokenizer, frame["prompt"], f"sft_{split}")
    return [
        SFTExample(prompt_ids, encode_response(tokenizer, response))
        for prompt_ids, response in zip(prompts, frame["response"], strict=True)
    ]


def rl(
    run: RunContext,
    settings: RLSettings,
    dataset: Artifact,
    warm_start: Artifact,
    reward_model: Artifact | None = None,
) -> Artifact:
    """Improve the warm start by reinforcement learning, here or on Ray actors.

    Artifact `rl`: a Hugging Face model folder with its tokenizer, of the step that
    `trainer.final_model` says; `metrics.parquet`, a row a step, with the column `model` for that
    step; `rollouts/`, samples of what the policy wrote (shown while it runs); and with
    `trainer.timeline_steps` a `timeline.json` for https://ui.perfetto.dev.

    reward_model: what rewards in the place of `config.reward`, and what a critic starts from.
    """
    data, config, lora, seed = settings.data, settings.config, settings.lora, settings.seed
    recorded = recorded_settings(settings)
    placing = placed(config, LOCAL_OBJECT_STORE_BYTES)
    with stage("rl", run, recorded) as this, open_loggers(run, this) as logs, placing as config:
        folder = this.load_parent("dataset", dataset)
        model = this.load_parent("warm_start", warm_start)
        shared = [str(this.folder), str(model)]
        if reward_model is not None:
            scorer = this.load_parent("reward_model", reward_model)
            config = by_reward_model(config, str(scorer))
            shared.append(str(scorer))
        if config.trainer.placement != "local":
            require_shared(shared)
        this.log_splits(folder, ("train", "validation"))
        lengths = json.loads((folder / "dataset.json").read_text())
        train = pd.read_parquet(folder / "train.parquet")
        rows = pd.read_parquet(folder / "validation.parquet").to_dict("records")
        validation = [{str(k): v for k, v in row.items()} for row in rows]

        checkpoints = this.checkpoints()
        this.record_origin(checkpoints)

        def save(write: WriteModel, step: int) -> Path:
            write(str(this.folder))
            return this.folder

        training = RLRun(
            model,
            config,
            PromptLoader(train, config.trainer.train_batch_size, seed, sampling=data.sampling),
            validation,
            prompt_room(config, lengths["max_prompt_length"], data.max_prompt_length),
            data.max_response_length,
            this.folder,
            checkpoints.folder,
            save,
            previous_checkpoints=checkpoints.previous,
            seed=seed,
            dtype=settings.dtype or saved_dtype(model),
            lora=lora,
            on_page=host().live_page("Rollouts"),
        )
        log = RunLog(this.tracked, logs, step_lines="console" in run.logger)
        log.say(headline(config))
        trained = train_policy(training, log)
        steps = pd.DataFrame(trained.history)
        steps[MODEL] = steps["step"] == trained.final.step
        steps.to_parquet(this.folder / FILE, index=False)
        this.tracked.log_folder(this.folder, "checkpoint")
        if config.trainer.log_rollouts_freq:
            copy_samples(f"{checkpoints.folder}/{ROLLOUTS}", this.folder / ROLLOUTS)
        metrics = next(row for row in trained.history if row["step"] == trained.final.step)
        if learned := read_overoptimisation(this.folder):
            log.say(f"rl: {learned.sentence()}")
            metrics = metrics | learned.metrics()
        published = this.publish(metrics | trained.final.metrics(), trained.changed_settings)
        this.delete_local_checkpoints()
        return published


def recorded_settings(settings: RLSettings) -> dict[str, object]:
    """Return what the manifest of RL records; what is as by default is left out."""
    data, lora = settings.data, settings.lora
    recorded: dict[str, object] = {
        "rl": settings.config.model_dump(mode="json"),
        "max_response_length": data.max_response_length,
        "seed": settings.seed,
    }
    if data.sampling != SamplingConfig():
        recorded["sampling"] = data.sampling.model_dump(mode="json")
    if lora.rank or lora.from_folder:
        recorded["lora"] = lora.model_dump(mode="json")
    if settings.dtype:
        recorded["dtype"] = settings.dtype
    return recorded
