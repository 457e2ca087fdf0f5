"""A model's completions of the problems: in this process, or on ranks that Ray places.

Copies of the model (dp), each on one rank or on several (tp), take consecutive shares of the
prompts. What is drawn goes by a prompt's number (`SamplingParams.first_prompt`), so that the number
of copies changes no completion.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from engine.agents.episode import EpisodeSummary
from engine.batch import Batch, Column
from engine.config import EvaluateConfig, ParallelConfig, RolloutConfig
from engine.controller.launch import launch, ray_session
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.errors import ConfigError, PlacementError
from engine.models import check_context, parameter_count, text_config, vocabulary_and_context
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.shard_maps import ROLLOUT_FAMILIES
from engine.rollout.protocol import SamplingParams, engine_capabilities
from engine.workers.evaluator import EpisodeEvaluationWorker, EvaluationWorker
from engine.workers.role import WorkerContext

GIB = 1 << 30
USABLE = 0.9  # of a GPU's memory that weights can fill


def uses_ranks(config: EvaluateConfig) -> bool:
    """Tell whether ranks are started: by the settings, or where this machine has several GPUs."""
    if config.parallel is not None:
        return Layout.of(config.parallel).world_size > 1
    return torch.cuda.device_count() > 1


def evaluation_layout(config: EvaluateConfig, folder: str | Path) -> Layout:
    """`evaluate.parallel`, by default copies on all GPUs of this machine; checked."""
    if not uses_ranks(config):
        return Layout()
    model = text_config(folder)
    if config.parallel is not None:
        check_evaluation_layout(config, model)
        return Layout.of(config.parallel)
    gpus = torch.cuda.device_count()
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    tp = gpus_of_copy(config, model, memory, gpus)
    return Layout(dp=gpus // tp, tp=tp)


def check_evaluation_layout(
    config: EvaluateConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for a layout that the settings, or the model, don't allow."""
    engine = engine_capabilities(RolloutConfig(engine=config.engine))
    if config.runs_episodes and not engine.streams:
        raise ConfigError(
            f"evaluate.engine={config.engine} with evaluate.multi_turn: it decodes whole batches, "
            "and turns are decoded in a stream; set evaluate.engine to native or vllm"
        )
    if config.parallel is None:
        return
    for name, value in config.parallel:
        if name not in ("dp", "tp") and value != getattr(ParallelConfig(), name):
            raise ConfigError(
                f"evaluate.parallel.{name}={value} has no effect on decoding; set dp (copies of "
                "the model) and tp (ranks that share a copy)"
            )
    layout, fault = Layout.of(config.parallel), ""
    if layout.tp == 1:
        return
    if config.runs_episodes:
        fault = "evaluate.multi_turn: turns are decoded on one rank each"
    elif not (engine.decodes_shards or engine.loads_shards):
        fault = f"evaluate.engine={config.engine}, which decodes whole models only"
    elif model_config is not None and model_config.model_type not in ROLLOUT_FAMILIES:
        fault = (
            f"a model of type {model_config.model_type!r}: evaluation splits "
            f"{', '.join(ROLLOUT_FAMILIES)} models"
        )
    if fault:
        raise ConfigError(
            f"evaluate.parallel.tp={layout.tp} with {fault}; set tp=1, and dp for copies"
        )
    if model_config is not None:
        check_layout(layout, layout.world_size, ModelShape.of(model_config))


def gpus_of_copy(
    config: EvaluateConfig, model_config: PretrainedConfig, gpu_memory: int, gpus: int
) -> int:
    """The fewest GPUs, of `gpu_memory` bytes, on which a copy's weights fill at most half of it.

    A model whose sizes nobody knows takes one. Raises PlacementError where weights don't fit.
    """
    need, sizes = 2 * parameter_count(model_config), [1]  # bytes in bfloat16
    for tp in (tp for tp in range(2, gpus + 1) if gpus % tp == 0):
        with suppress(ConfigError):
            split = config.model_copy(update={"parallel": ParallelConfig(tp=tp)})
            check_evaluation_layout(split, model_config)
            sizes.append(tp)
    for tp in sizes:
        if need / tp <= gpu_memory / 2:
            return tp
    if need / sizes[-1] <= gpu_memory * USABLE:
        return sizes[-1]
    raise PlacementError(
        f"evaluate can't fit: the model's weights take {need / GIB:.0f} GiB in bfloat16, and a "
        f"copy can be on {sizes[-1]} of a machine's {gpus} GPUs of {gpu_memory / GIB:.0f}; take "
        "machines with more or larger GPUs"
    )


def check_evaluation_memory(
    config: EvaluateConfig, model_config: PretrainedConfig, gpu_memory: int, gpus: int
) -> None:
    """Raise PlacementError, with a layout that would fit, where GPUs can't hold the weights."""
    fewest = gpus_of_copy(config, model_config, gpu_memory, gpus)
    if config.parallel is None:
        return
    layout, need = Layout.of(config.parallel), 2 * parameter_count(model_config)
    if need / layout.tp > gpu_memory * USABLE:
        raise PlacementError(
            f"evaluate can't fit: with evaluate.parallel {layout} a GPU keeps "
            f"{need / layout.tp / GIB:.0f} GiB of weights, and has {gpu_memory / GIB:.0f}; "
            f"evaluate.parallel {Layout(dp=gpus // fewest, tp=fewest)} would"
        )


