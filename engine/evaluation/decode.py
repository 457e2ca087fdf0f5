"""A model's completions of the problems: in this process, or on ranks that Ray places.

Copies of the model take consecutive shares of the prompts. What is drawn goes by a prompt's number
(`SamplingParams.first_prompt`), so that the number of copies changes no completion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.agents.played import PlayedEpisode
from engine.batch import Batch, Column
from engine.config import EvaluateConfig
from engine.controller.launch import Placement, Pool, launch
from engine.controller.ray_session import ray_session
from engine.controller.worker_host import RoleSpec
from engine.evaluation.layout import evaluation_layout
from engine.parallel.layout import Layout
from engine.rollout.protocol import SamplingParams
from engine.workers.base import WorkerContext
from engine.workers.episode_evaluation import EpisodeEvaluationWorker
from engine.workers.evaluation import EvaluationWorker

ROLE = "evaluation"
OBJECT_STORE_BYTES = 512 << 20  # of a Ray that is started here: prompts and completions alone
AT_ONCE = 2048  # completions of a copy in one call: several times those that it decodes at once

Passes = tuple[SamplingParams, ...]
Report = Callable[[int], None]


class Answer(NamedTuple):
    """One completion, or one episode."""

    token_ids: list[int]  # sampled tokens, stop tokens included, e.g. [17, 9, 2]
    truncated: bool  # at the limit of tokens
    episode: PlayedEpisode | None = None


def decode(
    folder: str | Path,
    prompts: Sequence[list[int]],
    config: EvaluateConfig,
    *,
    max_response_length: int,
    max_prompt_length: int = 0,
    seed: int,
    columns: Mapping[str, Column] | None = None,
    first_prompt: int = 0,
    longest_prompt: int = 0,
    on_progress: Report | None = None,
) -> tuple[list[Answer], list[Answer]]:
    """One greedy completion a prompt, and `config.samples` sampled ones, in the prompts' order.

    With `config.multi_turn` they are episodes, of rows that `columns` hold; an environment's own
    first messages may have `max_prompt_length` tokens, or as many as the longest prompt. Where the
    prompts are a part of more, `first_prompt` is the number of the first one among all, and
    `longest_prompt` the length of the longest: what is drawn is then as if all were decoded here.

    `on_progress(n)` is called with the number of finished completions of both. A rank that fails
    or dies ends all of it: raises its EngineError, or WorkerError with rank and cause.
    """
    sampled = SamplingParams(
        n=config.samples,
        max_new_tokens=max_response_length,
        temperature=config.temperature,
        seed=seed,
    )
    passes = replace(sampled, n=1, temperature=0.0), sampled
    greedy, each = decode_passes(
        folder,
        prompts,
        passes,
        config,
        max_prompt_length=max_prompt_length,
        columns=columns,
        first_prompt=first_prompt,
        longest_prompt=longest_prompt,
        on_progress=on_progress,
    )
    return greedy, each


def decode_passes(
    folder: str | Path,
    prompts: Sequence[list[int]],
    passes: Passes,
    config: EvaluateConfig,
    *,
    max_prompt_length: int = 0,
    columns: Mapping[str, Column] | None = None,
    first_prompt: int = 0,
    longest_prompt: int = 0,
    on_progress: Report | None = None,
) -> list[list[Answer]]:
    """The completions of each pass, `params.n` a prompt, in the prompts' order; as `decode`.

    Of `config` the engine, the layout and what episodes are played with are read.
    """
    layout = evaluation_layout(config, folder)
    own = {**(columns or {}), "prompt_ids": list(prompts)}
    batch = Batch({"group_ids": torch.arange(first_prompt, first_prompt + len(prompts))}, own)
    longest = max(params.max_new_tokens for params in passes)
    asked = [longest_prompt, *map(len, prompts)]
    prompt_room = max([*asked, max_prompt_length * config.plays_episodes])
    options: dict[str, object] = {
        "model_path": str(folder),
        "engine": config.engine,
        "max_model_len": prompt_room + longest,
        "seed": passes[0].seed,
        "tp": layout.tp,
    }
    spec = RoleSpec(ROLE, EvaluationWorker, options, layout=layout, plugins=config.plugins)
    if config.plays_episodes:
        options |= {
            "multi_turn": config.multi_turn,
            "agent": config.environments,
            "plugins": config.plugins,
        }
        spec = replace(spec, worker_class=EpisodeEvaluationWorker)
    report = on_progress or (lambda done: None)
    if layout.world_size == 1:
        return _alone(batch, passes, spec, report)
    return _on_ranks(batch, passes, spec, report, layout, config)


def _alone(prompts: Batch, passes: Passes, spec: RoleSpec, report: Report) -> list[list[Answer]]:
    torch.set_num_threads(os.cpu_count() or 1)
    found, before = [], 0
    made: Any = spec.worker_class(WorkerContext(ROLE), **spec.options)
    with closing(made) as worker:
        for params in passes:
            found.append(worker.answer(prompts, params, partial(_after, report, before)))
            before += len(prompts) * params.n
    return [_answers([answers]) for answers in found]


def _after(report: Report, before: int, done: int) -> None:
    report(before + done)


def _on_ranks(
    prompts: Batch,
    passes: Passes,
    spec: RoleSpec,
    report: Report,
    layout: Layout,
    config: EvaluateConfig,
) -> list[list[Answer]]:
    with (
        ray_session("ray", OBJECT_STORE_BYTES),
        launch(_placement(layout, config), [spec]) as roles,
    ):
        group, done = roles[ROLE], 0
        calls = [
            (params, part, group.answer(part, params))
            for params in passes
            for part in _parts(prompts, layout.dp, params.n)
        ]
        found: dict[SamplingParams, list[Batch]] = {params: [] for params in passes}
        for params, part, answers in calls:
            found[params].append(answers.result())
            done += len(part) * params.n
            report(done)
    return [_answers(found[params]) for params in passes]


def _placement(layout: Layout, config: EvaluateConfig) -> Placement:
    """A GPU a rank where this machine has any; else its share of the cores."""
    ranks, cores = layout.world_size, os.cpu_count() or 1
    share = float(cores // ranks) if cores >= ranks else cores / ranks
    gpus = torch.cuda.device_count() > 0
    pool = Pool((ROLE,), ranks, cpus=1.0 if gpus else share, gpus=1.0 if gpus else 0.0)
    return Placement(
        (pool,),
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
    )


def _parts(prompts: Batch, copies: int, n: int) -> list[Batch]:
    """Consecutive prompts of which each copy decodes `AT_ONCE` completions, `n` a prompt."""
    size = copies * max(1, AT_ONCE // n)
    return [prompts.rows(slice(at, at + size)) for at in range(0, len(prompts), size)]


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
