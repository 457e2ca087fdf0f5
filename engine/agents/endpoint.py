"""The endpoint that agents talk to during rollout: OpenAI's API, answered by the policy.

Each episode has a key, which the client sends as its API key, and an `EpisodeSession`, which
records what passes. A request becomes `PolicyRequest`s in the session's queue; `agent_loop` has
them sampled. Sessions live in the event loop of the endpoint's thread, and only there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.agents.agent_runner import raise_file_limit
from engine.agents.call_parsers import bare_thought, split_thought
from engine.agents.environment_protocol import Action, EnvironmentFailure, Observation
from engine.agents.episode import End, Episode
from engine.agents.recorder import (
    EpisodeRecorder,
    LimitReached,
    RecordedPrompt,
    Replays,
    digest_of_ids,
)
from engine.errors import EngineError
from engine.openai_api import http_server, schema
from engine.openai_api.schema import RequestError
from engine.rollout.stream import PartialCompletion, PartialRequest

T = TypeVar("T")
log = logging.getLogger(__name__)

MODEL = "policy"  # its name in the API; requests may say any
_HUNG_UP = 499  # the status that nobody reads
# Clients are the run's own, and many; their turns take as long as they take.
_HTTP = http_server.HttpLimits(
    max_body_mib=64, header_timeout=60, keep_alive=3600, max_connections=16_384
)
_LIMITS = schema.RequestLimits(max_prompts=1)

# Fields that change an answer, and the values that ask for nothing.
_NOT_OFFERED: dict[str, tuple[object, ...]] = schema.UNCOMMON | {
    "chat_template_kwargs": ({},), "function_call": (),
    "functions": ([],), "modalities": (["text"],), "prediction": (), "top_logprobs": (0,),
    "tool_choice": ("none", "auto"), "web_search_options": (),
}  # fmt: skip
_OF_THE_RUN = ("temperature", "top_p", "top_k")


class ChatRequest(schema.ChatRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)  # type: ignore[assignment]
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None


class CompletionRequest(schema.CompletionRequest):
    """The body of `POST /v1/completions`; of one prompt."""

    logprobs: int | None = Field(None, ge=0, le=0)


_said: set[str] = set()  # by this process


def _say_whose_sampling(request: ChatRequest | CompletionRequest) -> None:
    for name in _OF_THE_RUN:
        value = getattr(request, name, None) or (request.model_extra or {}).get(name)
        if value is not None and name not in _said:
            _said.add(name)
            log.info(
                "an agent asks for %s=%s; turns are sampled as rollout.%s says, since what they "
                "are learned from is the distribution that they were drawn from", name, value, name
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class PolicyRequest:
    """A turn to sample, on its way through the threads."""

    session: EpisodeSession
    key: tuple[object, ...]  # of the stream: (group, episode, prompt, seed or number, choice)
    prompt_ids: list[int]
    max_new_tokens: int
    after: Hashable | None  # the turn whose ids the prompt begins with
    stops: tuple[str, ...]  # texts that end it
    done: asyncio.Future[PartialCompletion]  # of the endpoint's loop
    begun: PartialCompletion | None = None  # that it goes on from
    gone: bool = False  # nobody waits for it any more
    late: bool = False  # it takes too long, and is cut
    submitted: float = 0.0  # of time.monotonic

    def partial(self) -> PartialRequest | None:
        """What its stream goes on from."""
        if self.begun is None:
            return None
        return PartialRequest(self.key, self.prompt_ids, [self.begun])


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One episode of an agent: what it asked, what it was answered, and how that ended."""

    episode: Episode
    put: Callable[[PolicyRequest], None]  # its requests, and again those that are gone
    replays: Replays = field(default_factory=Replays)
    recorder: EpisodeRecorder = field(init=False)
    limit: End | None = None  # the first one that a request was refused for
    closed: bool = False
    refused: int = 0
    abandoned: int = 0
    policy_seconds: float = 0.0  # that it waited for turns
    _since: float = 0.0  # of time.monotonic, when it began to wait
    _open: set[PolicyRequest] = field(default_factory=set)
    _asked: dict[Hashable, int] = field(default_factory=dict)  # how often, by prompt

    def __post_init__(self) -> None:
        self.recorder = EpisodeRecorder(self.episode.tokenizer, self.episode.limits)

    async def chat(self, request: ChatRequest) -> dict[str, Any]:
        """Answer a conversation, with OpenAI's response."""
        if request.continue_final_message:
            raise RequestError("continue_final_message=True is not offered; leave it out")
        choice = (request.model_extra or {}).get("tool_choice")
        tools = request.tools if request.tools and choice != "none" else ()
        prompt = self.recorder.chat(request.messages, tools)
        parts = await self._sample(prompt, request, request.longest)
        choices = []
        for index, (key, part) in enumerate(parts):
            part, text = _until_stop(self._text, part, request.stops)
            action = self._action(prompt, part, text, prompt.tools)
            if request.parallel_tool_calls is False and len(action.tool_calls) > 1:
                action = Action(
                    action.text, action.token_ids, action.tool_calls[:1], content=action.content
                )
            message = _message(action, len(self.recorder.turns))
            self.recorder.add(prompt, part, action, message, key)
            log_probs = {"content": self._log_probs(part)} if request.logprobs else None
            end = self._end_of(part, text)
            reason = "tool_calls" if "tool_calls" in message and end == "stop" else end
            choices.append(_choice(index, reason, log_probs, message=message))
        return self._response("chat.completion", choices, prompt, parts)

    async def completion(self, request: CompletionRequest) -> dict[str, Any]:
        """Continue a text or token ids, with OpenAI's response."""
        if len(request.prompts) != 1:
            raise RequestError("prompt: give a text or token ids")
        prompt = self.recorder.completion(request.prompts[0])
        parts = await self._sample(prompt, request, request.longest)
        choices = []
        for index, (key, part) in enumerate(parts):
            part, text = _until_stop(self._text, part, request.stops)
            self.recorder.add(prompt, part, self._action(prompt, part, text), key=key)
            log_probs = None
            if request.logprobs is not None:
                entries = self._log_probs(part)
                names = (("tokens", "token"), ("token_logprobs", "logprob"))
                log_probs = {name: [e[key] for e in entries] for name, key in names}
            choices.append(_choice(index, self._end_of(part, text), log_probs, text=text))
        return self._response("text_completion", choices, prompt, parts)

    def close(self) -> None:
        """Take no more requests, and write what was recorded to the episode."""
        self.closed = True
        self.abandoned += len(self._open)
        for request in self._open:
            request.done.cancel()
        self.recorder.write_to(self.episode)

    def finish(
        self, last: Observation | None, error: BaseException | None, failure_reward: float | None
    ) -> None:
        """Say how the episode ended, by what its agent returned or by why it returned nothing."""
        episode, turns = self.episode, len(self.recorder.turns)
        episode.info |= {
            "answers": turns,
            "branches": len(episode.transcript.sequences) if episode.transcript else 0,
            "refused_calls": self.refused,
            "abandoned_calls": self.abandoned,
        }
        late = isinstance(error, EnvironmentFailure) and error.cause == "deadline"
        if last is not None and turns:
            assert episode.transcript is not None
            episode.end = "done"
            episode.transcript.add_reward(last.reward)
            episode.turn_rewards.append(last.reward)
            episode.info |= last.info
        elif self.limit is not None or late:
            episode.end, episode.truncated = self.limit or "seconds", True
            episode.dropped = episode.limits.drop
        else:
            said = "the agent ended without a turn of the policy" if error is None else str(error)
            episode.fail(said, failure_reward)

    async def _sample(
        self, prompt: RecordedPrompt, request: Any, longest: int | None
    ) -> list[tuple[Hashable, PartialCompletion]]:
        """Have the choices of a request sampled; their keys and tokens."""
        count = request.n or 1
        try:
            if self.episode.cut:  # its latest turn was
                raise LimitReached(
                    "turn_seconds", "a turn took longer than rollout.agent.turn_timeout_s"
                )
            room = self.recorder.room(prompt, len(self._open) + count)
        except LimitReached as reached:
            self.limit = self.limit or reached.end
            raise
        seed = None if request.seed is None else f"seed {request.seed}"
        digest, limit = digest_of_ids(prompt.ids), min(room, longest or room)
        number = self._asked.get(digest, 0)
        self._asked[digest] = number + 1
        if not self._open:
            self._since = time.monotonic()
        asked = [
            self._ask(prompt, (digest.hex(), seed or number, choice), limit, tuple(request.stops))
            for choice in range(count)
        ]
        try:
            parts = await asyncio.gather(*(one.done for one in asked))
            self.episode.cut = any(one.late for one in asked)
        except asyncio.CancelledError:
            for one in asked:
                one.gone = True
                self.put(one)
            if self.closed:
                raise _ended() from None
            self.abandoned += 1
            raise
        finally:
            self._open -= set(asked)
            if not self._open:
                self.policy_seconds += time.monotonic() - self._since
        return [(one.key, part) for one, part in zip(asked, parts, strict=True)]

    def _ask(
        self, prompt: RecordedPrompt, key: tuple[object, ...], limit: int, stops: tuple[str, ...]
    ) -> PolicyRequest:
        """A request, which the player has from now on unless its turn was recorded before."""
        episode, parent = self.episode, prompt.parent
        made = PolicyRequest(
            session=self,
            key=(episode.key, episode.index, *key),
            prompt_ids=prompt.ids,
            max_new_tokens=limit,
            after=parent.key if parent is not None else None,
            stops=stops,
            done=asyncio.get_running_loop().create_future(),
        )
        self._open.add(made)
        begun, is_whole = self.replays.take(prompt.ids)
        if begun is not None and (is_whole or len(begun.token_ids) >= limit):
            made.done.set_result(begun)
        else:
            made.begun = begun
            self.put(made)
        return made

    def _text(self, ids: Sequence[int]) -> str:
        return self.episode.tokenizer.text(ids)

    def _action(
        self,
        prompt: RecordedPrompt,
        part: PartialCompletion,
        said: str,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> Action:
        """The action of a turn, of whose text `said` counts."""
        unsaid = len(self._text(part.token_ids)) - len(said)
        tokenizer = self.episode.tokenizer
        return tokenizer.action(prompt.ids, part.token_ids, unsaid=unsaid, tools=tools)

    def _end_of(self, part: PartialCompletion, text: str) -> str:
        has_end = part.token_ids[-1] in self.episode.tokenizer.stop_ids
        self.episode.truncated = cut = not has_end and text == self._text(part.token_ids)
        self.episode.cut &= cut
        return "length" if cut else "stop"

    def _log_probs(self, part: PartialCompletion) -> list[dict[str, Any]]:
        entries = []
        for token, log_prob in zip(part.token_ids, part.log_probs, strict=True):
            text = self.episode.tokenizer.spelling([token])
            entry = {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
            entries.append({**entry, "top_logprobs": []})
        return entries

    def _response(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        prompt: RecordedPrompt,
        parts: Sequence[tuple[Hashable, PartialCompletion]],
    ) -> dict[str, Any]:
        asked, sampled = len(prompt.ids), sum(len(part.token_ids) for _, part in parts)
        return {
            "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": MODEL,
            "choices": choices,
            "usage": {
                "prompt_tokens": asked,
                "completion_tokens": sampled,
                "total_tokens": asked + sampled,
            },
        }


def _choice(index: int, reason: str, log_probs: object, **said: object) -> dict[str, Any]:
    return {"index": index, **said, "finish_reason": reason, "logprobs": log_probs}


def _message(action: Action, turn: int) -> dict[str, Any]:
    """What a client is given of a turn: thoughts apart, then text, then calls of tools."""
    said = action.text if action.content is None else action.content
    if action.malformed and not action.tool_calls:
        said = action.text  # as the policy wrote it: the client sees what can't be read
    thought, rest = split_thought(said)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": rest.lstrip("\n") if thought else said,
    }
    if thought := bare_thought(thought):
        message["reasoning_content"] = thought
    if action.tool_calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": f"c{turn:05d}{i:03d}",  # nine characters, as Mistral's template wants
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for i, call in enumerate(action.tool_calls)
        ]
    return message


