"""Evaluating a model folder on a split: decode greedily and by sampling, score, one row a problem.

It composes a rollout engine, the tokenizer and the answer rule; statistics and pages are in
`engine.evaluation`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from engine.config import EvaluateConfig
from engine.data.rows import prompt_text
from engine.data.templates import decode_response, encode_prompts, stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.errors import DataError
from engine.evaluation.rows import Completions, ModelName, Problems, build_rows
from engine.models import load_model
from engine.rewards import extract_answer, has_format, normalise_number
from engine.rollout.protocol import Completion, SamplingParams, create_engine


def evaluate_model(
    folder: str | Path,
    frame: pd.DataFrame,
    name: ModelName,
    config: EvaluateConfig,
    *,
    max_response_length: int,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> pd.DataFrame:
    """Decode every problem of `frame` (RL rows) once greedily and `config.samples` times sampled.

    Returns the table of `engine.evaluation.rows`. `on_progress(n)` is called with the number of
    finished completions of both passes; there are `len(frame) * (1 + config.samples)` in all.
    Raises DataError for a frame without rows.
    """
    if frame.empty:
        raise DataError("there are no problems to evaluate on; check data.test_size")
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder).eval()
    prompts = encode_prompts(tokenizer, frame["prompt"], "test")
    engine = create_engine(
        config.engine,
        model,
        max_num_seqs=512,
        max_model_len=max(map(len, prompts)) + max_response_length,
        kv_cache_memory_mb=256,
        seed=seed,
    )
    sampling = SamplingParams(
        n=config.samples,
        max_new_tokens=max_response_length,
        temperature=config.temperature,
        seed=seed,
        stop_token_ids=stop_token_ids(tokenizer, model.config),
    )
    report = on_progress or (lambda done: None)
    try:
        greedy = engine.generate(prompts, replace(sampling, n=1, temperature=0.0), report)
        sampled = engine.generate(prompts, sampling, lambda done: report(len(prompts) + done))
    finally:
        engine.close()

    def text(completion: Completion) -> str:
        return decode_response(tokenizer, completion.token_ids)

    groups = [sampled[i : i + config.samples] for i in range(0, len(sampled), config.samples)]
    problems = Problems(
        index=list(range(len(frame))),
        data_source=list(frame["data_source"]),
        prompt=[prompt_text(prompt) for prompt in frame["prompt"]],
        ground_truth=[str(rule["ground_truth"]) for rule in frame["reward_model"]],
    )
    completions = Completions(
        greedy=[text(c) for c in greedy],
        greedy_lengths=[len(c.token_ids) for c in greedy],
        samples=[[text(c) for c in group] for group in groups],
        sample_lengths=[[len(c.token_ids) for c in group] for group in groups],
    )
    return build_rows(
        name,
        problems,
        completions,
        extract_answer,
        lambda answer, truth: answer == normalise_number(truth),
        has_format,
    )
