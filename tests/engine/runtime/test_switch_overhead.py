"""`measure_switch_overhead`: nothing moves on one rank, and a switch that copies is seen to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hybrid_cases import prompts, step
from once import OwnEntries
from tiny_engine import tiny_model

from engine import HybridActor, measure_switch_overhead
from engine.errors import ConfigError
from engine.rollout import protocol
from engine.rollout.native import NativeEngine, model_handle
from engine.rollout.native.decoding_weights import LlamaWeights
from engine.rollout.native.llama_decoder import LlamaDecoder
from engine.rollout.protocol import register_engine
from engine.runtime.hybrid_actor import StorageCounter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", ["train", "rollout"])
def test_on_one_rank_the_switch_moves_nothing(actor: HybridActor, mode: Any) -> None:
    weights = [p.detach().clone() for p in actor.parameters()]
    actor.train()
    cost = measure_switch_overhead(actor, mode)
    assert set(cost) == {"latency_ms", "latency_min_ms", "mem_increase_mb", "received_mb"}
    assert cost["received_mb"] == 0
    size = sum(w.nbytes for w in weights) / 1e6
    assert cost["mem_increase_mb"] <= 0.01 * size
    assert 0 < cost["latency_min_ms"] <= cost["latency_ms"]
    assert cost["latency_min_ms"] < 8
    assert actor.training
    assert all(torch.equal(p, w) for p, w in zip(actor.parameters(), weights, strict=True))


class CopyingEngine(NativeEngine):
    """Takes a copy of the weights at each update, as engines without shared storage do."""

    def update_weights(self, model: torch.nn.Module, version: int) -> None:
        super().update_weights(copy.deepcopy(model), version)


@pytest.fixture
def copying(own_entries: OwnEntries) -> HybridActor:
    own_entries(protocol._registry)
    register_engine("copying")(CopyingEngine)
    return HybridActor(tiny_model("llama"), rollout_engine="copying")


def test_a_switch_that_copies_is_seen_to_copy(copying: HybridActor) -> None:
    size = sum(p.nbytes for p in copying.parameters()) / 1e6
    cost = measure_switch_overhead(copying, "rollout", repeats=3)
    assert size <= cost["mem_increase_mb"] < 1.5 * size
    assert measure_switch_overhead(copying, "train", repeats=3)["mem_increase_mb"] < 0.01 * size
    step(copying, fused=True)  # and the copy is brought up to date
    expected = copying.policy.generate(**prompts(), max_new_tokens=8)
    assert torch.equal(copying.generate(**prompts(), max_new_tokens=8), expected)


def test_the_counter_counts_new_storage_alone() -> None:
    x = torch.zeros(1000)
    with StorageCounter() as counter:
        x.view(10, 100).t().add_(1)
        assert counter.bytes == 0
        y = x + 1
        y.mul_(2)
        torch.empty(10)
    assert counter.bytes == 4040


def test_a_measure_of_nothing_is_refused(qwen: HybridActor) -> None:
    with pytest.raises(ConfigError, match="mode='generate'"):
        measure_switch_overhead(qwen, "generate")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="repeats=0"):
        measure_switch_overhead(qwen, "train", repeats=0)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_native_decodes_at_the_trainers_own_addresses(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the optimizer's first step, and for a tied head."""
    actor = HybridActor(tiny_model(family))
    bound: list[LlamaWeights] = []

    def spy(weights: LlamaWeights, *sizes: Any, **options: Any) -> LlamaDecoder:
        bound.append(weights)
        return LlamaDecoder(weights, *sizes, **options)

    monkeypatch.setattr(model_handle, "LlamaDecoder", spy)
    trained = {p.data_ptr() for p in actor.parameters()}
    for fused in (False, True):
        actor.generate(**prompts(), max_new_tokens=2)
        step(actor, fused)
        assert addresses(bound.pop()) == trained == {p.data_ptr() for p in actor.parameters()}


def addresses(weights: LlamaWeights) -> set[int]:
    found = [weights.embedding, weights.head.weight, weights.norm.weight]
    for layer in weights.layers:
        parts = [getattr(layer, name) for name in layer.__slots__]
        found += [t for part in parts if part for t in part if isinstance(t, torch.Tensor)]
    return {t.data_ptr() for t in found}
