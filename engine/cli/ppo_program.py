"""The run of `python -m engine.main_ppo`: data read and checked, training, or `--dry-run`."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from engine import models
from engine.checkpoint import Checkpoint
from engine.checkpoint.format import read_role_states
from engine.checkpoint.run_lock import hold_lock
from engine.cli import rl_run, run_folder
from engine.cli.program import config_text
from engine.cli.settings import RunConfig
from engine.config import ActorConfig, CriticConfig, PoolConfig, RLConfig
from engine.console import human_time, say
from engine.controller.launch import require_shared
from engine.data.chat_template import with_template_variables
from engine.data.control_tokens import rows_spelling_control_tokens
from engine.data.loader import PromptLoader, add_prompt_ids, frame_of
from engine.data.row_files import data_files, read_file_rows
from engine.errors import CheckpointError, ConfigError, DataError, PlacementError, counted
from engine.models.loading import check_overrides, link_model
from engine.rollout.protocol import engine_capabilities
from engine.runtime.policy_runtime import StartModel, open_tokenizer
from engine.runtime.train_state import check_start, check_weights, weights_fingerprint
from engine.samples.sample_files import FOLDER as ROLLOUTS
from engine.storage.json_rows import Row
from engine.trainers import auto_placement, run_spec
from engine.trainers.layout_checks import check_layouts
from engine.trainers.resume import MAY_CHANGE, changed_settings, run_settings
from engine.trainers.run_plan import check_config


@dataclass(slots=True)
class LeftOut:
    """Rows that a run doesn't take, and rows that spell control tokens."""

    long: int = 0  # prompts over data.max_prompt_length
    control_tokens: int = 0  # rows that spell control tokens, left out or not
    bad: list[str] = field(default_factory=list)  # what bad rows were left out, a sentence a file

    def sentences(self, control_tokens: str) -> Iterator[str]:
        """Say what was left out, but not of long prompts; `control_tokens`: data's setting."""
        if self.control_tokens:
            done = "left out" if control_tokens == "drop" else "kept as plain text"
            yield f"{self.control_tokens} rows spell control tokens of the model; {done}"
        yield from self.bad


@dataclass(frozen=True, slots=True)
class Prompts:
    loader: PromptLoader
    validation: list[Row]
    longest: int  # prompt of both, in tokens
    left_out: LeftOut


def read_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Prompts:
    """Read all files; DataError or ConfigError for what doesn't fit a model of `context` tokens."""
    data, batch, left_out = config.data, config.rl.trainer.train_batch_size, LeftOut()
    variables = data.apply_chat_template_kwargs
    tokenizer = with_template_variables(tokenizer, variables)
    train, validation = (
        _rows(config, name, tokenizer, context, left_out) if getattr(data, name) else []
        for name in ("train_files", "val_files")
    )
    train = _limit_rows(train, data.train_max_samples, config)
    validation = _limit_rows(validation, data.val_max_samples, config)
    longest = max(len(row.pop("prompt_ids")) for row in [*train, *validation])
    options = (data.shuffle, data.sampling, variables, data.cut, data.train_files)
    loader = PromptLoader(frame_of(train), batch, config.seed, *options)
    return Prompts(loader, validation, longest, left_out)


