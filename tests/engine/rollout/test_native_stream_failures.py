"""The native stream when weights diverge, updates fail or change unseen: no token is lost."""

from __future__ import annotations

import pytest
import torch
from rollout_models import build, make_prompts
from stream_checks import PARAMS, Found, drain, gather, generated, texts, weights_of, with_n, write

from engine.errors import RolloutError
from engine.rollout.native import NativeEngine, sequences


def test_diverged_weights_cost_no_token() -> None:
    """NaN raises and names the completion; new weights let decoding continue, twice."""
    model = build("qwen2").double()
    sound = {name: p.detach().clone() for name, p in model.named_parameters()}
    prompts, engine = make_prompts(6), NativeEngine(model)
    expected = generated(engine, prompts, PARAMS)
    for kind in ("recompute", "keep"):
        stream, found = engine.stream(PARAMS, max_num_seqs=9, kv_on_update=kind), {}
        for key, prompt in enumerate(prompts):
            stream.submit(key, prompt)
        for _ in range(5):
            gather(found, stream.step())
        for _ in range(2):
            with torch.no_grad():
                model.model.layers[0].self_attn.k_proj.weight[:] = torch.nan
            stream.update_weights(None, stream.policy_version + 1)
            with pytest.raises(RolloutError, match=r"NaN logits.*completion \d of request \d"):
                stream.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(sound[name])
            stream.update_weights(None, stream.policy_version + 1)
            gather(found, stream.step())
        drain(stream, found)
        assert texts(found) == texts(expected)


def test_what_ended_before_a_failure_in_the_same_step_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequences, "_PREFILL_TOKENS", 1)  # one prompt a prefill
    model = build("qwen2")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
        model.lm_head.weight = torch.nn.Parameter(build("qwen2").lm_head.weight.detach().clone())
    stream = NativeEngine(model).stream(with_n(1, max_new_tokens=1))
    stream.submit("fine", [5, 6])
    stream.submit("bad", [5, 50])
    with pytest.raises(RolloutError, match="request 'bad'"):
        stream.step()
    assert (stream.in_flight, stream.waiting) == (0, 1)
    assert [done.key for done in stream.step()] == ["fine"]
    with pytest.raises(RolloutError, match="request 'bad'"):
        stream.step()
    assert [partial.key for partial in stream.partials()] == ["bad"]


def test_a_failed_update_stops_the_stream_until_one_succeeds() -> None:
    model = build("qwen2").double()
    engine, prompts = NativeEngine(model), make_prompts(3)
    expected = generated(engine, prompts, PARAMS)
    stream, found = engine.stream(PARAMS), {}
    for key in range(2):
        stream.submit(key, prompts[key])
    for _ in range(4):
        gather(found, stream.step())
    with torch.device("meta"):
        hollow = build("qwen2")
    with pytest.raises(RolloutError, match="meta device"):
        stream.update_weights(hollow, 1)
    with pytest.raises(RolloutError, match="policy version 1 failed"):
        stream.step()
    with pytest.raises(RolloutError, match="policy version 1 failed"):
        stream.submit(2, prompts[2])
    assert [partial.key for partial in stream.partials()] == [0, 1]  # what was sampled is sound
    stream.update_weights(model, 1)
    stream.submit(2, prompts[2])
    drain(stream, found)
    assert texts(found) == texts(expected)
    with pytest.raises(RolloutError, match="older 0"):
        stream.update_weights(model, 0)
    assert stream.step() == []


def test_a_recomputation_that_fails_fails_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").double()
    engine = NativeEngine(model)
    expected = generated(engine, [[5, 6, 7]], PARAMS)
    stream = engine.stream(PARAMS)
    stream.submit(0, [5, 6, 7])
    found: Found = {}
    for _ in range(3):
        gather(found, stream.step())
    unfinished = stream.in_flight
    with monkeypatch.context() as patch:
        patch.setattr(model.model.rotary_emb, "forward", lambda *_: 1 / 0)
        with pytest.raises(RolloutError, match="version 1: division by zero"):
            stream.update_weights(None, 1)
    assert (stream.in_flight, stream.waiting) == (0, unfinished)
    with pytest.raises(RolloutError, match="can't serve"):
        stream.step()
    stream.update_weights(None, 1)
    assert texts(drain(stream, found)) == texts(expected)


def test_weights_changed_behind_the_stream_are_refused() -> None:
    model = build("qwen2")
    engine = NativeEngine(model)
    stream = engine.stream(PARAMS)
    stream.submit(0, [5, 6])
    stream.step()
    write(model, weights_of("qwen2")[1])
    with pytest.raises(RolloutError, match="update_weights"):
        stream.step()
    stream.update_weights(None, 1)
    stream.step()
    engine.update_weights(model, 2)  # beside the stream
    with pytest.raises(RolloutError, match="since the stream took policy version 1"):
        stream.step()
    stream.update_weights(None, 2)
    assert drain(stream)[0, 0].token_versions[:4] == [0, 0, 1, 2]
