"""Agents as users write them, for tests; their model is tiny and writes nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

from engine.agents.call_parsers import ParsedTurn, register_call_parser
from engine.agents.environment_protocol import ToolCall

ASK = {"role": "user", "content": "2+3="}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@register_call_parser("digit_adds")
def digit_adds(text: str) -> ParsedTurn:
    """A call of `add` where a turn has a digit."""
    found = [int(c) for c in text if c.isdigit()]
    calls = (ToolCall("add", {"a": found[0], "b": 2}),) if found else ()
    return ParsedTurn(text, calls)


def digits(text: str | None) -> float:
    return sum(c.isdigit() for c in text or "") / max(1, len(text or ""))


async def play(row: dict[str, Any], client: Any, *, turns: int = 2) -> dict[str, object]:
    """A conversation of a few turns; the reward is the share of digits in the last."""
    messages: list[Any] = list(row["prompt"])
    for turn in range(turns):
        answer = await client.chat.completions.create(
            model="gpt-4o", messages=messages, max_tokens=6, temperature=0.2
        )
        said = answer.choices[0].message
        messages += [said, {"role": "user", "content": f"{turn}+{turn}="}]
    return {"reward": digits(said.content), "solved": digits(said.content) > 0.5}


async def slowly(row: dict[str, Any], client: Any, *, delay: float = 0.2) -> float:
    """As `play`, with pauses; each beginning and turn is noted in the file NOTED_GAMES."""
    note("reset")
    messages: list[Any] = list(row["prompt"])
    for turn in range(3):
        answer = await client.chat.completions.create(
            model="x", messages=messages, max_tokens=6, logprobs=True
        )
        note("step")
        messages += [answer.choices[0].message, {"role": "user", "content": f"{turn}+{turn}="}]
        await asyncio.sleep(delay)
    return digits(answer.choices[0].message.content)


def note(word: str) -> None:
    if path := os.environ.get("NOTED_GAMES"):
        with open(path, "a") as file:
            file.write(f"{word}\n")


async def branching(row: dict[str, Any], client: Any) -> float:
    """Two choices, two calls at once, and a summary in place of the conversation."""
    create = client.chat.completions.create
    two = await create(model="x", messages=[ASK], n=2, max_tokens=4)
    chat = [ASK, two.choices[1].message, ASK]
    both = await asyncio.gather(
        create(model="x", messages=chat, max_tokens=4),
        create(model="x", messages=[*chat[:2], {"role": "user", "content": "4+4="}], max_tokens=4),
    )
    summary = [{"role": "user", "content": f"In short: {len(both)}"}]
    await create(model="x", messages=summary, max_tokens=4)
    return 1.0


async def by_way(row: dict[str, Any], client: Any) -> dict[str, object]:
    """What `row["extra_info"]["way"]` says, for faults of clients."""
    way = row["extra_info"]["way"]
    create = client.chat.completions.create
    await create(model="x", messages=row["prompt"], max_tokens=3)
    if way == "raises":
        raise ValueError("the agent is broken")
    if way == "hangs":
        await asyncio.sleep(3600)
    if way == "blocks":
        time.sleep(3600)
    if way == "dies":
        os._exit(3)
    if way == "no number":
        return {"reward": "much"}
    if way == "too much":
        messages = list(row["prompt"])
        while True:
            answer = await create(model="x", messages=messages, max_tokens=3)
            messages += [answer.choices[0].message, *row["prompt"]]
    if way == "hangs up":
        await _hang_up(client)
    if way == "later":
        _tasks.append(asyncio.ensure_future(_later(str(client.base_url), client.api_key)))
    return {"reward": 1.0}


async def _hang_up(client: Any, after: float = 0.0) -> None:
    """Ask for a turn, and don't wait for it."""
    body = json.dumps({"messages": [ASK], "max_tokens": 30}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        f"authorization: Bearer {client.api_key}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(after)
    writer.close()
    await asyncio.sleep(0.5)


_tasks: list[Any] = []


async def _later(url: str, key: str) -> None:
    import openai

    await asyncio.sleep(0.3)
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        try:
            await client.chat.completions.create(model="x", messages=[ASK], max_tokens=3)
        except openai.APIStatusError as error:
            note(f"late: {error.status_code}")


crowd: list[asyncio.Event] = []


async def together(row: dict[str, Any], client: Any, *, count: int = 1000) -> float:
    """Its second turn comes when `count` episodes, all in this process, have had their first."""
    create = client.chat.completions.create
    first = await create(model="x", messages=[ASK], max_tokens=4)
    event = asyncio.Event()
    crowd.append(event)
    if len(crowd) == count:
        for waiting in crowd:
            waiting.set()
    await event.wait()
    chat = [ASK, first.choices[0].message, ASK]
    await create(model="x", messages=chat, max_tokens=4)
    return 1.0


async def without_client(row: dict[str, Any]) -> float:
    """Not what an agent is: it takes no client."""
    return 1.0


async def leaving(row: dict[str, Any], client: Any) -> float:
    """One call whose client hangs up, and one that is under way when the episode ends."""
    await _hang_up(client, 0.5)
    _tasks.append(asyncio.ensure_future(client.chat.completions.create(model="x", messages=[ASK])))
    await asyncio.sleep(0.5)
    return 1.0


async def everything(row: dict[str, Any], client: Any) -> float:
    """The fields of OpenAI's API, as its own client reads the answers."""
    import openai
    import pytest

    create = client.chat.completions.create
    assert [model.id async for model in client.models.list()] == ["policy"]
    same = {"model": "x", "messages": [ASK], "max_tokens": 5, "seed": 7}
    first, second = [await create(**same) for _ in range(2)]
    assert first.choices[0].message.content == second.choices[0].message.content
    others = {(await create(**same | {"seed": i})).choices[0].message.content for i in range(5)}
    assert len(others) > 1
    drawn = {(await create(**same | {"seed": None})).choices[0].message.content for _ in range(5)}
    assert len(drawn) > 1
    scored = await create(**same, logprobs=True)
    tokens = scored.choices[0].logprobs.content
    assert len(tokens) == scored.usage.completion_tokens
    assert all(token.logprob <= 0 for token in tokens)
    streamed = [chunk async for chunk in await create(
        **same, stream=True, stream_options={"include_usage": True})]  # fmt: skip
    said = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert said == first.choices[0].message.content
    assert streamed[-1].usage.completion_tokens == first.usage.completion_tokens
    text = await client.completions.create(model="x", prompt="2+3=", max_tokens=5, logprobs=0)
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
    more = await client.completions.create(
        model="x", prompt="2+3=" + text.choices[0].text + "\n4+4=", max_tokens=5
    )
    assert more.usage.prompt_tokens > text.usage.total_tokens - 1
    ids = await client.completions.create(model="x", prompt=[5, 6, 7], max_tokens=4, n=2)
    assert ids.usage.prompt_tokens == 3
    stop = first.choices[0].message.content[1:2]
    if stop:
        ended = await create(**same, stop=[stop])
        assert stop not in ended.choices[0].message.content
        assert ended.choices[0].finish_reason == "stop"
    refused: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}}, {"tool_choice": "required"},
        {"logit_bias": {"5": 1}}, {"messages": []}, {"max_tokens": 0}, {"top_logprobs": 3},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"extra_body": {"continue_final_message": True}}, {"tools": [{"type": "web_search"}]},
    ]  # fmt: skip
    for fields in refused:
        with pytest.raises(openai.BadRequestError):
            await create(**same | fields)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        await client.completions.create(model="x", prompt=[10**6], max_tokens=4)
    with pytest.raises(openai.AuthenticationError):
        await client.copy(api_key="another").chat.completions.create(**same)
    return 1.0


async def with_tools(row: dict[str, Any], client: Any) -> dict[str, object]:
    """The loop of OpenAI's documentation: calls are answered until there is none."""
    messages: list[Any] = list(row["prompt"])
    called = 0
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="x", messages=messages, tools=[ADD], max_tokens=8
        )
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            called += 1
            total = sum(int(v) for v in json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{total}"})
    return {"reward": float(called), "called": called}