def _prepare(config: RunConfig, model: str) -> tuple[RunConfig, Prompts]:
    """Read the prompts; a batch is all of a smaller file, `run.total_epochs` becomes steps."""
    tokenizer, context = open_tokenizer(model), models.vocabulary_and_context(model)[1]
    prompts, data = read_prompts(config, tokenizer, context), config.data
    longest = rl_run.prompt_room(config.rl, prompts.longest, data.max_prompt_length)
    models.check_context(longest, data.max_response_length, context)
    changes = {"rl.trainer.train_batch_size": prompts.loader.batch_size}
    if config.run.total_epochs is not None:
        rows = config.run.total_epochs * len(prompts.loader)
        steps = max(1, rows // prompts.loader.batch_size)
        changes["rl.trainer.total_training_steps"] = steps
    return config.replaced(changes), prompts


def _limit_rows(rows: list[Row], count: int, config: RunConfig) -> list[Row]:
    """Return `count` rows (-1: all): the first, or with `data.shuffle` some drawn by the seed."""
    if count < 1 or count >= len(rows):
        return rows
    if not config.data.shuffle:
        return rows[:count]
    chosen = random.Random(config.seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def _rows(
    config: RunConfig,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    left_out: LeftOut,
) -> list[Row]:
    """Return the rows of the files in `data.<name>`; add to what was left out of them."""
    data, key = config.data, f"data.{name}"
    limit, way_out = data.max_prompt_length, "raise data.max_prompt_length"
    if limit and data.filter_overlong_prompts:
        way_out = ""
    if not limit:
        limit = context
        way_out = "leave them out with data.max_prompt_length and data.filter_overlong_prompts"
    rows: list[Row] = []
    files: Sequence[str] = getattr(data, name)
    local = [file if "://" in file else str(Path(file).expanduser()) for file in files]
    spelling = 0
    for path in [path for file in local for path in data_files(file)]:
        read = read_file_rows(path, data)
        file_rows, numbers = read.rows, read.numbers
        left_out.bad += read.notes
        if not file_rows:
            continue
        _check_alike(rows or file_rows, file_rows, path, key)
        spelled = set(
            rows_spelling_control_tokens(file_rows, tokenizer, data.control_tokens, path, numbers)
        )
        spelling += len(spelled)
        if data.control_tokens == "drop":
            plain = [i for i in range(len(file_rows)) if i not in spelled]
            file_rows, numbers = [file_rows[i] for i in plain], [numbers[i] for i in plain]
        add_prompt_ids(file_rows, tokenizer, limit, path, way_out, numbers, data.cut)
        rows += file_rows
    left_out.control_tokens += spelling
    if not rows and spelling:
        raise DataError(
            f"{key}: all {spelling} rows spell control tokens; set data.control_tokens=escape"
        )
    if not rows:
        raise DataError(f"{key}: no row is left; {left_out.bad[-1]}")
    short = [row for row in rows if row["prompt_ids"] is not None]
    if not short:
        raise DataError(
            f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens"
        )
    left_out.long += len(rows) - len(short)
    return short


def _check_alike(before: Sequence[Row], rows: Sequence[Row], path: str, key: str) -> None:
    if other := (before[0].keys() ^ rows[0].keys()) - {"prompt_ids"}:
        raise DataError(
            f"{path} and the file before it in {key} differ in columns {sorted(other)}; align them"
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
    EngineError; what is wrong with the input is found before any worker starts.
    """
    check_config(config.rl, config.data.max_response_length)
    folder = run_folder.make_output_folder(config.run.folder())
    model = run_folder.local_model(config.model.path)
    if config.model.override_config:
        base, changes = model, check_overrides(model, config.model.override_config)
        target = folder / "start_model"
        run_folder.save_atomically(lambda draft: link_model(base, changes, Path(draft)), target)
        model = str(target.absolute())
    config, prompts = _prepare(config, model)
    checkpoints = run_folder.checkpoint_folder(folder, config.run.resume_mode)
    with (
        run_folder.error_details_file(folder),
        hold_lock(None if config.run.val_only else checkpoints),  # before anything is logged
        rl_run.open_log(config, folder, checkpoints) as log,
        rl_run.placed(config.rl) as rl,
    ):
        config = _with_gpus(config.replaced({"rl": rl}))
        if config.rl.trainer.placement != "local":
            require_shared([str(folder), *([model] if Path(model).is_dir() else [])])
        return _train(config, model, prompts, folder, checkpoints, log)


def _train(
    config: RunConfig,
    model: str,
    prompts: Prompts,
    folder: Path,
    checkpoints: Path,
    log: rl_run.RunLog,
) -> Path:
    started, left_out = time.monotonic(), prompts.left_out
    for sentence in left_out.sentences(config.data.control_tokens):
        say(f"rl: {sentence}")
    long = f" ({left_out.long} too long, left out)" if left_out.long else ""
    headline = rl_run.headline(config.rl, prompts.loader.batch_size)
    say(f"{headline}, of {len(prompts.loader)} prompts{long}; {len(prompts.validation)} validate")
    if warning := models.high_learning_rate(model, config.rl.actor.optim, config.model.lora):
        say(f"rl: actor.{warning}")
    run = rl_run.RLRun(
        model,
        config.rl,
        prompts.loader,
        prompts.validation,
        rl_run.prompt_room(config.rl, prompts.longest, config.data.max_prompt_length),
        config.data.max_response_length,
        folder,
        checkpoints,
        lambda write, step: run_folder.save_atomically(write, folder / f"step_{step}"),
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
        for name, value in rl_run.validate_policy(run, log).items():
            say(f"  {name:<28} {value:.4f}")
        return folder
    trained = rl_run.train_policy(run, log)
    count = len(log.rewards)
    say(f"rl: done, {counted(count, 'step')} in {human_time(time.monotonic() - started)}")
    if log.rewards and not any(log.rewards):
        say(
            f"rl: every reward was 0, so nothing was learned; see python -m engine.samples {folder}"
        )
    for name, values in (("reward", log.rewards), ("validation", log.validations)):
        if values:
            say(f"  {name:<10}  {values[0]:.3f} → {values[-1]:.3f}")
    say(f"  model       {trained.folder} ({trained.final})")
    return trained.folder


def _with_gpus(config: RunConfig) -> RunConfig:
    """Give the policy's ranks and the samplers GPUs, where Ray has any and no pools are set."""
    trainer, device, ranks = config.rl.trainer, config.run.device, config.run.ranks
    if trainer.placement == "local":
        if device == "cuda" and not torch.cuda.is_available():
            raise PlacementError("run.device=cuda, and there is no GPU; set trainer.device=cpu")
        return config
    if trainer.pools or trainer.placement != "ray" or device == "cpu" or ranks is None:
        return config
    if not auto_placement.cluster_has_gpus(config.rl):
        if device == "cuda":
            raise PlacementError("run.device=cuda, and Ray has no GPU; set trainer.device=cpu")
        say(f"rl: Ray has no GPU, so {ranks} ranks compute on CPUs")
        return config
    apart = run_spec.sampler_count(trainer) > 0
    if apart and ranks == 1:
        raise ConfigError(
            f"run.n_gpus_per_node=1 with trainer.mode={trainer.mode}: the trainer and a sampler "
            "need a GPU each; set 2 or more, or trainer.mode=sync"
        )
    policy, *others = run_spec.default_pools(run_spec.run_roles(config.rl)[1])
    pools = [PoolConfig(roles=roles, cpus=0.0) for roles in others]
    pools.insert(0, PoolConfig(roles=policy, cpus=1.0, gpus=1.0))
    if apart:
        remote = engine_capabilities(config.rl.rollout).remote
        gpus = 0.0 if remote else float(config.rl.rollout.tensor_parallel_size)
        pools.append(PoolConfig(roles=("sampler",), cpus=max(1.0, gpus), gpus=gpus))
    return config.replaced({"rl.trainer.pools": tuple(pools)})


def dry_run(config: RunConfig, accelerator: str = "") -> Iterator[str]:
    """Yield the lines that say what the run would be; raises as the run would before its start.

    `accelerator`: the kind of GPU to estimate for, by Ray's name; empty: this machine's, or H100.
    """
    check_config(config.rl, config.data.max_response_length)
    model = run_folder.local_model(config.model.path)
    if config.model.override_config:
        check_overrides(model, config.model.override_config)
    config, prompts = _prepare(config, model)
    rl = run_spec.resolve_placement(config.rl)
    lora = models.resolve_lora(model, config.model.lora)
    check_layouts(rl, lora, models.text_config(model))
    yield config_text(config).rstrip()
    yield ""
    trainer = rl.trainer
    yield (
        f"run       {trainer.total_training_steps} steps of {trainer.train_batch_size} of "
        f"{len(prompts.loader)} prompts, {len(prompts.validation)} for validation, longest "
        f"{prompts.longest} tokens; output in {config.run.folder()}"
    )
    for sentence in prompts.left_out.sentences(config.data.control_tokens):
        yield f"rows      {sentence}"
    if prompts.left_out.long:
        yield f"rows      left out: {counted(prompts.left_out.long, 'prompt')} too long"
    if warning := models.high_learning_rate(model, rl.actor.optim, lora):
        yield f"warning   actor.{warning}"
    yield from _layout_lines(rl)
    ranks, per_node = run_spec.layout_of("actor", rl).world_size, config.run.n_gpus_per_node
    kind = accelerator
    if not kind and config.run.device != "cpu":
        kind = auto_placement.local_gpu() or ("H100" if (per_node or 1) > 1 else "")
    seconds, dtype = None, auto_placement.model_dtype(config.model.dtype, model, rl)
    try:
        work = auto_placement.workload(
            rl,
            model_path=model,
            lora=lora,
            dtype=dtype,
            max_response_length=config.data.max_response_length,
            max_model_len=prompts.longest + config.data.max_response_length,
        )
    except ConfigError as error:
        yield f"estimate  none: {error}"
    else:
        yield f"estimate  for {ranks} × {kind or 'CPU'}; every row as long as the longest"
        machines = auto_placement.rl_candidate(rl), ranks, min(ranks, per_node or ranks), kind
        fixed = auto_placement.fixed_settings(rl)
        seconds, lines = auto_placement.step_estimate(work, *machines, fixed)
        yield from lines
    start = StartModel(model, dtype, config.model.lora, config.seed)
    yield from run_folder.plan_lines(
        config.run,
        trainer.total_training_steps,
        seconds,
        partial(_check_resumable, config=config.replaced({"rl": rl}), prompts=prompts, start=start),
    )


def _check_resumable(
    checkpoint: Checkpoint, config: RunConfig, prompts: Prompts, start: StartModel
) -> None:
    """Raise an EngineError where a run of these settings, rows and model couldn't resume from it.

    The model's weights are not loaded: names, shapes and some values of each are compared.
    """
    length, seed = config.data.max_response_length, config.seed
    settings, defaults = (run_settings(rl, length, seed) for rl in (config.rl, RLConfig()))
    changed_settings(checkpoint, settings, MAY_CHANGE, defaults)
    prompts.loader.load_state_dict(checkpoint.state["prompts"]["loader"])
    model, saved = start.open(), read_role_states(checkpoint.folder, "actor")
    try:
        check_weights(model, saved)
        check_start(saved[0], weights_fingerprint(model), start.path)
    except CheckpointError as error:
        raise error.with_message(f"{checkpoint.folder}: {error}") from error


def _layout_lines(rl: RLConfig) -> Iterator[str]:
    """Yield a step's batches as a table, and which roles share a process."""
    rollout, trainer, roles = rl.rollout, rl.trainer, run_spec.run_roles(rl)[1]
    completions = trainer.train_batch_size * rollout.n
    sections: dict[str, ActorConfig | CriticConfig] = {"actor": rl.actor, "critic": rl.critic}
    layouts = {role: run_spec.layout_of(role, rl) for role in sections if role in roles}
    row = "          {:<7}  {:>7}  {:>7}  {:>13}  {:>12}".format
    yield "batches   completions of a step" + (f", {rollout.n} a prompt" if rollout.n > 1 else "")
    yield row("", "global", "mini", "a rank's mini", "micro")
    yield row("prompts", trainer.train_batch_size, "", "", "").rstrip()
    for role, layout in layouts.items():
        mini = sections[role].ppo_mini_batch_size or completions
        micro = f"{sections[role].max_tokens_per_micro_batch} tokens"
        yield row(role, completions, mini, f"{mini / layout.data_ranks:g}", micro)
    pools = [pool.roles for pool in trainer.pools] or run_spec.default_pools(roles)
    yield f"placement {trainer.placement}: " + ", ".join("+".join(pool) for pool in pools)
    for role, layout in layouts.items():
        yield f"          {role}: {counted(layout.world_size, 'rank')}, {layout}"
    yield f"          rollout: {rollout.engine}, tensor parallel {rollout.tensor_parallel_size}"
