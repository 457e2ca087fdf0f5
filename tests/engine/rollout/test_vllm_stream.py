"""vLLM's stream, and a worker group of it."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import (
    CONTEXT,
    Subject,
    build,
    counted_prefills,
    make_prompts,
    reference_log_probs,
    train,
)
from stream_checks import (
    Found,
    drain,
    gather,
    texts,
    update,
    weights_of,
    with_n,
    worst_error,
)

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams, create_engine
from engine.rollout.stream import PartialRequest
from engine.rollout.vllm import VllmEngine
from engine.rollout.vllm.engine_weights import WorkerWeights

PROMPTS: dict[Hashable, list[int]] = dict(enumerate(make_prompts(7)))


SIZES = {"max_num_seqs": 8, "max_model_len": CONTEXT, "kv_cache_memory_mb": 64, "seed": 0}


@pytest.fixture(params=["in process", "workers"])
def engine(request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    options = {} if request.param == "in process" else {"in_process": False}
    engine = create_engine("vllm", build("qwen2"), **SIZES, **options)
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.close()


needs_stream = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@needs_stream
@pytest.mark.slow
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


@needs_stream
@pytest.mark.slow
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


@needs_stream
@pytest.mark.slow
def test_what_a_stream_leaves_after_a_failed_update_holds_up_no_later_one() -> None:
    model = build("qwen2")
    engine = create_engine("vllm", model, **SIZES)
    assert isinstance(engine, VllmEngine)
    stream = engine.stream(with_n(2))
    stream.submit(0, PROMPTS[0])
    stream.step()
    with pytest.raises(RolloutError, match="another stream of this engine has requests"):
        engine.stream(with_n(2))
    with pytest.raises(RolloutError, match="could not take policy version 1"):
        stream.update_weights(build("qwen2").to("meta"), 1)
    stream.close()
    engine.update_weights(model, 1)
    assert len(engine.generate([PROMPTS[0]], with_n(2))) == 2
    engine.close()


@needs_stream
@pytest.mark.slow
def test_a_returning_request_computes_what_follows_its_full_blocks() -> None:
    engine = create_engine("vllm", build("qwen2"), **SIZES)
    assert isinstance(engine, VllmEngine)
    stream = engine.stream(replace(with_n(1), stop_token_ids=()))
    prefills = counted_prefills(engine)
    prompt = [3 + i % 30 for i in range(50)]
    stream.submit("turn 0", prompt)
    [first] = drain(stream).values()
    assert prefills == [50]
    again = [*prompt, *first.token_ids, 7, 8, 9]
    stream.submit("turn 1", again, after="turn 0")
    drain(stream)
    assert prefills[1:] == [len(again) - 64]  # two blocks of 32
    stream.update_weights(None, 1)  # under other weights nothing of it is right
    stream.submit("turn 2", again)
    drain(stream)
    assert prefills[2:] == [len(again)]
    engine.close()


@needs_stream
@pytest.mark.slow
def test_kept_keys_stay_those_of_the_old_weights_and_later_requests_have_new_ones(
    engine: VllmEngine,
) -> None:
    """transformers does the same by hand: a cache of the old weights, continued by the new."""
    params = replace(with_n(2), stop_token_ids=())
    stream = engine.stream(params, kv_on_update="keep")
    prompt = [3 + i % 30 for i in range(50)]  # a whole block, which other requests may share
    stream.submit("old", prompt)
    for _ in range(5):
        stream.step()
    model = build("qwen2")
    engine.update_weights(model, 0)  # is what the stream's updates are of
    update(stream, model, "qwen2", 4)
    stream.submit("new", prompt)
    found = drain(stream)
    old, new = weights_of("qwen2")[0], weights_of("qwen2")[4]
    for index in range(2):
        c = found["old", index]
        first = c.token_versions.index(4)
        assert 3 <= first <= 6
        with torch.no_grad():
            cache = old(torch.tensor([[*prompt, *c.token_ids[: first - 1]]]), use_cache=True)
            rest = torch.tensor([c.token_ids[first - 1 : -1]])
            logits = new(rest, past_key_values=cache.past_key_values).logits[0]
        targets = torch.tensor(c.token_ids[first:])[:, None]
        expected = logits.log_softmax(-1).gather(1, targets)[:, 0]
        assert torch.allclose(torch.tensor(c.log_probs[first:]), expected, atol=1e-4)
    ours = {name: c for name, c in found.items() if name[0] == "new"}
    assert {v for c in ours.values() for v in c.token_versions} == {4}
    assert worst_error("qwen2", {"new": prompt}, ours) < 1e-4

    # A rollout after the stream finds none of the old blocks either.
    stream.close()
    [done] = engine.generate([prompt], with_n(1))
    expected = reference_log_probs(new, prompt, done.token_ids)
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)


NAME = "vllm-tp2"


@pytest.fixture
def workers(shared_subjects: Any) -> Subject:
    """The session's engine of two worker processes."""
    subject: Subject = shared_subjects.get(NAME)
    return subject


