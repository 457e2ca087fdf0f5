"""vLLM's stream: arrivals, in-flight updates, resumption; judged by transformers' forward."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterator
from dataclasses import replace

import pytest
from rollout_models import CONTEXT, build, make_prompts
from stream_checks import Found, drain, gather, texts, update, with_n, worst_error

from engine.errors import RolloutError
from engine.rollout.protocol import create_engine
from engine.rollout.stream import PartialRequest
from engine.rollout.vllm import VllmEngine

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
]
PROMPTS: dict[Hashable, list[int]] = dict(enumerate(make_prompts(7)))
SIZES = {"max_num_seqs": 8, "max_model_len": CONTEXT, "kv_cache_memory_mb": 64, "seed": 0}


@pytest.fixture(params=["in process", "workers"])
def engine(request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    options = {} if request.param == "in process" else {"in_process": False}
    engine = create_engine("vllm", build("qwen2"), **SIZES, **options)
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.close()


def test_a_stream_keeps_its_promises(engine: VllmEngine) -> None:
    # What a rollout gives, whatever the order in which prompts come.
    params = with_n(3)
    done = engine.generate(list(PROMPTS.values()), params)
    expected: Found = {(i // 3, i % 3): c for i, c in enumerate(done)}
    stream = engine.stream(params)
    for key in (4, 0, 6):
        stream.submit(key, PROMPTS[key])
    found: Found = {}
    for _ in range(3):
        gather(found, stream.step())
    for key in (5, 2, 1, 3):
        stream.submit(key, PROMPTS[key])
    assert (stream.in_flight, stream.in_flight + stream.waiting) == (8, 21 - len(found))
    with pytest.raises(RolloutError, match="requests of a stream"):
        engine.generate([[5]], params)
    with pytest.raises(RolloutError, match="in use"):
        stream.submit(5, PROMPTS[5])
    drain(stream, found)
    assert texts(found) == texts(expected)
    assert {v for c in found.values() for v in c.token_versions} == {0}
    stream.close()

    # Weights that change under way: each token is of the version that it names.
    model = build("qwen2")
    engine.update_weights(model, 0)
    stream, found = engine.stream(params), {}
    for version in range(1, 5):
        for fresh in {1: (0, 1, 2), 2: (3,), 3: (4, 5), 4: (6,)}[version]:
            stream.submit(fresh, PROMPTS[fresh])
        for _ in range(3 + version):
            gather(found, stream.step())
        update(stream, model, "qwen2", version)
    drain(stream, found)
    assert len(found) == 21
    for c in found.values():
        assert len(c.token_ids) == len(c.log_probs) == len(c.token_versions)
        assert c.token_versions == sorted(c.token_versions)
        assert c.policy_version == c.token_versions[0]
    assert any(len(set(c.token_versions)) > 1 for c in found.values())
    assert worst_error("qwen2", PROMPTS, found) < 1e-4
    stream.close()

    # What a checkpoint took of a stream goes on in another, its versions with it.
    stream, found = engine.stream(replace(params, stop_token_ids=())), {}
    for name, prompt in PROMPTS.items():
        stream.submit(name, prompt)
    for _ in range(9):
        gather(found, stream.step())
    partials = stream.partials()
    assert any(part.token_ids for partial in partials for part in partial.completions)
    stream.close()
    again = engine.stream(replace(params, stop_token_ids=()))
    for partial in partials:
        again.submit(partial.key, PROMPTS[partial.key], resume=partial)
    finished = drain(again, found)
    assert len(finished) == 21
    assert worst_error("qwen2", PROMPTS, finished) < 1e-4
    for partial in partials:
        for part in partial.completions:
            c = finished[partial.key, part.completion_index]
            size = len(part.token_ids)
            assert c.token_ids[:size] == part.token_ids
            assert c.log_probs[:size] == part.log_probs
            assert len(c.token_ids) == params.max_new_tokens
    bad = PartialRequest(0, [1, 2], partials[0].completions)
    with pytest.raises(RolloutError, match="another prompt"):
        again.submit(0, PROMPTS[0], resume=bad)
    again.close()
    with pytest.raises(RolloutError, match="was closed"):
        again.step()
    assert len(engine.generate([[5, 6]], params)) == 3


def test_a_request_that_is_cut_ends_with_its_next_token() -> None:
    engine = create_engine("vllm", build("qwen2"), **SIZES)
    assert isinstance(engine, VllmEngine)
    params = replace(with_n(2), stop_token_ids=())
    done = engine.generate(list(PROMPTS.values()), params)
    stream = engine.stream(params)
    for key, prompt in PROMPTS.items():
        stream.submit(key, prompt)
    found: Found = {}
    for _ in range(5):
        gather(found, stream.step())
    stream.cut(1)
    stream.cut(6)  # waits for a place
    drain(stream, found)
    assert len(found) == 14
    for (key, index), completion in found.items():
        whole = done[2 * int(str(key)) + index]
        size = len(completion.token_ids)
        assert completion.token_ids == whole.token_ids[:size]
        assert completion.finish_reason == "length"
        assert size == len(completion.log_probs) == len(completion.token_versions or ())
        assert 1 <= size <= 8 if key in (1, 6) else size == 24
    engine.close()


def test_a_returning_request_computes_what_follows_its_full_blocks() -> None:
    engine = create_engine("vllm", build("qwen2"), **SIZES)
    assert isinstance(engine, VllmEngine)
    stream = engine.stream(replace(with_n(1), stop_token_ids=()))
    prompt = [3 + i % 30 for i in range(50)]
    stream.submit("turn 0", prompt)
    [first] = drain(stream).values()
    before = stream.stats.prefill_tokens
    assert before == 50
    again = [*prompt, *first.token_ids, 7, 8, 9]
    stream.submit("turn 1", again, after="turn 0")
    drain(stream)
    assert stream.stats.prefill_tokens - before == len(again) - 64  # two blocks of 32
    stream.update_weights(None, 1)  # under other weights nothing of it is right
    before = stream.stats.prefill_tokens
    stream.submit("turn 2", again)
    drain(stream)
    assert stream.stats.prefill_tokens - before == len(again)
    engine.close()
