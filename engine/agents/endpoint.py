"""The endpoint that agents talk to during rollout: OpenAI's API, answered by the policy.

Each episode has a key, which the client sends as its API key, and an `EpisodeSession`, which
records what passes. A request becomes `PolicyRequest`s in the session's queue; `agent_player` has
them sampled. Sessions live in the event loop of the endpoint's thread, and only there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
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
from engine.agents.episode import End, Episode, TurnRequest
from engine.agents.recorder import (
    EpisodeRecorder,
    LimitReached,
    RecordedPrompt,
    Replays,
    digest_of_ids,
)
from engine.errors import EngineError, RolloutError
from engine.openai_api import http_server, schema
from engine.openai_api.schema import Answer, Reply, RequestError
from engine.rollout.stream import PartialCompletion

T = TypeVar("T")
log = logging.getLogger(__name__)

MODEL = "policy"  # its name in the API; requests may say any
# Clients are the run's own, and many; their turns take as long as they take.
_HTTP = http_server.HttpLimits(
    max_body_mib=16, header_timeout=60, keep_alive=3600, max_connections=16_384
)
_LIMITS = schema.RequestLimits(max_prompts=1)
_CONCURRENT_REQUESTS = 64  # of one episode; more wait, so that none takes the others' places
_LOOP_S = 120.0  # for the endpoint's loop, which tokenises prompts, to come to a call

# Fields that change an answer, and the values that ask for nothing.
_NOT_OFFERED: dict[str, tuple[object, ...]] = schema.UNCOMMON | {
    "chat_template_kwargs": ({},), "function_call": (),
    "functions": ([],), "modalities": (["text"],), "prediction": (), "top_logprobs": (0,),
    "tool_choice": ("none", "auto"), "web_search_options": (),
}  # fmt: skip


class ChatRequest(schema.ChatRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)  # type: ignore[assignment]
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None


class CompletionRequest(schema.CompletionRequest):
    """The body of `POST /v1/completions`; of one prompt."""

    logprobs: int | None = Field(None, ge=0, le=0)


AgentRequest = ChatRequest | CompletionRequest
_KINDS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


@cache  # once a process
def _log_ignored_field(name: str) -> None:
    log.info(
        "an agent asks for a %s; turns are sampled as rollout.%s says, since what they are learned "
        "from is the distribution that they were drawn from", name, name
    )  # fmt: skip


@dataclass(slots=True, eq=False, kw_only=True)
class PolicyRequest(TurnRequest):
    """A turn for an agent; its key is (group, episode, prompt, seed or number, choice)."""

    session: EpisodeSession
    done: asyncio.Future[PartialCompletion]  # of the endpoint's loop
    abandoned: bool = False  # nobody waits for it any more


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One episode of an agent: its requests, their answers, and how it ended."""

    episode: Episode
    put: Callable[[PolicyRequest], None]  # its requests, and again those that are abandoned
    replays: Replays = field(default_factory=Replays)
    recorder: EpisodeRecorder = field(init=False)
    limit: End | None = None  # the first one that a request was refused for
    closed: bool = False
    refused: int = 0
    abandoned: int = 0
    policy_seconds: float = 0.0  # that it waited for turns
    places: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_CONCURRENT_REQUESTS)
    )
    _waiting_since: float = 0.0  # of time.monotonic
    _open: set[PolicyRequest] = field(default_factory=set)
    _repeats: Counter[bytes] = field(default_factory=Counter)  # of each prompt, by its digest

    def __post_init__(self) -> None:
        self.recorder = EpisodeRecorder(self.episode.tokenizer, self.episode.limits)

    async def answer(self, request: AgentRequest) -> tuple[Reply, list[Answer]]:
        """Continue a conversation, a text or token ids, and record the turns."""
        if isinstance(request, ChatRequest):
            if request.continue_final_message:
                raise RequestError("continue_final_message=True is not offered; leave it out")
            choice = (request.model_extra or {}).get("tool_choice")
            tools = request.tools if request.tools and choice != "none" else ()
            prompt = self.recorder.chat(request.messages, tools)
        elif len(request.prompts) != 1:
            raise RequestError("prompt: give a text or token ids")
        else:
            prompt = self.recorder.completion(request.prompts[0])
        turns = await self._sample(prompt, request)
        answers = [self._record(prompt, request, key, sampled) for key, sampled in turns]
        return Reply(request, MODEL, len(prompt.ids)), answers

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
            reason = "the agent ended without a turn of the policy" if error is None else str(error)
            episode.fail(reason, failure_reward)

    async def _sample(
        self, prompt: RecordedPrompt, request: AgentRequest
    ) -> list[tuple[Hashable, PartialCompletion]]:
        """Have the choices of a request sampled; their keys and tokens."""
        if self.closed:  # while its body came
            raise _ended()
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
        limit, digest = min(room, request.longest or room), digest_of_ids(prompt.ids)
        draw = self._repeats[digest] if request.seed is None else f"seed {request.seed}"
        self._repeats[digest] += 1
        if not self._open:
            self._waiting_since = time.monotonic()
        turns = [
            self._submit(prompt, (digest.hex(), draw, choice), limit, tuple(request.stops))
            for choice in range(count)
        ]
        try:
            parts = await asyncio.gather(*(turn.done for turn in turns))
            if self.closed:  # what was recorded is the episode's
                raise _ended()
            self.episode.cut = any(turn.late for turn in turns)
        except asyncio.CancelledError:
            for turn in turns:
                turn.abandoned = True
                self.put(turn)
            if self.closed:
                raise _ended() from None
            self.abandoned += 1
            raise
        finally:
            self._open -= set(turns)
            if not self._open:
                self.policy_seconds += time.monotonic() - self._waiting_since
        return [(turn.key, part) for turn, part in zip(turns, parts, strict=True)]

    def _submit(
        self, prompt: RecordedPrompt, key: tuple[object, ...], limit: int, stops: tuple[str, ...]
    ) -> PolicyRequest:
        """A turn, which the player has from now on unless it was recorded before."""
        episode, parent = self.episode, prompt.parent
        turn = PolicyRequest(
            session=self,
            key=(episode.key, episode.index, *key),
            prompt_ids=prompt.ids,
            max_new_tokens=limit,
            after=parent.key if parent is not None else None,
            stops=stops,
            done=asyncio.get_running_loop().create_future(),
        )
        self._open.add(turn)
        saved, is_whole = self.replays.take(prompt.ids)
        if saved is not None and (is_whole or len(saved.token_ids) >= limit):
            turn.done.set_result(saved)
        else:
            turn.partial = saved
            self.put(turn)
        return turn

    def _record(
        self,
        prompt: RecordedPrompt,
        request: AgentRequest,
        key: Hashable,
        sampled: PartialCompletion,
    ) -> Answer:
        """Record a turn; return what the client is given of it."""
        tokenizer = self.episode.tokenizer
        part, text = until_stop(tokenizer.text, sampled, request.stops)
        unread = len(tokenizer.text(part.token_ids)) - len(text)
        action = tokenizer.action(prompt.ids, part.token_ids, unread=unread, tools=prompt.tools)
        message = None
        if isinstance(request, ChatRequest):
            if request.parallel_tool_calls is False:
                action = replace(action, tool_calls=action.tool_calls[:1])
            message = assistant_message(action, len(self.recorder.turns))
        self.recorder.add(prompt, part, action, message, key)
        cut = not unread and part.token_ids[-1] not in tokenizer.stop_ids
        self.episode.truncated = cut
        self.episode.cut &= cut
        reason = "length" if cut else "tool_calls" if "tool_calls" in (message or ()) else "stop"
        log_probs = self._log_probs(request, part)
        return Answer(text, len(part.token_ids), reason, message, log_probs)

    def _log_probs(
        self, request: AgentRequest, part: PartialCompletion
    ) -> dict[str, object] | None:
        """The `logprobs` of a choice, where the request asks for them."""
        texts = [self.episode.tokenizer.spelling([token]) for token in part.token_ids]
        if isinstance(request, CompletionRequest):
            columns: dict[str, object] = {"tokens": texts, "token_logprobs": part.log_probs}
            return columns if request.logprobs is not None else None
        entries = [
            {"token": text, "logprob": p, "bytes": list(text.encode()), "top_logprobs": []}
            for text, p in zip(texts, part.log_probs, strict=True)
        ]
        return {"content": entries} if request.logprobs else None