def _until_stop(
    text_of: Callable[[Sequence[int]], str], part: PartialCompletion, stops: Sequence[str]
) -> tuple[PartialCompletion, str]:
    """A turn up to the token that completes the first of `stops`, and its text before that."""
    text = text_of(part.token_ids)
    ends = [(at, at + len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return part, text
    start, end = min(ends)
    count = 1 + bisect_left(
        range(1, len(part.token_ids) + 1), end, key=lambda n: len(text_of(part.token_ids[:n]))
    )
    ids, log_probs = part.token_ids[:count], part.log_probs[:count]
    return PartialCompletion(0, ids, log_probs, part.token_versions[:count]), text[:start]


def _events(answer: Mapping[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
    """An answer as the events of a stream, each choice in one piece."""
    chat = answer["object"] == "chat.completion"
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in answer["choices"]:
        place = {"index": choice["index"]}
        if chat:
            delta = dict(choice["message"])
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            pieces: list[dict[str, Any]] = [{"delta": delta}, {"delta": {}}]
        else:
            pieces = [{"text": choice["text"]}, {"text": ""}]
        first = {**place, **pieces[0], "finish_reason": None, "logprobs": choice["logprobs"]}
        last = {**place, **pieces[1], "finish_reason": choice["finish_reason"], "logprobs": None}
        yield from (head | {"choices": [one]} for one in (first, last))
    if with_usage:
        yield head | {"choices": [], "usage": answer["usage"]}


def _ended() -> RequestError:
    return RequestError("the episode of this API key has ended", 410)


class RecordingEndpoint:
    """An HTTP server on a loopback port, in a thread with an event loop."""

    def __init__(self) -> None:
        self.late_calls = 0  # of clients whose episode had ended
        self._sessions: dict[str, EpisodeSession] = {}
        self._prefix = f"episode-{secrets.token_hex(6)}-"  # of the keys that were ever given
        self._loop: asyncio.AbstractEventLoop | None = None  # since the first request
        raise_file_limit()
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        refused = dict.fromkeys((EngineError, HTTPException, ClientDisconnect, Exception), _refuse)
        app = Starlette(routes=routes, exception_handlers=refused)
        listener = http_server.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self._server = http_server.HttpServer(app, listener, _HTTP)
        self._server.start()

    def open(self, session: EpisodeSession) -> str:
        """Serve an episode; return its API key."""
        key = self._prefix + secrets.token_urlsafe(12)
        self._sessions[key] = session
        return key

    def close_session(self, key: str) -> None:
        """Take no more requests of an episode, which has all that was recorded from now on."""
        if (session := self._sessions.pop(key, None)) is not None:
            self.call(session.close)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function where the sessions live; here, as long as nobody has asked anything."""
        if self._loop is None:
            return function()

        async def called() -> T:
            return function()

        future: Future[T] = asyncio.run_coroutine_threadsafe(called(), self._loop)
        return future.result()

    def resolve(
        self, answers: Sequence[tuple[PolicyRequest, PartialCompletion | EngineError]]
    ) -> None:
        """Give requests the turns that were sampled for them, or why there is none."""

        def resolved() -> None:
            for request, part in answers:
                if request.done.done():  # nobody waits for it
                    continue
                if isinstance(part, EngineError):
                    request.done.set_exception(part)
                else:
                    request.done.set_result(part)

        if answers:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(resolved)

    def close(self) -> None:
        """Answer nothing more, and end the thread."""
        self._server.stop()

    def _session(self, http: Request) -> EpisodeSession:
        """The session of a request's API key."""
        self._loop = self._loop or asyncio.get_running_loop()
        key = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if (session := self._sessions.get(key)) is not None and not session.closed:
            return session
        if key.startswith(self._prefix):
            self.late_calls += 1
            raise _ended()
        raise RequestError("the API key is that of no episode", 401)

    async def _models(self, http: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridflyte"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, http: Request) -> Response:
        session = self._session(http)
        return await self._answer(http, session, ChatRequest, session.chat)

    async def _completion(self, http: Request) -> Response:
        session = self._session(http)
        return await self._answer(http, session, CompletionRequest, session.completion)

    async def _answer(
        self,
        http: Request,
        session: EpisodeSession,
        kind: type[ChatRequest] | type[CompletionRequest],
        answer: Callable[[Any], Coroutine[Any, Any, dict[str, Any]]],
    ) -> Response:
        try:
            request = _parsed(kind, await http_server.read_body(http, _HTTP))
            answered = await http_server.unless_gone(http, answer(request))
        except EngineError:
            session.refused += 1
            raise
        if not request.stream:
            return _json(answered)
        usage = request.stream_options is not None and request.stream_options.include_usage
        data = "".join(map(schema.sse, (*_events(answered, usage), "[DONE]")))
        return Response(data, headers={"content-type": "text/event-stream"})


def _parsed(kind: type[ChatRequest] | type[CompletionRequest], body: bytearray) -> Any:
    """Read a request; RequestError for what is wrong or not offered."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None
    if isinstance(values, dict):
        values["model"] = MODEL
    request = schema.parse(kind, values, MODEL, _LIMITS, _NOT_OFFERED, instead="")
    _say_whose_sampling(request)
    return request


async def _refuse(http: Request, error: Exception) -> Response:
    """An error in OpenAI's form; clients try again only what may go better then."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_HUNG_UP)
    known = isinstance(error, EngineError | HTTPException)
    status = getattr(error, "status_code", 500) if not isinstance(error, EngineError) else 400
    status = getattr(error, "status", status)
    message = str(error) if known else f"the endpoint failed: {error!r}"
    body: dict[str, Any] = schema.error_body(message, status)
    if isinstance(error, LimitReached):
        tokens = error.end == "tokens"
        body["error"]["code"] = "context_length_exceeded" if tokens else f"episode_{error.end}"
    return _json(body, status)


def _json(values: object, status: int = 200) -> Response:
    return Response(json.dumps(values), status, media_type="application/json")
