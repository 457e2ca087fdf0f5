"""`--dry-run`: what a run would be, with its data read and checked, and nothing started."""

from __future__ import annotations

from collections.abc import Iterator

from engine.cli.data import read_prompts
from engine.cli.help_text import config_text
from engine.cli.run import local_model, with_steps
from engine.cli.settings import RunConfig
from engine.config import ActorConfig, CriticConfig, RLConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.models import resolve_lora, text_config, vocabulary_and_context
from engine.models.override import check_overrides
from engine.parallel.layout import Layout
from engine.trainers.layouts import check_layouts, layout_of
from engine.trainers.precision import model_dtype
from engine.trainers.rl_checks import check_config
from engine.trainers.rl_setup import default_pools, resolve_placement
from engine.trainers.step_estimate import Machines, local_gpu, step_estimate
from engine.trainers.workload import run_roles, workload


def dry_run(config: RunConfig, accelerator: str = "") -> Iterator[str]:
    """The lines that say what the run would be; raises as the run would before its start.

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
    roles = run_roles(rl)[1]
    yield from _placement(rl, config, roles)
    machines = _machines(config, rl, accelerator)
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
    """The table of batches: prompts and completions of a step, mini-batch, rank, micro-batch."""
    n, trainer, rows = rl.rollout.n, rl.trainer, [("", "global", "mini", "a rank's mini", "micro")]
    every = trainer.train_batch_size * n
    rows.append(("prompts", str(trainer.train_batch_size), "", "", ""))
    sections: list[tuple[str, ActorConfig | CriticConfig]] = [("actor", rl.actor)]
    if "critic" in run_roles(rl)[1]:
        sections.append(("critic", rl.critic))
    for role, section in sections:
        mini, ranks = section.ppo_mini_batch_size or every, layout_of(role, rl).data_ranks
        micro = f"{section.max_tokens_per_micro_batch} tokens"
        rows.append((role, str(every), str(mini), f"{mini / ranks:g}", micro))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield "batches   completions of a step" + (f", {n} a prompt" if n > 1 else "")
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        yield "          " + "  ".join(cells).rstrip()


def _placement(rl: RLConfig, config: RunConfig, roles: frozenset[str]) -> Iterator[str]:
    pools = rl.trainer.pools
    named = [pool.roles for pool in pools] or default_pools(roles)
    yield f"placement {rl.trainer.placement}: " + ", ".join("+".join(pool) for pool in named)
    for role in ("actor", "critic"):
        if role in roles:
            layout: Layout = layout_of(role, rl)
            yield f"          {role}: {layout.world_size} rank(s), {layout}"
    rollout = rl.rollout
    yield f"          rollout: {rollout.engine}, tensor parallel {rollout.tensor_parallel_size}"


def _machines(config: RunConfig, rl: RLConfig, accelerator: str) -> Machines:
    ranks, per_node = layout_of("actor", rl).world_size, config.run.n_gpus_per_node
    here = accelerator
    if not here and config.run.device != "cpu":
        here = local_gpu() or ("H100" if per_node is not None and per_node > 1 else "")
    return Machines(ranks, min(ranks, per_node or ranks), here)
