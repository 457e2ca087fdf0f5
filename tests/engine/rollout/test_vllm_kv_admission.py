"""What a stream over vLLM begins fits its KV cache: none fails, and none is computed twice."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import CONTEXT, build
from stream_checks import Found, drain, texts, worst_error

from engine.rollout.protocol import SamplingParams, create_engine
from engine.rollout.vllm.vllm_stream import KvAdmission, Row


def room(tokens: int, **changes: Any) -> KvAdmission:
    return KvAdmission(**{"capacity": tokens, "block": 10, "shares_prompts": True} | changes)


@pytest.mark.parametrize(
    ("subject", "running", "waiting", "count"),
    [
        # 30 of the prompt once, then 10 of its rest and 50 of each completion
        (room(200), [], [Row("a", 35, 50)] * 4, 2),
        (room(210), [], [Row("a", 35, 50)] * 4, 3),
        (room(210), [Row("a", 35, 50)], [Row("a", 35, 50)] * 4, 2),
        (room(210, shares_prompts=False), [], [Row("a", 35, 50)] * 4, 2),
        (room(210), [], [Row(key, 35, 50) for key in "abcd"], 2),
        (room(50), [], [Row("a", 35, 50)] * 4, 1),  # vLLM itself has found that one fits
        (room(50), [Row("b", 5, 5)], [Row("a", 35, 50)] * 4, 0),
        # (20 + 2 · 10) / 2 ended: as long as 20, where the limit is 50
        (room(100, ended=2, sampled=20), [Row("a", 5, 45, 10)] * 2, [Row("b", 5, 45)] * 4, 1),
        (room(100, ended=2, sampled=20), [Row("a", 5, 45, 40)] * 2, [Row("b", 5, 45)] * 4, 0),
    ],
)
def test_how_many_may_begin(
    subject: KvAdmission, running: list[Row], waiting: list[Row], count: int
) -> None:
    assert subject.count(running, waiting) == count


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(100, 400))
def test_completions_of_the_longest_never_outgrow_the_cache(
    prompts: list[int], tokens: int
) -> None:
    """Each admitted as soon as it may be, and a token a step; all end at the limit."""
    subject, limit = room(tokens), 40
    waiting = [Row(i, prompt, limit) for i, prompt in enumerate(prompts)]
    running: list[Row] = []
    for _ in range(41 * len(prompts)):
        count = subject.count(running, waiting)
        running, waiting = running + waiting[:count], waiting[count:]
        running = [row._replace(tokens=row.tokens + 1) for row in running]
        assert sum(-(-(row.prompt + row.tokens) // 10) * 10 for row in running) <= tokens
        for row in running:
            if row.tokens == limit:
                subject.end(limit)
        running = [row for row in running if row.tokens < limit]
        if not running and not waiting:
            return
    raise AssertionError("they don't end")


PROMPTS = {key: [5 + key] * (40 + 3 * key) for key in range(8)}
PARAMS = SamplingParams(n=4, max_new_tokens=80, seed=3)
NEED = sum(len(prompt) + 4 * 80 for prompt in PROMPTS.values())


def streamed(cache_mb: int, params: SamplingParams) -> tuple[Found, int, int, int]:
    """What is found; preemptions; tokens of the cache; the most that waited."""
    model = build("qwen2")
    engine = create_engine(
        "vllm", model, max_num_seqs=32, max_model_len=CONTEXT, kv_cache_memory_mb=cache_mb, seed=0
    )
    core: Any = engine
    scheduler = core._llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [0], scheduler._preempt_request

    def counted(*arguments: Any, **options: Any) -> Any:
        preempted[0] += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counted
    try:
        stream = core.stream(params)
        for key, prompt in PROMPTS.items():
            stream.submit(key, prompt)
        waited = stream.waiting
        return drain(stream), preempted[0], core._requests.kv_cache()[0], waited
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_long_contexts_in_a_small_cache_wait_and_are_computed_once() -> None:
    wanted, _, large, none = streamed(64, PARAMS)
    assert large > NEED
    assert none == 0
    found, preempted, small, waited = streamed(1, PARAMS)
    assert small < NEED / 2
    assert waited > 0
    assert preempted == 0
    assert texts(found) == texts(wanted)
    assert worst_error("qwen2", PROMPTS, found) < 1e-4
    # Of mixed lengths more begin, as not all get as long as they may.
    mixed = replace(PARAMS, stop_token_ids=tuple(range(20, 24)))
    ended, preempted, _, _ = streamed(1, mixed)
    assert len(ended) == 32
    assert preempted <= 2
