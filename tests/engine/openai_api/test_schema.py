"""Requests as values, and answers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from engine.openai_api.schema import (
    NO_TOOLS,
    UNCOMMON,
    Answer,
    ChatRequest,
    CompletionRequest,
    Reply,
    RequestError,
    RequestLimits,
    parse,
)

LIMITS = RequestLimits(max_prompts=2, max_n=3, max_tokens=100)


@pytest.mark.parametrize(
    ("values", "status", "message"),
    [
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served; 'tiny' is"),
        ({"prompt": 5}, 400, "prompt: give a text"),
        ({"prompt": -5}, 400, "prompt: give a text"),
        ({"prompt": ["a", 5]}, 400, "prompt: give a text"),
        ({"prompt": [[5], [6.0]]}, 400, "prompt: give a text"),
        ({"prompt": [True]}, 400, "prompt: give a text"),
        ({"prompt": None}, 400, "prompt: give a text"),
        ({"prompt": ["a", [5, 6]]}, 200, ""),
        ({"prompt": ["a"] * 3}, 400, "3 prompts, and this server takes 2 at once"),
        ({"prompt": "a", "n": 4}, 400, "n: Input should be less than or equal to 3"),
        ({"prompt": ["a"] * 2, "n": 3, "max_tokens": 17}, 400, "may generate 102 tokens"),
        ({"prompt": ["a"] * 2, "n": 3, "max_tokens": 16}, 200, ""),
        ({"prompt": "a", "best_of": 2}, 400, "best_of=2 is not offered"),
        ({"prompt": "a", "best_of": 1, "tools": []}, 200, ""),
        ({"prompt": "a", "tools": [1]}, 400, "tools=[1] is not offered"),
        ({"prompt": "a", "stop": ["x"] * 1001}, 400, "stop"),
    ],
)
def test_requests_are_read_within_limits(values: Any, status: int, message: str) -> None:
    read = partial(parse, CompletionRequest, values, "tiny", LIMITS, UNCOMMON | NO_TOOLS)
    if status == 200:
        assert read().prompts
        return
    with pytest.raises(RequestError, match=re.escape(message)) as refused:
        read()
    assert refused.value.status == status


def test_a_chat_is_answered_whole_or_in_events() -> None:
    values = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}
    values["stream_options"] = {"include_usage": True}
    request = parse(ChatRequest, values, "tiny", LIMITS, {})
    reply, answers = Reply(request, "tiny", 7), [Answer("a", 1, "stop"), Answer("b", 2, "length")]
    whole: Any = reply.whole(answers)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["a", "b"]
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert (whole["object"], whole["usage"]) == ("chat.completion", usage)
    piece, end = map(dict[str, Any], reply.events(1, answers[1]))
    assert piece["choices"][0]["delta"] == {"role": "assistant", "content": "b"}
    assert end["choices"] == [{"index": 1, "finish_reason": "length", "delta": {}}]
    assert piece["id"] == end["id"] == whole["id"]
    last = reply.last_event(answers)
    assert last is not None
    assert last["usage"] == usage
