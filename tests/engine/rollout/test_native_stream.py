"""The native stream: batching, limits, failures."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_models import CONTEXT, build, make_prompts, reference_log_probs
from stream_checks import (
    PARAMS,
    STOP,
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

from engine.errors import ConfigError, EngineError, RolloutError
from engine.rollout.native import NativeEngine, sequences
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import PartialCompletion, PartialRequest, noise_index, open_stream

QUICK = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


# Families and completions a prompt, one of each decoder; each of the two tests has its own.
ONE = [("qwen2", 3), ("gpt2", 1)]


OTHER = [("llama", 3), ("mistral_sliding", 1)]


MORE = [("qwen2", 1), ("llama", 1), ("gpt2", 3), ("mistral_sliding", 3)]


# What happens between two decode steps: several submissions, another stream, an update, nothing.
EVENTS = st.lists(
    st.sampled_from(["step"] * 6 + ["submit"] * 3 + ["restart", "update"]), max_size=60
)


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


def test_a_partial_is_continued_in_another_engine_with_its_prompt_prefilled_once() -> None:
    first = NativeEngine(build("qwen2")).stream(PARAMS)
    first.submit("a", [5, 6, 7, 8])
    first.submit("b", [9] * 30)
    found: Found = {}
    for _ in range(6):
        gather(found, first.step())
    partials = first.partials()
    assert [p.key for p in partials] == ["a", "b"]
    assert len(found) + sum(len(p.completions) for p in partials) == 6
    tails = sum(len(part.token_ids) - 1 for p in partials for part in p.completions)
    other = NativeEngine(weights_of("qwen2")[2])
    other.update_weights(weights_of("qwen2")[2], 2)
    second = other.stream(PARAMS)
    for partial in partials:
        second.submit(partial.key, partial.prompt_ids, resume=partial)
    gather(found, second.step())
    assert second.stats.prefill_tokens == 4 + 30 + tails
    drain(second, found)
    assert sorted(found) == [(key, i) for key in ("a", "b") for i in range(3)]
    assert {version for c in found.values() for version in c.token_versions} == {0, 2}
    assert worst_error("qwen2", {"a": [5, 6, 7, 8], "b": [9] * 30}, found) < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("at_once", [1, 16384])
def test_resumed_and_fresh_completions_of_a_group_are_decoded_together(
    family: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "_PREFILL_TOKENS", at_once)
    engine = NativeEngine(build(family).double())
    expected = generated(engine, [[5, 6, 7]], with_n(4, stop_token_ids=()))
    parts = []
    for index, have in enumerate((0, 9, 0, 1)):
        c = expected[0, index]
        parts.append(PartialCompletion(index, c.token_ids[:have], c.log_probs[:have], [0] * have))
    stream = engine.stream(with_n(4, stop_token_ids=()))
    stream.submit(0, [5, 6, 7], resume=PartialRequest(0, [5, 6, 7], parts[::-1]))
    assert texts(drain(stream)) == texts(expected)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_groups_prompt_is_prefilled_once_and_idle_streams_answer_at_once(family: str) -> None:
    stream = NativeEngine(build(family)).stream(PARAMS, max_num_seqs=7)
    assert stream.step() == []
    prompts, found = make_prompts(9), {}
    for start in (0, 3, 6):  # each batch arrives at an empty stream
        for key in range(start, start + 3):
            stream.submit(key, prompts[key])
        assert (stream.in_flight, stream.waiting) == (0, 9)
        gather(found, stream.step())
        assert stream.in_flight + stream.waiting + len(found) == 9 * (start // 3 + 1)
        assert stream.in_flight <= 6  # groups are admitted whole
        drain(stream, found)
        assert stream.step() == []
    assert len(found) == 27
    assert stream.stats.prefill_tokens == sum(map(len, prompts))


def test_finished_rows_make_room_while_others_decode() -> None:
    """With refilling, steps stay near tokens / slots; a stream of batches waits for each tail."""
    stream = NativeEngine(build("qwen2")).stream(with_n(2, max_new_tokens=60), max_num_seqs=16)
    for key, prompt in enumerate(make_prompts(60)):
        stream.submit(key, prompt)
    found = drain(stream)
    lengths = [len(found[key, index].token_ids) for key in range(60) for index in range(2)]
    batches = sum(max(lengths[i : i + 16]) for i in range(0, 120, 16))
    assert stream.stats.decode_steps < 0.75 * batches


def test_completions_end_at_the_context() -> None:
    stream = NativeEngine(build("llama"), max_model_len=30).stream(
        with_n(2, max_new_tokens=500, stop_token_ids=())
    )
    stream.submit(0, [5] * 25)
    stream.submit(1, [6])
    lengths = {name: len(c.token_ids) for name, c in drain(stream).items()}
    assert lengths == {(0, 0): 5, (0, 1): 5, (1, 0): 29, (1, 1): 29}


def test_string_keys_draw_alike_in_every_process() -> None:
    # Python's own hash of a string is another one in each process.
    assert noise_index("row 17") == 6772153848012588143
    assert noise_index(("epoch", 3)) == 6379977274105072157
    assert noise_index(b"x") == -6850435222794246028
    assert [noise_index(5), noise_index(-1)] == [5, -1]
    model = build("qwen2")
    answers = []
    for seed in (3, 3, 4):
        stream = NativeEngine(model, seed=seed - 3).stream(with_n(2, stop_token_ids=()))
        stream.submit("a", [5, 6])
        stream.submit("b", [5, 6])
        answers.append({name: tuple(c.token_ids) for name, c in drain(stream).items()})
    assert answers[0] == answers[1]
    assert len(set(answers[0].values()) | set(answers[2].values())) == 8


@pytest.mark.parametrize("n", [1, 4])
def test_a_batch_and_a_stream_run_on_one_scheduler(n: int) -> None:
    """Submitted at once, requests are decoded as prompts of `generate` are, to the last bit."""
    engine, prompts, params = NativeEngine(build("qwen2")), make_prompts(9), with_n(n)
    expected = generated(engine, prompts, params)
    stream = engine.stream(params)
    for key, prompt in enumerate(prompts):
        stream.submit(key, prompt)
    found = drain(stream)
    assert texts(found) == texts(expected)
    assert all(found[name].log_probs == expected[name].log_probs for name in expected)
    assert stream.stats.decode_steps == engine.stats.decode_steps
    assert stream.stats.prefill_tokens == engine.stats.prefill_tokens


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


def partial_of(**changes: object) -> PartialRequest:
    part = {"completion_index": 0, "token_ids": [9], "log_probs": [-1.0], "token_versions": [0]}
    return PartialRequest("k", [5, 6], [PartialCompletion(**(part | changes))])


BAD_SUBMISSIONS = {
    "is in use": ("taken", [5], None),
    "no repr of its own": (object(), [5], None),
    "'k' is empty": ("k", [], None),
    "longest_prompt=10": ("k", [5] * 11, None),
    "no room for a completion": ("k", [5] * CONTEXT, None),
    "token id 100 outside": ("k", [5, 100], None),
    "of another prompt": ("k", [5], partial_of()),
    "needs one or more": ("k", [5, 6], partial_of(completion_index=3)),
    "2 tokens, 1 log-probs": ("k", [5, 6], partial_of(token_ids=[9, 9])),
    "holds a stop token": ("k", [5, 6], partial_of(token_ids=[STOP[0]])),
    "of the partial of request 'k' has token id 400": (
        "k",
        [5, 6],
        partial_of(token_ids=[400]),
    ),
    "end at 24": (
        "k",
        [5, 6],
        partial_of(token_ids=[9] * 24, log_probs=[-1.0] * 24, token_versions=[0] * 24),
    ),
}


@pytest.mark.parametrize("message", BAD_SUBMISSIONS)
def test_bad_submissions_are_refused_at_once(message: str) -> None:
    stream = NativeEngine(build("qwen2")).stream(PARAMS, longest_prompt=10)
    stream.submit("taken", [5])
    key, prompt, resume = BAD_SUBMISSIONS[message]
    with pytest.raises(EngineError, match=message):
        stream.submit(key, prompt, resume=resume)
    assert stream.waiting == 3
    assert {name for name, _ in drain(stream)} == {"taken"}
    stream.submit("taken", [5])  # all of it was returned
    assert len(drain(stream)) == 3


def test_bad_streams_and_closing() -> None:
    engine = NativeEngine(build("qwen2"))
    with pytest.raises(ConfigError, match="n=3"):
        engine.stream(PARAMS, max_num_seqs=2)
    with pytest.raises(ConfigError, match="longest_prompt=128"):
        engine.stream(PARAMS, longest_prompt=CONTEXT)
    with pytest.raises(ConfigError, match="kv_on_update='drop'"):
        engine.stream(PARAMS, kv_on_update="drop")  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="top_p=2"):
        engine.stream(SamplingParams(top_p=2))
    with pytest.raises(ConfigError, match="object decodes whole batches"):
        open_stream(object(), PARAMS)  # type: ignore[arg-type]
    stream, other = open_stream(engine, PARAMS), engine.stream(PARAMS)
    stream.submit(0, [5])
    stream.close()
    for use in (stream.step, stream.partials, lambda: stream.submit(1, [5])):
        with pytest.raises(RolloutError, match="closed"):
            use()
    other.submit(0, [5])
    other.step()
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        other.step()
    partial = other.partials()[0]
    expected = reference_log_probs(build("qwen2"), [5], partial.completions[0].token_ids)
    assert torch.allclose(torch.tensor(partial.completions[0].log_probs), expected, atol=1e-4)
