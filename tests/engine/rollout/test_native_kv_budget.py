"""A bounded KV cache: the same tokens, never more memory, and a refusal by name."""

from __future__ import annotations

import pytest
import torch
from rollout_models import build
from stream_checks import drain
from torch import Tensor

from engine.config import RolloutConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.native.kv_cache import KvBudget, KvRoom, Limits, SharedPromptCache
from engine.rollout.native.llama_decoder import LlamaDecoder
from engine.rollout.native.model_handle import ModelHandle
from engine.rollout.protocol import SamplingParams, engine_options

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
    dense = {"routed_experts": False}
    assert engine_options(RolloutConfig(cuda_graphs=True)) == {"cuda_graphs": True, **dense}
    assert engine_options(RolloutConfig()) == {"cuda_graphs": False, **dense}
