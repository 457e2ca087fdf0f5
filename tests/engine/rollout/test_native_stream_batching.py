"""The native stream's batches: partials are continued, prompts computed once, slots refilled."""

from __future__ import annotations

import pytest
from rollout_models import build, make_prompts
from stream_checks import (
    PARAMS,
    Found,
    drain,
    gather,
    generated,
    texts,
    weights_of,
    with_n,
    worst_error,
)

from engine.rollout.native import NativeEngine, sequences
from engine.rollout.stream import PartialCompletion, PartialRequest, noise_index


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
    assert stream.stats.prefill_tokens == stream.stats.prompt_tokens == sum(map(len, prompts))
    assert stream.stats.generated_tokens == sum(len(c.token_ids) for c in found.values())


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
