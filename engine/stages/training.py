"""Stages `sft` and `rl`, and what all training stages share: attempts, progress, metrics, loggers.

Training on preferences is in `preferences`, reward models are in `reward_model`.
"""

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine import models
from engine.cli import rl_run
from engine.config import ModelConfig, OfflineConfig, SamplingConfig, SFTConfig
from engine.console import Progress, say
from engine.controller.launch import require_shared
from engine.data.chat_template import refusals
from engine.data.loader import PromptLoader
from engine.data.templates import encode_turn
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import AnyExample
from engine.errors import StorageError
from engine.evaluation.policy_steps import FILE, MODEL, read_overoptimisation
from engine.parallel.layout import Layout
from engine.preferences import by_reward_model
from engine.runtime.policy_runtime import StartModel
from engine.samples.sample_files import FOLDER as ROLLOUTS
from engine.samples.sample_files import copy_samples
from engine.stages.fetch import publish_start_model
from engine.stages.settings import PreferenceSettings, RLSettings, RunContext, SFTSettings
from engine.stages.stage import LOCAL_OBJECT_STORE_BYTES, Artifact, Stage, host, run_folder, stage
from engine.storage.filesystem import shared_store
from engine.storage.s3 import Objects
from engine.tracking.metric_logs import FILE as METRICS_FILE
from engine.tracking.metric_logs import PACKAGES, MetricLogs, open_metric_logs, require_packages
from engine.trainers.offline import OfflineTrainer, SFTExample, SFTTrainer, is_on_ray, offline_dtype
from engine.trainers.resume import run_with_retries

COPY_SECONDS = 30.0  # between two looks at what has grown
CLOSE_SECONDS = 60.0  # for the last copy

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_loggers(run: RunContext, this: Stage) -> Iterator[MetricLogs]:
    """Open a stage's logs for the block; none where `tracking.logger` names only MLflow.

    Files are in `runs/<run id>/<stage>/`, here and in a shared store. A missing package, and a
    store that can't be reached, fail before the block; one that fails later costs a sentence.
    """
    names = [name for name in run.logger if name in ("file", *PACKAGES)]
    if not names:
        yield MetricLogs()
        return
    require_packages(names, "tracking.logger")
    folder, below = run_folder(run, this.kind), f"{run.run_id}/{this.kind}"
    name = f"{this.kind}-{run.run_id}"
    options: dict[str, Any] = {"project": run.experiment, "run_name": name, "keep": True}
    options |= {"settings": this.config, "below": below}
    with _copied(folder, below), open_metric_logs(names, folder, **options) as logs:
        yield logs


