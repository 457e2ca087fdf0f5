"""The native key-value cache: kept prefixes and budget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rollout_models import build, make_prompts
from stream_checks import drain
from torch import Tensor

from engine.config import RolloutConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.native.kv_cache import (
    KeptPrefix,
    KeptPrefixes,
    KvBudget,
    KvRoom,
    Limits,
    SharedPromptCache,
)
from engine.rollout.native.llama_decoder import LlamaDecoder
from engine.rollout.native.model_handle import ModelHandle
from engine.rollout.native.native_stream import NativeStream
from engine.rollout.protocol import SamplingParams, engine_options

PARAMS = SamplingParams(max_new_tokens=6, seed=3, stop_token_ids=tuple(range(20, 40)))


def opened(family: str, keep: bool, width: int = 4) -> NativeStream:
    engine = NativeEngine(build(family).double(), max_model_len=100)
    return engine.stream(PARAMS, max_num_seqs=width, keep_prefixes=keep)


def turns(stream: NativeStream, prompts: Sequence[list[int]], count: int = 3) -> list[list[int]]:
    """Each prompt's ids after so many turns, each followed by two other tokens."""
    ids = [list(prompt) for prompt in prompts]
    for turn in range(count):
        for row in range(len(ids)):
            after = (row, turn - 1) if turn else None
            stream.submit((row, turn), ids[row], max_new_tokens=2 + row % 4, after=after)
        for (key, _), done in drain(stream).items():
            assert isinstance(key, tuple)
            assert len(done.token_ids) <= 2 + key[0] % 4
            ids[key[0]] += [*done.token_ids, 7 + turn, 11]
    return ids


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_turns_go_on_from_what_is_kept(family: str) -> None:
    prompts = make_prompts(7)
    plain, keeping = opened(family, False), opened(family, True)
    assert turns(keeping, prompts) == turns(plain, prompts)
    assert keeping.stats.prefill_tokens < 0.6 * plain.stats.prefill_tokens


def test_other_families_compute_whole_prompts() -> None:
    prompts = make_prompts(3)
    plain, keeping = opened("gpt2", False), opened("gpt2", True)
    assert turns(keeping, prompts, 2) == turns(plain, prompts, 2)
    assert keeping.stats.prefill_tokens == plain.stats.prefill_tokens


def test_an_update_of_the_weights_drops_what_is_kept() -> None:
    model = build("llama").double()
    engine = NativeEngine(model, max_model_len=100)
    prompt, [stream, plain] = (
        make_prompts(1)[0],
        [engine.stream(PARAMS, max_num_seqs=4, keep_prefixes=keep) for keep in (True, False)],
    )
    stream.submit("a", prompt)
    [first] = drain(stream).values()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    stream.update_weights(None, 1)
    plain.update_weights(None, 1)
    more = [*prompt, *first.token_ids, 9]
    before = stream.stats.prefill_tokens
    for one in (stream, plain):
        one.submit("b", more, after="a")
    ours, theirs = drain(stream)["b", 0], drain(plain)["b", 0]
    assert (ours.token_ids, ours.log_probs) == (theirs.token_ids, theirs.log_probs)
    assert stream.stats.prefill_tokens - before == len(more)


def test_a_prompt_that_doesn_t_begin_so_is_computed() -> None:
    stream, plain = opened("llama", True), opened("llama", False)
    for one in (stream, plain):
        one.submit("a", [5, 6, 7])
        drain(one)
        one.submit("b", [5, 6, 8, 9, 10, 11, 12], after="a")
        one.submit("c", [5, 6], after="never was")
    assert drain(stream) == drain(plain)


def test_limits_of_a_request_are_its_own() -> None:
    stream = opened("llama", True)
    with pytest.raises(RolloutError, match="max_new_tokens=0"):
        stream.submit("a", [5, 6], max_new_tokens=0)
    stream.submit("a", [5, 6], max_new_tokens=1)
    stream.submit("b", [5, 6], max_new_tokens=1000)
    lengths = {key: len(done.token_ids) for (key, _), done in drain(stream).items()}
    assert lengths["a"] == 1
    assert lengths["b"] <= PARAMS.max_new_tokens


def test_the_oldest_prefixes_make_room() -> None:
    kept = KeptPrefixes(5)

    def prefix(ids: list[int]) -> KeptPrefix:
        return KeptPrefix(ids, torch.zeros(1, 2, 1, len(ids), 4))

    kept.add("a", prefix([1, 2]))
    kept.add("b", prefix([3, 4, 5]))
    assert kept.tokens == 5
    kept.add("c", prefix([6]))
    assert kept.take("a", [1, 2, 3]) is None
    found = kept.take("b", [3, 4, 5, 6])
    assert found is not None
    assert found.ids == [3, 4, 5]
    assert kept.take("b", [3, 4, 5, 6]) is None
    assert (kept.take("c", [6]), kept.tokens) == (None, 0)
    kept.add("d", prefix([1, 2, 3, 4, 5, 6]))
    assert kept.tokens == 0


MIB = 1 << 20


PROMPTS = [[5 + i] * length for i, length in enumerate((60, 8, 33, 57, 12, 41, 2, 60, 19))]


