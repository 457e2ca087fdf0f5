"""Decode steps in fixed shapes: the tokens are the same ones, captured or not.

Without a GPU a "capture" keeps the function and runs it again on the captured buffers, as a graph
does; what a graph forbids is shown on a GPU, in `test_native_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_models import build, make_prompts, reference_log_probs
from stream_checks import drain, generated, texts, update, weights_of, with_n, worst_error
from thorough import and_slow
from torch import Tensor

from engine.rollout.native import NativeEngine, llama_decoder, model_handle
from engine.rollout.native.decoding_weights import bind
from engine.rollout.native.kv_cache import KVCache
from engine.rollout.native.llama_decoder import GraphedSteps, LlamaDecoder, can_graph
from engine.rollout.protocol import SamplingParams


def addresses(decoder: LlamaDecoder) -> tuple[int, int]:
    assert isinstance(decoder._cache, KVCache)
    return decoder._cache._kv.data_ptr(), decoder._w.embedding.data_ptr()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Make engines capture on this device; the outputs of captured steps, as they were captured."""
    outputs: list[Tensor] = []

    def decoder(*sizes: Any, **options: Any) -> LlamaDecoder:
        def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
            outputs.append(function())  # a graph warms up with the step's own inputs
            output, where = torch.empty_like(outputs[-1]), addresses(made)

            def replay() -> Tensor:
                assert addresses(made) == where, "a graph would use what was freed"
                return output.copy_(function())

            return replay

        made = LlamaDecoder(*sizes, **options | {"cuda_graphs": True, "capture": capture})
        return made

    monkeypatch.setattr(model_handle, "LlamaDecoder", decoder)
    return outputs


@pytest.mark.parametrize(
    ("n", "slots", "family"),
    and_slow(
        [(1, 9, "qwen2"), (3, 9, "llama"), (4, 64, "qwen2")],
        [(1, 9, "llama"), (3, 9, "qwen2"), (4, 64, "llama")],
    ),
)
def test_tokens_are_those_of_plain_steps(
    family: str, n: int, slots: int, captures: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = build(family).double(), make_prompts(8)
    params = SamplingParams(n=n, max_new_tokens=60, seed=2, stop_token_ids=tuple(range(20, 26)))
    found = NativeEngine(model, max_num_seqs=slots).generate(prompts, params)
    assert captures
    monkeypatch.undo()
    expected = NativeEngine(model, max_num_seqs=slots).generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    for ours, theirs in zip(found, expected, strict=True):
        errors = torch.tensor(ours.log_probs) - torch.tensor(theirs.log_probs)
        assert errors.abs().max() < 1e-5


def test_steps_are_captured_again_after_the_cache_has_grown(
    captures: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_decoder, "_COLUMNS", 32)
    prompt, model = [5, 6, 7], build("qwen3")
    (done,) = NativeEngine(model).generate([prompt], SamplingParams(max_new_tokens=120))
    expected = reference_log_probs(model, prompt, done.token_ids)
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)
    assert [tuple(output.shape) for output in captures] == [(1, 100)] * 4


@pytest.mark.parametrize("kind", ["recompute", "keep"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_streams_new_weights_are_seen(
    kind: Any, in_place: bool, captures: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for _ in range(2):
        model = build("llama")
        stream = NativeEngine(model).stream(with_n(3, stop_token_ids=()), kv_on_update=kind)
        prompts: dict[Any, list[int]] = dict(enumerate(make_prompts(5)))
        for key, prompt in prompts.items():
            stream.submit(key, prompt)
        for _ in range(7):
            stream.step()
        if in_place:
            update(stream, model, "llama", 4)
        else:
            stream.update_weights(weights_of("llama")[4], 4)
        found.append(drain(stream))
        if kind == "recompute":
            assert worst_error("llama", prompts, found[-1]) < 1e-4
        assert captures
        monkeypatch.undo()  # the second time without capturing
    assert texts(found[0]) == texts(found[1])


def test_a_shape_is_captured_once_it_has_come_up_often() -> None:
    calls: list[tuple[int, int]] = []

    def step(tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        calls.append((len(tokens), columns))
        return (tokens + positions)[:, None].float()

    steps = GraphedSteps(step, slots=6, columns=300, capture=lambda function: function)
    assert [steps.padded_columns(used) for used in (1, 128, 129, 290)] == [128, 128, 256, 300]
    for rows in (3, 3, 4, 3, 5, 5, 5):
        tokens = torch.arange(rows)
        assert steps.run(tokens, 2 * tokens, 128).flatten().tolist() == (3.0 * tokens).tolist()
    assert calls == [(3, 128), (3, 128), (4, 128), (4, 128), (5, 128), (5, 128), (6, 128)]
    steps.clear()
    steps.run(torch.arange(3), torch.arange(3), 128)
    assert calls[-1] == (3, 128)


def test_without_a_gpu_nothing_is_captured() -> None:
    prompts, params = make_prompts(4), with_n(2)
    plain = NativeEngine(build("qwen2"))
    asked = NativeEngine(build("qwen2"), cuda_graphs=True)
    assert not can_graph(bind(build("qwen2")))
    assert texts(generated(asked, prompts, params)) == texts(generated(plain, prompts, params))