@contextlib.contextmanager
def _copied(folder: Path, below: str) -> Iterator[None]:
    """Copy a folder's files to the shared store for the block, and say where they are."""
    store, metrics_file = shared_store(), folder / METRICS_FILE
    if not store:
        lost = bool(host().execution) * "; without HYBRIDFLYTE_STORE they end with this pod"
        say(f"{folder.name}: files of metrics are in {folder}{lost}")
        yield
        return
    objects, closed = Objects(f"{store}/runs/{below}"), threading.Event()
    if not metrics_file.exists():
        with contextlib.suppress(FileNotFoundError):
            metrics_file.write_bytes(objects.read(METRICS_FILE))
    say(f"{folder.name}: files of metrics are in {objects.uri}")
    arguments = (folder, objects, closed)
    thread = threading.Thread(target=_copy_until, args=arguments, name="metrics-copy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            _log.warning("%s is too slow; the last metrics are in %s", objects.uri, folder)


def _copy_until(folder: Path, objects: Objects, closed: threading.Event) -> None:
    """Copy the files that have grown, every `COPY_SECONDS`, and once more when it is closed."""
    sent: dict[Path, tuple[int, int]] = {}  # size and time of change
    warned = ended = False
    while not ended:
        ended = closed.wait(COPY_SECONDS)
        try:
            for path in sorted(folder.rglob("[!.]*")):  # a hidden one is being written
                # Weights & Biases links its newest run, and removes what it is done with.
                if not path.is_file() or path.is_symlink():
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    changed = status.st_size, status.st_mtime_ns
                    if sent.get(path) != changed:
                        objects.put(path.relative_to(folder).as_posix(), path.read_bytes())
                        sent[path] = changed
        except (OSError, StorageError) as error:
            if not warned:
                _log.warning("%s; its metrics wait in %s", error, folder)
            warned = True


Example = TypeVar("Example", bound=AnyExample)
SCRATCH = "scratch"  # folder of a stage that is no part of its artifact


def train_on_rows(
    this: Stage,
    run: RunContext,
    config: OfflineConfig,
    make: Callable[[], OfflineTrainer[Example, Any]],
    train: Sequence[Example],
    validation: Sequence[Example],
    tokenizer: Path,
    *,
    records_steps: bool = True,
) -> Artifact:
    """Train, in new attempts after lost workers, and publish the model.

    make: gives a trainer of its own to each attempt, which resumes from the newest checkpoint.
    records_steps: write `engine.evaluation.policy_steps.FILE`, a row a step, unless an attempt on
    another machine made some of the steps.
    """
    checkpoints, name = this.checkpoints(), config.section
    history: dict[int, dict[str, float]] = {}  # of steps of this process
    result: dict[str, float] = {}
    steps = 0

    def attempt(trainer: OfflineTrainer[Example, Any]) -> None:
        nonlocal steps
        steps = trainer.total_steps(len(train))
        losses: dict[str, float] = {}
        bar = Progress(steps, name, unit="step")

        def report(step: int, total: int, metrics: dict[str, float]) -> None:
            history[step] = metrics
            losses.update({k: v for k, v in metrics.items() if k.endswith(("loss", "accuracy"))})
            this.tracked.log_metrics(metrics, step)
            logs.log_metrics(metrics, step)
            shown = {k.removeprefix(f"{name}/"): v for k, v in losses.items()}
            bar.update(step - bar.count, **shown)

        trainer.on_step = report
        trainer.on_resume = lambda path, at: say(f"{name}: continues from {path}, step {at}")
        with bar:
            result.update(trainer.fit(train, validation, checkpoints.folder, checkpoints.previous))
        trainer.save(this.folder, tokenizer)

    with open_loggers(run, this) as logs:
        run_with_retries(make, attempt, checkpoints.folder, config.max_attempts)
    shutil.rmtree(this.folder / SCRATCH, ignore_errors=True)
    if records_steps and len(history) >= steps:
        rows = pd.DataFrame([{"step": step, **history[step]} for step in sorted(history)])
        rows[MODEL] = rows["step"] == steps
        rows.to_parquet(this.folder / FILE, index=False)
    this.tracked.log_folder(this.folder, "checkpoint")
    published = this.publish(result, step=steps)
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
    with stage("sft", run, recorded, on_ray=is_on_ray(config)) as this:
        data = this.load_parent("dataset", dataset)
        this.log_splits(data, ("sft_train", "sft_validation"))
        tokenizer = load_tokenizer(data / "tokenizer")
        train, validation = (read_examples(data, n, tokenizer) for n in ("train", "validation"))
        model = start_model(start, config, tokenizer, seed, this.folder / SCRATCH)
        if is_on_ray(config):
            folders = [start.path] if start.path and Path(start.path).is_dir() else []
            require_shared([str(this.folder), *folders])

        pad, digest = tokenizer.pad_token_id, settings.start_digest
        make = partial(SFTTrainer, model, pad, config, seed=seed, start=digest)
        rows = (train, validation, data / "tokenizer")
        return train_on_rows(this, run, config, make, *rows, records_steps=False)


def start_model(
    start: ModelConfig,
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    scratch: Path,
) -> PreTrainedModel | StartModel:
    """Return the model that training starts from, or what ranks load it from."""
    on_ray = is_on_ray(config)
    dtype = offline_dtype(start.dtype, start.path, config) if start.path else start.dtype
    if on_ray and start.path:
        say(f"sft: {start.path} on Ray, {Layout.of(config.parallel)}, {dtype}")
        return StartModel(start.path, dtype, start.lora, seed)
    model = (
        models.load_policy_model(start.path, dtype, start.lora, seed)
        if start.path
        else models.build_model(start, tokenizer, seed)
    )
    size, kind = sum(p.numel() for p in model.parameters()), next(model.parameters()).dtype
    named = f"{model.config.model_type} model with {size / 1e6:.2f}M parameters"
    say(f"sft: {named}, {str(kind).removeprefix('torch.')}")
    if models.has_adapters(model):  # a model from scratch has none
        size = sum(p.numel() for p in models.adapter_parameters(model).values())
        say(f"sft: trains adapters of {size / 1e6:.2f}M parameters")
    if not on_ray:
        return model
    models.save_model(model, tokenizer, scratch)
    return StartModel(str(scratch), dtype, seed=seed)


def read_examples(data: Path, split: str, tokenizer: PreTrainedTokenizerBase) -> list[SFTExample]:
    """Encode the pairs of a split of the dataset."""
    frame = pd.read_parquet(data / f"sft_{split}.parquet")
    examples = []
    for row, (prompt, response) in enumerate(zip(frame["prompt"], frame["response"], strict=True)):
        with refusals(tokenizer, f"sft_{split}, row {row}"):
            answer = {"role": "assistant", "content": response}
            examples.append(encode_turn(tokenizer, prompt, answer))
    return examples


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
    data, config, seed = settings.data, settings.config, settings.seed
    recorded: dict[str, object] = {
        "rl": config.model_dump(mode="json"),
        "max_response_length": data.max_response_length,
        "seed": seed,
    }
    if data.sampling != SamplingConfig():
        recorded["sampling"] = data.sampling.model_dump(mode="json")
    recorded |= weights_recorded(settings)
    placing = rl_run.placed(config, LOCAL_OBJECT_STORE_BYTES)
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
        longest = json.loads((folder / "dataset.json").read_text())["max_prompt_length"]
        train = pd.read_parquet(folder / "train.parquet")
        validation = pd.read_parquet(folder / "validation.parquet")
        checkpoints = this.checkpoints()

        def save(write: rl_run.WriteModel, step: int) -> Path:
            write(str(this.folder))
            return this.folder

        training = rl_run.RLRun(
            model,
            config,
            PromptLoader(train, config.trainer.train_batch_size, seed, sampling=data.sampling),
            [{str(k): v for k, v in row.items()} for row in validation.to_dict("records")],
            rl_run.prompt_room(config, longest, data.max_prompt_length),
            data.max_response_length,
            this.folder,
            checkpoints.folder,
            save,
            previous_checkpoints=checkpoints.previous,
            seed=seed,
            dtype=settings.dtype or models.saved_dtype(model),
            lora=settings.lora,
            on_page=host().live_page("Rollouts"),
        )
        log = rl_run.RunLog(this.tracked, logs, step_lines="console" in run.logger)
        say(rl_run.headline(config, training.loader.batch_size))
        trained = rl_run.train_policy(training, log)
        steps = pd.DataFrame(trained.history)
        steps[MODEL] = steps["step"] == trained.final.step
        steps.to_parquet(this.folder / FILE, index=False)
        this.tracked.log_folder(this.folder, "checkpoint")
        if config.trainer.log_rollouts_freq:
            copy_samples(f"{checkpoints.folder}/{ROLLOUTS}", this.folder / ROLLOUTS)
        metrics = next(row for row in trained.history if row["step"] == trained.final.step)
        if learned := read_overoptimisation(this.folder):
            say(f"rl: {learned.sentence()}")
            metrics = metrics | learned.metrics()
        published = this.publish(metrics | trained.final.metrics(), trained.changed_settings)
        this.delete_local_checkpoints()
        return published


def weights_recorded(settings: RLSettings | PreferenceSettings) -> dict[str, object]:
    """Return what manifests record of adapters and dtype; what is as by default is left out."""
    lora, recorded = settings.lora, dict[str, object]()
    if lora.rank or lora.from_folder:
        recorded["lora"] = lora.model_dump(mode="json")
    return recorded | ({"dtype": settings.dtype} if settings.dtype else {})
