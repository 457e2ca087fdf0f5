"""A stream over rollout servers: requests are sent and answered while others are added.

The servers themselves are in `servers`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import nn

from engine.config.rollout_engines import ServerConfig
from engine.errors import RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.server.api import CompletionRequest, SampledCompletion
from engine.rollout.server.servers import Server, Servers
from engine.rollout.stream import (
    PartialCompletion,
    PartialRequest,
    RolloutStream,
    StreamedCompletion,
    check_unused,
    noise_index,
    request_limit,
)

_STEP_S = 0.02  # that a step waits for an answer


class Engine(Protocol):
    """What a stream needs of `ServerEngine`."""

    @property
    def policy_version(self) -> int: ...

    def serve_again(self, model: nn.Module | None, version: int) -> None: ...

    def stream_requests(
        self, number: int, prompt: Sequence[int], params: SamplingParams
    ) -> list[tuple[int, int, CompletionRequest]]: ...

    def completion(
        self, index: int, drawn: SampledCompletion, request: CompletionRequest
    ) -> Completion: ...


@dataclass(slots=True, eq=False)
class _Request:
    """A part of a prompt's completions."""

    key: Hashable
    number: int  # of its prompt among those of this stream
    prompt: list[int]
    first: int  # index of its first completion
    unfinished: frozenset[int]  # indices of those that are returned
    request: CompletionRequest
    sent: float = 0.0  # when


Answer = tuple[Server, list[SampledCompletion]]


class ServerStream(RolloutStream):
    """A stream that `ServerEngine.stream` makes."""

    def __init__(
        self, engine: Engine, servers: Servers, params: SamplingParams, settings: ServerConfig
    ) -> None:
        self._engine, self._servers, self._params = engine, servers, params
        self._settings = settings
        self._queue: deque[_Request] = deque()  # not sent yet
        self._sent: dict[Future[Answer], _Request] = {}
        self._answers: SimpleQueue[Future[Answer]] = SimpleQueue()  # filled by the loop's thread
        self._answered: list[StreamedCompletion] = []  # answered, not returned
        self._submitted = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def in_flight(self) -> int:
        """Completions requested of a server, and answered ones that `step` returns next."""
        return sum(part.request.count for part in self._sent.values()) + len(self._answered)

    @property
    def waiting(self) -> int:
        """Completions that were not requested of a server yet."""
        return sum(part.request.count for part in self._queue)

    @property
    def room(self) -> int:
        """Completions that can be requested of the servers at once."""
        per_server = self._settings.concurrency * self._servers.all[0].api.max_per_request
        return per_server * len(self._servers.serving)

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        resume: PartialRequest | None = None,
        *,
        max_new_tokens: int | None = None,
        after: Hashable | None = None,
    ) -> None:
        """Queue the `n` completions of a prompt, or those that `resume` left unfinished, which are
        sampled from their beginning. Servers find by themselves what they have of a prompt; `after`
        says nothing to them."""
        self._check_open()
        check_unused(key, {part.key for part in (*self._queue, *self._sent.values())})
        prompt, indices = list(prompt_ids), frozenset(range(self._params.n))
        if resume is not None:
            indices = frozenset(part.completion_index for part in resume.completions)
        limit = request_limit(max_new_tokens, self._params.max_new_tokens, key)
        params = replace(self._params, max_new_tokens=limit)
        requests = self._engine.stream_requests(noise_index(key), prompt, params)
        for _, first, request in requests:
            # A request is sent in full: its completions share one seed.
            unfinished = indices.intersection(range(first, first + request.count))
            if unfinished:
                part = _Request(key, self._submitted, prompt, first, unfinished, request)
                self._queue.append(part)
        self._submitted += 1
        self._send()

    def step(self) -> list[StreamedCompletion]:
        """Send what there is room for; return the answers, after a moment at most."""
        self._check_open()
        self._send()
        self._collect(_STEP_S)
        self._send()
        answered, self._answered = self._answered, []
        return answered

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Wait for the answers to all that was sent, then serve `model`'s weights.

        None: the numbers of the served model have changed. RolloutError where answers don't come
        within `timeout_s`, and as `ServerEngine.update_weights`.
        """
        self._check_open()
        while self._sent:
            self._collect(_STEP_S)
        self._engine.serve_again(model, version)
        self._send()

    def partials(self) -> list[PartialRequest]:
        """Return all that is unfinished, without tokens: no server tells what it has so far."""
        self._check_open()
        partials: dict[Hashable, PartialRequest] = {}
        parts = sorted((*self._sent.values(), *self._queue), key=lambda part: part.number)
        for part in parts:
            partial = partials.setdefault(part.key, PartialRequest(part.key, part.prompt, []))
            partial.completions.extend(
                PartialCompletion(index, [], [], []) for index in sorted(part.unfinished)
            )
        return list(partials.values())

    def close(self) -> None:
        self._closed = True
        self._queue.clear()
        for future in self._sent:
            future.cancel()
        self._sent.clear()
        self._answered = []

    def _send(self) -> None:
        """Ask for what is queued, `concurrency` requests a server at most."""
        limit = self._settings.concurrency * len(self._servers.serving)
        while self._queue and len(self._sent) < limit:
            part = self._queue.popleft()
            part.sent = time.monotonic()
            client = self._servers.all[0].client
            future = client.start(self._servers.sample(part.request, verify=True))
            self._sent[future] = part
            future.add_done_callback(self._answers.put)

    def _collect(self, seconds: float) -> None:
        """Take what was answered; wait `seconds` for a first answer."""
        try:
            self._take(self._answers.get(timeout=seconds))
            while True:
                self._take(self._answers.get_nowait())
        except Empty:
            self._check_deadline()

    def _take(self, future: Future[Answer]) -> None:
        part = self._sent.pop(future, None)
        if part is None:
            return
        try:
            _, drawn = future.result()
            completions = [self._engine.completion(part.number, d, part.request) for d in drawn]
        except Exception:
            self._queue.appendleft(part)  # not lost: a later step asks again
            raise
        for index, completion in enumerate(completions, part.first):
            if index in part.unfinished:
                versions = [completion.policy_version] * len(completion.token_ids)
                completed = replace(completion, token_versions=versions)
                self._answered.append(StreamedCompletion(part.key, index, completed))

    def _check_deadline(self) -> None:
        oldest = min((part.sent for part in self._sent.values()), default=time.monotonic())
        if time.monotonic() - oldest > self._settings.timeout_s:
            names = ", ".join(server.client.url for server in self._servers.serving)
            raise RolloutError(
                f"a request to the rollout servers ({names}) was not answered within "
                f"rollout.server.timeout_s={self._settings.timeout_s:g}; look at their logs, or "
                "raise the deadline"
            )
