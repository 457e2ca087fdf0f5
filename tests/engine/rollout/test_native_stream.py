"""The native stream: arrivals and in-flight updates; transformers' forward judges each token."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_models import build, make_prompts
from stream_checks import (
    VERSIONS,
    Found,
    drain,
    gather,
    generated,
    texts,
    update,
    weights_of,
    with_n,
    worst_error,
    write,
)
from thorough import and_slow

from engine.rollout.native import NativeEngine

QUICK = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
# Families and completions a prompt, one of each decoder; each of the two tests has its own.
ONE = [("qwen2", 3), ("gpt2", 1)]
OTHER = [("llama", 3), ("mistral_sliding", 1)]
MORE = [("qwen2", 1), ("llama", 1), ("gpt2", 3), ("mistral_sliding", 3)]
# What happens between two decode steps: several submissions, another stream, an update, nothing.
EVENTS = st.lists(
    st.sampled_from(["step"] * 6 + ["submit"] * 3 + ["restart", "update"]), max_size=60
)


# Equality of tokens is checked in float64, where none lies within rounding of another one's share.


@cache
def all_at_once(family: str, n: int) -> Found:
    engine = NativeEngine(build(family).double(), max_model_len=60)
    return generated(engine, make_prompts(7), with_n(n))


@QUICK
@given(events=EVENTS, width=st.integers(3, 20), data=st.data())
@pytest.mark.parametrize(("family", "n"), and_slow(ONE, OTHER + MORE))
def test_arrivals_slots_and_restarts_change_no_token(
    family: str, n: int, events: list[str], width: int, data: st.DataObject
) -> None:
    engine = NativeEngine(build(family).double(), max_model_len=60)
    prompts, params = make_prompts(7), with_n(n)
    expected = all_at_once(family, n)
    order = data.draw(st.permutations(range(7)))
    stream, found = engine.stream(params, max_num_seqs=width), {}
    for event in events:
        if event == "submit" and order:
            key = order.pop()
            stream.submit(key, prompts[key])
        elif event == "restart":
            partials = stream.partials()
            stream.close()
            assert stream.waiting == 0
            stream = engine.stream(params, max_num_seqs=width)
            for partial in data.draw(st.permutations(partials)):
                stream.submit(partial.key, partial.prompt_ids, resume=partial)
        else:
            gather(found, stream.step())
    for key in order:
        stream.submit(key, prompts[key])
    drain(stream, found)
    assert texts(found) == texts(expected)
    for name, completion in found.items():
        assert completion.token_versions == [0] * len(completion.token_ids)
        assert torch.allclose(
            torch.tensor(completion.log_probs), torch.tensor(expected[name].log_probs), atol=1e-5
        )


@QUICK
@given(events=EVENTS, width=st.integers(3, 20))
@pytest.mark.parametrize(("family", "n"), and_slow(OTHER, ONE + MORE))
def test_each_log_prob_is_that_of_its_versions_forward_pass(
    family: str, n: int, events: list[str], width: int
) -> None:
    model = build(family)
    prompts: dict[Hashable, list[int]] = {f"row {i}": p for i, p in enumerate(make_prompts(7))}
    left, version, found = list(prompts), 0, {}
    engine = NativeEngine(model)
    stream = engine.stream(with_n(n), max_num_seqs=width)
    for event in events:
        if event == "submit" and left:
            key = left.pop()
            stream.submit(key, prompts[key])
        elif event == "restart":
            partials = stream.partials()
            stream.close()
            stream = engine.stream(with_n(n), max_num_seqs=width)
            for partial in partials:
                stream.submit(partial.key, prompts[partial.key], resume=partial)
        elif event == "update" and version + 1 < VERSIONS:
            version += 1
            rows = stream.in_flight
            update(stream, model, family, version)
            assert (stream.policy_version, stream.in_flight) == (version, rows)
        else:
            gather(found, stream.step())
    for key in left:
        stream.submit(key, prompts[key])
    drain(stream, found)
    assert sorted(found) == sorted((key, index) for key in prompts for index in range(n))
    for c in found.values():
        assert len(c.token_ids) == len(c.log_probs) == len(c.token_versions)
        assert c.token_versions == sorted(c.token_versions)
        assert c.policy_version == c.token_versions[0]
    assert worst_error(family, prompts, found) < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("n", [1, 3])
def test_an_update_amid_all_completions_is_exact_only_with_recomputed_keys(
    family: str, n: int
) -> None:
    prompts: dict[Hashable, list[int]] = dict(enumerate(make_prompts(6)))
    errors, prefills = {}, {}
    for kind in ("recompute", "keep"):
        model = build(family)
        stream = NativeEngine(model).stream(with_n(n, stop_token_ids=()), kv_on_update=kind)
        for key, prompt in prompts.items():
            stream.submit(key, prompt)
        for _ in range(7):
            assert stream.step() == []
        before = stream.stats.prefill_tokens
        update(stream, model, family, 4)
        prefills[kind] = stream.stats.prefill_tokens - before
        found = drain(stream)
        assert {tuple(c.token_versions) for c in found.values()} == {(0,) * 8 + (4,) * 16}
        errors[kind] = worst_error(family, prompts, found)
    assert errors["recompute"] < 1e-4
    assert errors["keep"] > 1e-2
    # 8 tokens are sampled by then and the latest is not fed yet; a prompt is computed once a group
    assert prefills == {
        "recompute": sum(len(p) + n * 7 for p in prompts.values()),
        "keep": 0,
    }


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_kept_keys_are_the_old_weights_and_all_else_the_new(n: int, in_place: bool) -> None:
    """transformers does the same by hand: a cache of the old weights, continued by the new."""
    model, prompt = build("llama"), [5, 6, 7, 8]
    stream = NativeEngine(model).stream(with_n(n, stop_token_ids=()), kv_on_update="keep")
    stream.submit(0, prompt)
    for _ in range(5):
        stream.step()
    if in_place:
        update(stream, model, "llama", 4)
    else:
        stream.update_weights(weights_of("llama")[4], 4)
    found = drain(stream)
    old, new = weights_of("llama")[0], weights_of("llama")[4]
    for c in found.values():
        first = c.token_versions.index(4)
        assert first == 6
        with torch.no_grad():
            cache = old(torch.tensor([[*prompt, *c.token_ids[: first - 1]]]), use_cache=True)
            rest = torch.tensor([c.token_ids[first - 1 : -1]])
            logits = new(rest, past_key_values=cache.past_key_values).logits[0]
        targets = torch.tensor(c.token_ids[first:])[:, None]
        expected = logits.log_softmax(-1).gather(1, targets)[:, 0]
        assert torch.allclose(torch.tensor(c.log_probs[first:]), expected, atol=1e-4)


def test_running_sequences_continue_with_a_new_models_storage() -> None:
    model, other = build("qwen2"), weights_of("qwen2")[3]
    engine = NativeEngine(model)
    stream = engine.stream(with_n(2, stop_token_ids=()))
    stream.submit("a", [5, 6])
    for _ in range(4):
        stream.step()
    stream.update_weights(other, 3)
    assert engine.policy_version == 3
    write(model, weights_of("qwen2")[1])  # nobody decodes with it any more
    found = drain(stream)
    assert {tuple(c.token_versions) for c in found.values()} == {(0,) * 5 + (3,) * 19}
    assert worst_error("qwen2", {"a": [5, 6]}, found) < 1e-4
