"""The run of `python -m engine.main_ppo`: data read and checked, training, or `--dry-run`.

Arguments are in `forms`, the RL run itself is in `rl_run`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.help_text import config_text
from engine.cli.rl_run import (
    RLRun,
    RunLog,
    headline,
    open_log,
    placed,
    prompt_room,
    train_policy,
    validate_policy,
)
from engine.cli.run_folder import (
    error_details_file,
    local_model,
    make_output_folder,
    save_atomically,
)
from engine.cli.settings import DataFilesConfig, RunConfig, gpu_pools
from engine.config import ActorConfig, CriticConfig, RLConfig
from engine.console import human_time
from engine.controller.launch import require_shared
from engine.data.loader import PromptLoader, add_prompt_ids, frame_of
from engine.data.row_files import data_files, read_file_rows
from engine.data.templates import rows_spelling_control_tokens, with_template_variables
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError
from engine.models import resolve_lora, text_config, vocabulary_and_context
from engine.models.loading import check_overrides, link_model
from engine.samples.sample_files import FOLDER as ROLLOUTS
from engine.storage.json_rows import Row
from engine.trainers.auto_placement import (
    Machines,
    local_gpu,
    model_dtype,
    run_roles,
    step_estimate,
    workload,
)
from engine.trainers.layout_checks import check_layouts
from engine.trainers.run_plan import check_config
from engine.trainers.run_spec import default_pools, layout_of, resolve_placement

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that a run doesn't take, and rows that spell control tokens."""

    long: int = 0  # prompts over data.max_prompt_length
    control_tokens: int = 0  # rows that spell control tokens, left out or not
    bad: tuple[str, ...] = ()  # what bad rows were left out, a sentence a file

    def __add__(self, other: LeftOut) -> LeftOut:
        spelled = self.control_tokens + other.control_tokens
        return LeftOut(self.long + other.long, spelled, self.bad + other.bad)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for training and validation."""

    loader: PromptLoader
    validation: list[Row]
    longest: int  # prompt of both, in tokens
    left_out: LeftOut


def read_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Prompts:
    """Read all files; raise DataError or ConfigError for rows and settings that don't fit.

    `context` is the model's limit in tokens.
    """
    data = config.data
    tokenizer = with_template_variables(tokenizer, data.apply_chat_template_kwargs)
    train, left_out = _rows(data, data.train_files, tokenizer, context, "data.train_files")
    train = _limit_rows(train, data.train_max_samples, config)
    batch = config.rl.trainer.train_batch_size
    if batch > len(train):
        raise ConfigError(
            f"rl.trainer.train_batch_size={batch} is more than the {len(train)} rows of "
            "data.train_files; lower it"
        )
    validation: list[Row] = []
    if data.val_files:
        validation, more = _rows(data, data.val_files, tokenizer, context, "data.val_files")
        left_out += more
        validation = _limit_rows(validation, data.val_max_samples, config)
    longest = max(len(row.pop("prompt_ids")) for row in [*train, *validation])
    loader = PromptLoader(
        frame_of(train),
        batch,
        config.seed,
        data.shuffle,
        data.sampling,
        data.apply_chat_template_kwargs,
        data.cut,
    )
    return Prompts(loader, validation, longest, left_out)


def _limit_rows(rows: list[Row], count: int, config: RunConfig) -> list[Row]:
    """Return `count` rows (-1: all): the first, or with `data.shuffle` some drawn by the seed."""
    if count < 1 or count >= len(rows):
        return rows
    if not config.data.shuffle:
        return rows[:count]
    chosen = random.Random(config.seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def _rows(
    data: DataFilesConfig,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    key: str,
) -> tuple[list[Row], LeftOut]:
    """Return the rows of all files, and what was left out of them."""
    if not files:
        raise ConfigError(
            f"{key} is missing; give one JSONL, JSON, CSV or Parquet file, or a list of them"
        )
    limit, way_out = data.max_prompt_length, "raise data.max_prompt_length"
    if limit and data.filter_overlong_prompts:
        way_out = ""
    if not limit:
        limit = context
        way_out = "leave them out with data.max_prompt_length and data.filter_overlong_prompts"
    rows: list[Row] = []
    left_out = LeftOut()
    local = [file if "://" in file else str(Path(file).expanduser()) for file in files]
    for path in [path for file in local for path in data_files(file)]:
        read = read_file_rows(path, data)
        file_rows, numbers = read.rows, read.numbers
        left_out += LeftOut(bad=tuple(read.notes))
        if not file_rows:
            continue
        _check_alike(rows or file_rows, file_rows, path, key)
        spelled = set(
            rows_spelling_control_tokens(file_rows, tokenizer, data.control_tokens, path, numbers)
        )
        left_out += LeftOut(control_tokens=len(spelled))
        if data.control_tokens == "drop":
            plain = [i for i in range(len(file_rows)) if i not in spelled]
            file_rows, numbers = [file_rows[i] for i in plain], [numbers[i] for i in plain]
        add_prompt_ids(file_rows, tokenizer, limit, path, way_out, numbers, data.cut)
        rows += file_rows
    if not rows and left_out.control_tokens:
        raise DataError(
            f"{key}: all {left_out.control_tokens} rows spell control tokens of the model, and "
            "data.control_tokens=drop leaves them out; correct them, or set it to escape"
        )
    if not rows:
        raise DataError(f"{key}: no row is left; {left_out.bad[0]}")
    short = [row for row in rows if row["prompt_ids"] is not None]
    if not short:
        raise DataError(
            f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit} "
            "tokens; raise it"
        )
    return short, left_out + LeftOut(long=len(rows) - len(short))


def _check_alike(before: Sequence[Row], rows: Sequence[Row], path: str, key: str) -> None:
    """Raise DataError where a file has other columns than those before it."""
    if other := (before[0].keys() ^ rows[0].keys()) - {"prompt_ids"}:
        raise DataError(
            f"{path} has other columns than the file before it in {key}: "
            f"{sorted(other)} are in one only; make them equal"
        )
    has, had = (part[0]["reward_model"]["ground_truth"] is not None for part in (rows, before))
    if has != had:
        raise DataError(
            f"{path} has {'' if has else 'no '}ground truths and the file before it in {key} has "
            f"{'some' if had else 'none'}; give reward_model.ground_truth in all files or in none"
        )


def run(config: RunConfig) -> Path:
    """Train, validate, save; return the folder of the model that the run hands over.

    With `run.val_only` it validates alone, and the folder is that of the run. Raises an
    EngineError; what is wrong with the input is found before any worker starts, and what it names
    by `check_names` before this module is loaded.
    """
    check_config(config.rl, config.data.max_response_length)
    folder = make_output_folder(config.run.folder())
    model = local_model(config.model.path)
    if config.model.override_config:
        base, changes = model, check_overrides(model, config.model.override_config)
        target = folder / "start_model"
        save_atomically(lambda draft: link_model(base, changes, Path(draft)), target)
        model = str(target.absolute())
    context = vocabulary_and_context(model)[1]
    prompts = read_prompts(config, load_tokenizer(model), context)
    config = with_steps(config, len(prompts.loader))
    resumes = any(checkpoint_folder(config, folder).glob("step_*"))
    with (
        error_details_file(folder),
        open_log(config, folder, resumes) as log,
        placed(config.rl) as rl,
    ):
        rl = gpu_pools(config.model_copy(update={"rl": rl}))
        config = config.model_copy(update={"rl": rl})
        if rl.trainer.placement != "local":
            require_shared([str(folder), *([model] if Path(model).is_dir() else [])])
        return _train(config, model, prompts, folder, log)


def _train(config: RunConfig, model: str, prompts: Prompts, folder: Path, log: RunLog) -> Path:
    started = time.monotonic()
    left_out = prompts.left_out
    done = "left out" if config.data.control_tokens == "drop" else "kept as plain text"
    if left_out.control_tokens:
        log.say(f"rl: {left_out.control_tokens} rows spell control tokens of the model; {done}")
    for sentence in left_out.bad:
        log.say(f"rl: {sentence}")
    long = f" ({left_out.long} too long, left out)" if left_out.long else ""
    log.say(
        f"{headline(config.rl)}, {len(prompts.loader)} prompts{long}, "
        f"{len(prompts.validation)} for validation"
    )
    run = RLRun(
        model,
        config.rl,
        prompts.loader,
        prompts.validation,
        prompt_room(config.rl, prompts.longest, config.data.max_prompt_length),
        config.data.max_response_length,
        folder,
        checkpoint_folder(config, folder),
        lambda write, step: save_atomically(write, folder / f"step_{step}"),
        rollouts=config.run.rollout_data_dir or folder / ROLLOUTS,
        save_freq=config.run.save_freq,
        keep_last=True,
        validate_first=config.run.val_before_train,
        print_validations=config.run.log_val_generations,
        seed=config.seed,
        dtype=config.model.dtype,
        lora=config.model.lora,
    )
    if config.run.val_only:
        metrics = validate_policy(run, log)
        for name, value in metrics.items():
            log.say(f"  {name:<28} {value:.4f}")
        return folder
    trained = train_policy(run, log)
    log.say(f"rl: done, {len(log.rewards)} steps in {human_time(time.monotonic() - started)}")
    for name, values in (("reward", log.rewards), ("validation", log.validations)):
        if values:
            log.say(f"  {name:<10}  {values[0]:.3f} → {values[-1]:.3f}")
    log.say(f"  model       {trained.folder} ({trained.final})")
    return trained.folder


def checkpoint_folder(config: RunConfig, folder: Path) -> Path:
    """Return where checkpoints go: a new place each time, unless resume_mode=auto."""
    if config.run.resume_mode == "auto":
        return folder / "checkpoints"
    # With resume_path, too: what lies in "checkpoints" would come before the one that is named.
    return folder / f"checkpoints.{time.strftime('%Y%m%d-%H%M%S')}"


def with_steps(config: RunConfig, rows: int) -> RunConfig:
    """Turn `run.total_epochs`, if given, into steps."""
    if config.run.total_epochs is None:
        return config
    steps = max(1, config.run.total_epochs * rows // config.rl.trainer.train_batch_size)
    trainer = config.rl.trainer.model_copy(update={"total_training_steps": steps})
    return config.model_copy(update={"rl": config.rl.model_copy(update={"trainer": trainer})})


def dry_run(config: RunConfig, accelerator: str = "") -> Iterator[str]:
    """Yield the lines that say what the run would be; raises as the run would before its start.

    `accelerator` is the kind of GPU that memory and time are estimated for, by Ray's name; empty:
    that of this machine, or H100 for ranks of several GPUs.
    """
    check_config(config.rl, config.data.max_response_length)
    model = local_model(config.model.path)
    if config.model.override_config:
        check_overrides(model, config.model.override_config)
    prompts = read_prompts(config, load_tokenizer(model), vocabulary_and_context(model)[1])
    config = with_steps(config, len(prompts.loader))
    rl = resolve_placement(config.rl)
    lora = resolve_lora(model, config.model.lora)
    check_layouts(rl, lora, text_config(model))
    yield config_text(config).rstrip()
    yield ""
    trainer = rl.trainer
    yield (
        f"run       {trainer.total_training_steps} steps of {trainer.train_batch_size} of "
        f"{len(prompts.loader)} prompts, {len(prompts.validation)} for validation, longest "
        f"{prompts.longest} tokens; output in {config.run.folder()}"
    )
    yield from _batches(rl)
    yield from _placement(rl)
    ranks, per_node = layout_of("actor", rl).world_size, config.run.n_gpus_per_node
    kind = accelerator
    if not kind and config.run.device != "cpu":
        kind = local_gpu() or ("H100" if per_node is not None and per_node > 1 else "")
    machines = Machines(ranks, min(ranks, per_node or ranks), kind)
    try:
        work = workload(
            rl,
            model_path=model,
            lora=lora,
            dtype=model_dtype(config.model.dtype, model, rl),
            max_response_length=config.data.max_response_length,
            max_model_len=prompts.longest + config.data.max_response_length,
        )
    except ConfigError as error:
        yield f"estimate  none: {error}"
        return
    where = f"{machines.ranks} × {machines.accelerator or 'CPU'}"
    yield f"estimate  for {where}; every row as long as the longest"
    yield from step_estimate(rl, work, machines)


def _batches(rl: RLConfig) -> Iterator[str]:
    """Yield the table of batches: prompts and completions of a step, mini-batch, micro-batch."""
    n, trainer, rows = rl.rollout.n, rl.trainer, [("", "global", "mini", "a rank's mini", "micro")]
    completions = trainer.train_batch_size * n
    rows.append(("prompts", str(trainer.train_batch_size), "", "", ""))
    sections: list[tuple[str, ActorConfig | CriticConfig]] = [("actor", rl.actor)]
    if "critic" in run_roles(rl)[1]:
        sections.append(("critic", rl.critic))
    for role, section in sections:
        mini, ranks = section.ppo_mini_batch_size or completions, layout_of(role, rl).data_ranks
        micro = f"{section.max_tokens_per_micro_batch} tokens"
        rows.append((role, str(completions), str(mini), f"{mini / ranks:g}", micro))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield "batches   completions of a step" + (f", {n} a prompt" if n > 1 else "")
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        yield "          " + "  ".join(cells).rstrip()


def _placement(rl: RLConfig) -> Iterator[str]:
    pools, roles = rl.trainer.pools, run_roles(rl)[1]
    named = [pool.roles for pool in pools] or default_pools(roles)
    yield f"placement {rl.trainer.placement}: " + ", ".join("+".join(pool) for pool in named)
    for role in ("actor", "critic"):
        if role in roles:
            layout = layout_of(role, rl)
            yield f"          {role}: {layout.world_size} rank(s), {layout}"
    rollout = rl.rollout
    yield f"          rollout: {rollout.engine}, tensor parallel {rollout.tensor_parallel_size}"