STOP = tuple(range(20, 26))


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes that a cache of the Llama family had at any step."""
    seen, decode = [0], LlamaDecoder.decode

    def watched(self: LlamaDecoder, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        logits = decode(self, tokens, positions, columns)
        cache = self._cache
        held = [cache._kv, *([cache._prompts] if isinstance(cache, SharedPromptCache) else [])]
        seen[0] = max(seen[0], sum(one.numel() * one.element_size() for one in held))
        return logits

    monkeypatch.setattr(LlamaDecoder, "decode", watched)
    return seen


@pytest.mark.parametrize("n", [1, 4])
def test_a_bound_changes_no_token_and_holds(n: int, most: list[int]) -> None:
    # In float64, so that no token lies within rounding of another one's share of [0, 1).
    model = build("llama").double()
    params = SamplingParams(n=n, max_new_tokens=60, seed=2, stop_token_ids=STOP)
    free = NativeEngine(model)
    expected = free.generate(PROMPTS, params)
    assert most[0] > MIB
    most[0] = 0
    bounded = NativeEngine(model, kv_cache_memory_mb=1)
    found = bounded.generate(PROMPTS, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    assert 0 < most[0] <= MIB
    assert bounded.stats.decode_steps > free.stats.decode_steps, "some waited"


def test_models_outside_the_family_are_bounded_too() -> None:
    model = build("gpt2").double()
    params = SamplingParams(n=2, max_new_tokens=30, seed=2, stop_token_ids=STOP)
    free, bounded = NativeEngine(model), NativeEngine(model, kv_cache_memory_mb=1)
    expected = free.generate(PROMPTS[:5], params)
    assert [c.token_ids for c in bounded.generate(PROMPTS[:5], params)] == [
        c.token_ids for c in expected
    ]
    assert bounded.stats.decode_steps > free.stats.decode_steps, "some waited"


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_a_stream_waits_for_room(kv_on_update: str, most: list[int]) -> None:
    """Through an update of the weights, which admits the running sequences again."""
    model = build("llama").double()
    params = SamplingParams(n=4, max_new_tokens=40, seed=2, stop_token_ids=STOP)
    found = []
    for memory in (None, 1):
        most[0] = 0
        engine = NativeEngine(model, kv_cache_memory_mb=memory)
        stream = engine.stream(params, longest_prompt=60, kv_on_update=kv_on_update)  # type: ignore[arg-type]
        for key, prompt in enumerate(PROMPTS):
            stream.submit(key, prompt)
        ended = [one for _ in range(9) for one in stream.step()]
        assert (memory is None) == (stream.waiting == 0)
        stream.update_weights(None, 1)
        tokens = {(one.key, one.completion_index): one.completion.token_ids for one in ended}
        while stream.in_flight or stream.waiting:
            for one in stream.step():
                tokens[one.key, one.completion_index] = one.completion.token_ids
        assert len(tokens) == 4 * len(PROMPTS)
        found.append(tokens)
    assert found[0] == found[1]
    assert 0 < most[0] <= MIB


def test_what_can_t_fit_is_refused_by_name_before_decoding(most: list[int]) -> None:
    model = build("llama").double()
    engine = NativeEngine(model)
    engine._handle.budget = KvBudget(1, 16384)  # 64 tokens
    said = r"prompt 3 has 57 tokens, and with its completion 67, .* 2 MiB; .*_mb=1 holds 64 tokens"
    with pytest.raises(RolloutError, match=said):
        engine.generate([[5], [6], [7], [8] * 57], SamplingParams(max_new_tokens=10))
    with pytest.raises(RolloutError, match="the longest prompt of the stream has 60 tokens"):
        engine.stream(SamplingParams(n=2, max_new_tokens=10), longest_prompt=60)
    assert most[0] == 0
    assert engine.generate([[8] * 54], SamplingParams(max_new_tokens=10))
    stream = engine.stream(SamplingParams(n=2, max_new_tokens=10), longest_prompt=54)
    stream.submit("a", [8] * 54)
    assert len(drain(stream)) == 2, "one after the other"


def test_the_bytes_of_a_token() -> None:
    assert ModelHandle(build("llama").double()).kv_token_bytes() == 2 * 2 * 2 * 32 * 8
    assert ModelHandle(build("gpt2")).kv_token_bytes() == 2 * 2 * 128 * 4

    class Unsized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

    with pytest.raises(ConfigError, match="kv_cache_memory_mb with a model whose config names no"):
        NativeEngine(Unsized(), kv_cache_memory_mb=1, max_model_len=8)


@pytest.mark.parametrize(
    ("tokens", "n", "prompt", "new", "room"),
    [
        (1000, 1, 100, 100, KvRoom(5, 200)),
        (1000, 4, 100, 100, KvRoom(8, 200, 2)),  # two groups of 500
        (1250, 4, 100, 100, KvRoom(9, 200, 3)),  # and one of a third
        (10_000, 4, 100, 100, KvRoom(64, 200, 36)),  # as many as asked for
        (250, 4, 200, 100, KvRoom(1, 250)),  # the context ends before the completion does
    ],
)
def test_the_room_of_a_budget(tokens: int, n: int, prompt: int, new: int, room: KvRoom) -> None:
    budget = KvBudget(memory_mb=1, token_bytes=MIB // tokens)
    assert budget.tokens >= tokens
    found = KvBudget(1, MIB // tokens).room(n, Limits(64, prompt, new, 250))
    assert found == room


def test_settings_reach_the_engine() -> None:
    unset = {"cuda_graphs": False, "routed_experts": False, "lora": ""}
    assert engine_options(RolloutConfig()) == unset
    assert engine_options(RolloutConfig(cuda_graphs=True)) == unset | {"cuda_graphs": True}
    assert engine_options(RolloutConfig(lora="adapter")) == unset | {"lora": "adapter"}