def engine_of(subject: Subject) -> VllmEngine:
    assert isinstance(subject.engine, VllmEngine)
    return subject.engine


def pids_of(engine: Any) -> list[int]:
    """Of vLLM's worker processes, by rank."""
    return [process.pid for process in engine._weights.monitor._processes]


def served_is(engine: VllmEngine, model: torch.nn.Module, seed: int) -> bool:
    prompts = make_prompts(2, seed=seed)
    return all(
        torch.allclose(
            torch.tensor(c.log_probs),
            reference_log_probs(model, prompts[c.prompt_index], c.token_ids),
            atol=1e-4,
        )
        for c in engine.generate(prompts, SamplingParams(max_new_tokens=6, seed=seed))
    )


@pytest.mark.slow
def test_two_processes_of_its_own_and_no_named_memory(workers: Subject) -> None:
    engine = engine_of(workers)
    assert len(set(pids_of(engine))) == 2
    assert os.getpid() not in pids_of(engine)
    assert not engine.shares_storage
    engine.update_weights(workers.model, engine.policy_version + 1)
    assert not list(Path("/dev/shm").glob("hybridflyte-weights-*"))
    with pytest.raises(RolloutError, match="in its worker processes, where this one can't write"):
        engine.parameters()


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [4096, 1 << 20])
def test_buckets_smaller_than_a_tensor_grow_and_small_ones_alternate(
    workers: Subject, bucket: int
) -> None:
    """The tiny model's largest matrix has 65,536 bytes, so both halves of the file are used."""
    engine, weights = engine_of(workers), engine_of(workers)._weights
    assert isinstance(weights, WorkerWeights)
    channel = weights._channel
    channel._buffer, channel._half = None, bucket
    for seed in (1, 2):
        train(workers.model, steps=1)
        engine.update_weights(workers.model, engine.policy_version + 1)
        assert served_is(engine, workers.model, seed)
    assert channel._half == max(bucket, 65536)


@pytest.mark.slow
def test_a_stream_that_lacks_a_part_names_it_and_is_not_served(workers: Subject) -> None:
    engine, model = engine_of(workers), workers.model
    version, lacking = engine.policy_version + 1, "model.layers.0.mlp.up_proj.weight"

    def partial() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, p) for name, p in model.named_parameters() if name != lacking)

    with pytest.raises(RolloutError, match=f"worker 0 failed.*{lacking}"):
        engine.update_from(partial(), version)
    with pytest.raises(RolloutError, match="can't serve"):
        engine.generate([[5]], SamplingParams())
    with pytest.raises(RolloutError, match="worker 0 failed"):
        engine.update_from([("model.embed_tokens.weight", torch.zeros(3, 3))], version)
    engine.update_from(model.named_parameters(), version)
    assert served_is(engine, model, seed=3)


@pytest.mark.slow
def test_sleep_and_wake_reach_the_workers(workers: Subject) -> None:
    engine = engine_of(workers)
    engine.sleep(2)
    with pytest.raises(RolloutError, match="while asleep"):
        engine.update_weights(workers.model, engine.policy_version)
    engine.wake_weights()
    engine.update_weights(workers.model, engine.policy_version)
    engine.wake_kv()
    assert served_is(engine, workers.model, seed=4)


@pytest.mark.slow
def test_a_killed_worker_ends_the_engine_with_its_name(
    workers: Subject, shared_subjects: Any
) -> None:
    """The other worker would wait for it in a collective; it is ended as well, at once."""
    engine, pids = engine_of(workers), pids_of(engine_of(workers))
    killed: list[float] = []

    def kill(finished: int) -> None:
        if not killed:
            killed.append(time.monotonic())
            os.kill(pids[1], signal.SIGKILL)

    try:
        with pytest.raises(RolloutError, match=rf"pid {pids[1]}.*ended by signal SIGKILL"):
            engine.generate(make_prompts(40), SamplingParams(n=2, max_new_tokens=60), kill)
        assert time.monotonic() - killed[0] < 20
        with pytest.raises(RolloutError, match="was closed"):
            engine.update_weights(workers.model, engine.policy_version + 1)
        with pytest.raises(RolloutError, match="can't serve"):
            engine.generate([[5]], SamplingParams())
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        shared_subjects.discard(NAME)
