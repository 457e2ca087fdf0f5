"""What a native stream refuses, and what is left after closing."""

from __future__ import annotations

import pytest
import torch
from rollout_models import CONTEXT, build, reference_log_probs
from stream_checks import PARAMS, STOP, drain

from engine.errors import ConfigError, RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import PartialCompletion, PartialRequest, open_stream


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
    with pytest.raises(RolloutError, match=message):
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