def assistant_message(action: Action, turn: int) -> dict[str, object]:
    """What a client is given of a turn: thoughts apart, then text, then calls of tools."""
    content = action.text if action.content is None else action.content
    if action.malformed and not action.tool_calls:
        content = action.text  # as the policy wrote it: the client sees what can't be read
    thought, rest = split_thought(content)
    content = rest.lstrip("\n") if thought else content
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought := bare_thought(thought):
        message["reasoning_content"] = thought
    if action.tool_calls:
        message["content"] = content or None
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


def until_stop(
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
        routes = [Route(path, self._complete, methods=["POST"]) for path in _KINDS]
        routes.append(Route("/v1/models", self._models))
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
        """Call a function where the sessions live; here, as long as nobody has asked anything.

        Raises RolloutError where the endpoint's thread doesn't come to it.
        """
        if self._loop is None:
            return function()

        async def called() -> T:
            return function()

        future: Future[T] = asyncio.run_coroutine_threadsafe(called(), self._loop)
        try:
            return future.result(_LOOP_S)
        except TimeoutError:
            raise RolloutError(
                f"the agents' endpoint has not come to a call within {_LOOP_S:g} s: its thread "
                "ended, or is held up by a chat template or a parser of calls"
            ) from None

    def resolve(
        self, answers: Sequence[tuple[TurnRequest, PartialCompletion | EngineError]]
    ) -> None:
        """Give requests the turns that were sampled for them, or why there is none."""

        def resolved() -> None:
            for request, part in answers:
                assert isinstance(request, PolicyRequest)
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
        return http_server.json_response({"object": "list", "data": [model]})

    async def _complete(self, http: Request) -> Response:
        session = self._session(http)
        try:
            body = await http_server.read_body(http, _HTTP)
            request = _parsed(http.scope["path"], body)
            async with session.places:
                answered = session.answer(request)
                reply, answers = await http_server.unless_gone(http, answered)
        except EngineError:
            session.refused += 1
            raise
        if not request.stream:
            return http_server.json_response(reply.whole(answers))
        events = [event for i, answer in enumerate(answers) for event in reply.events(i, answer)]
        if last := reply.last_event(answers):
            events.append(last)
        data = "".join(map(schema.sse, (*events, "[DONE]")))
        return Response(data, headers={"content-type": "text/event-stream"})


def _parsed(path: str, body: bytearray) -> AgentRequest:
    """Read a request; RequestError for what is wrong or not offered."""
    values = schema.read_json(body)
    if isinstance(values, dict):
        values["model"] = MODEL
    request = schema.parse(_KINDS[path], values, MODEL, _LIMITS, _NOT_OFFERED, instead="")
    for name in ("temperature", "top_p", "top_k"):
        if getattr(request, name) is not None:
            _log_ignored_field(name)
    return request


async def _refuse(http: Request, error: Exception) -> Response:
    """An error in OpenAI's form; clients try again only what may go better then."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nginx's; nobody reads it
    if isinstance(error, EngineError):
        message, status = str(error), getattr(error, "status", 400)
    elif isinstance(error, HTTPException):
        message, status = str(error), error.status_code
    else:
        message, status = f"the endpoint failed: {error!r}", 500
    body: dict[str, Any] = schema.error_body(message, status)
    if isinstance(error, LimitReached):
        tokens = error.end == "tokens"
        body["error"]["code"] = "context_length_exceeded" if tokens else f"episode_{error.end}"
    return http_server.json_response(body, status)
