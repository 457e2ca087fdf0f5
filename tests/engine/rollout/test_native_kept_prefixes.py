"""A request that goes on from an ended one computes what is new, and gets the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rollout_models import build, make_prompts
from stream_checks import drain

from engine.errors import RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.native.kv_cache import KeptPrefix, KeptPrefixes
from engine.rollout.native.native_stream import NativeStream
from engine.rollout.protocol import SamplingParams

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