ROLE = "evaluation"
OBJECT_STORE_BYTES = 512 << 20  # of a Ray that is started here: prompts and completions alone
AT_ONCE = 2048  # completions of a copy in one call: several times those that it decodes at once

Report = Callable[[int], None]


class Answer(NamedTuple):
    """One completion, or one episode."""

    token_ids: list[int]  # sampled tokens, stop tokens included, e.g. [17, 9, 2]
    truncated: bool  # at the limit of tokens
    episode: EpisodeSummary | None = None


def decode_passes(
    folder: str | Path,
    prompts: Sequence[list[int]],
    passes: Sequence[SamplingParams],
    config: EvaluateConfig,
    *,
    max_prompt_length: int = 0,
    columns: Mapping[str, Column] | None = None,
    first_prompt: int = 0,
    longest_prompt: int = 0,
    on_progress: Report | None = None,
) -> list[list[Answer]]:
    """The completions of each pass, `params.n` a prompt, in the prompts' order.

    With `config.multi_turn` they are episodes, of rows that `columns` hold; an environment's own
    first messages may have `max_prompt_length` tokens, or as many as the longest prompt. Where the
    prompts are a part of more, `first_prompt` is the number of the first one among all, and
    `longest_prompt` the length of the longest: what is drawn is then as if all were decoded here.

    `on_progress(n)` gets the number of finished completions of all passes. Raises the EngineError
    of a rank that fails, or WorkerError with rank and cause of one that dies.
    """
    layout = evaluation_layout(config, folder)
    rows = {**(columns or {}), "prompt_ids": list(prompts)}
    batch = Batch({"group_ids": torch.arange(first_prompt, first_prompt + len(prompts))}, rows)
    room = max(longest_prompt, max_prompt_length * config.runs_episodes, *map(len, prompts))
    longest = max(params.max_new_tokens for params in passes)
    check_context(room, longest, vocabulary_and_context(folder)[1])
    options: dict[str, object] = {
        "model_path": str(folder),
        "engine": config.engine,
        "max_model_len": room + longest,
        "seed": passes[0].seed,
        "tp": layout.tp,
    }
    spec = RoleSpec(ROLE, EvaluationWorker, options, layout=layout, plugins=config.plugins)
    if config.runs_episodes:
        options |= {"multi_turn": config.multi_turn, "agent": config.environments}
        options["plugins"] = config.plugins
        spec = replace(spec, worker_class=EpisodeEvaluationWorker)
    report = on_progress or (lambda done: None)
    if layout.world_size == 1:
        return _alone(batch, passes, spec, report)
    return _on_ranks(batch, passes, spec, report, layout, config)


def _alone(
    prompts: Batch, passes: Sequence[SamplingParams], spec: RoleSpec, report: Report
) -> list[list[Answer]]:
    torch.set_num_threads(os.cpu_count() or 1)
    answers: list[list[Answer]] = []
    made: Any = spec.worker_class(WorkerContext(ROLE), **spec.options)
    with closing(made) as worker:
        for params in passes:
            before = sum(map(len, answers))  # finished by the passes before
            batch = worker.answer(prompts, params, lambda n, before=before: report(before + n))
            answers.append(_answers([batch]))
    return answers


def _on_ranks(
    prompts: Batch,
    passes: Sequence[SamplingParams],
    spec: RoleSpec,
    report: Report,
    layout: Layout,
    config: EvaluateConfig,
) -> list[list[Answer]]:
    ranks, cores = layout.world_size, os.cpu_count() or 1
    share = float(cores // ranks) if cores >= ranks else cores / ranks
    gpus = torch.cuda.device_count() > 0  # a GPU a rank, else its share of the cores
    pool = Pool((ROLE,), ranks, cpus=1.0 if gpus else share, gpus=1.0 if gpus else 0.0)
    start, step = config.start_timeout_s, config.step_timeout_s
    placement = Placement((pool,), start_timeout_s=start, call_timeout_s=step)
    with ray_session("ray", OBJECT_STORE_BYTES), launch(placement, [spec]) as roles:
        calls, done = [], 0
        for params in passes:
            size = layout.dp * max(1, AT_ONCE // params.n)
            for at in range(0, len(prompts), size):
                part = prompts.rows(slice(at, at + size))
                calls.append((params, part, roles[ROLE].answer(part, params)))
        batches: dict[SamplingParams, list[Batch]] = {params: [] for params in passes}
        for params, part, answers in calls:
            batches[params].append(answers.result())
            done += len(part) * params.n
            report(done)
    return [_answers(batches[params]) for params in passes]


def _answers(batches: Sequence[Batch]) -> list[Answer]:
    return [
        Answer(list(tokens), bool(truncated), episode)
        for batch in batches
        for tokens, truncated, episode in zip(
            batch.columns["token_ids"],
            batch["truncated"].tolist(),
            batch.columns.get("episodes", [None] * len(batch)),
            strict=True,
        )
    ]
