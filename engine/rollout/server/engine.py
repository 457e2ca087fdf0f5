"""The rollout engine `server`: inference servers that were started elsewhere, over HTTP.

A rollout is split into requests, and their answers are put together again. Nothing is returned
unless the server that gave it said before and after that it serves the weights that were delivered.
`servers` settles which server is asked, `api` writes requests and reads answers, and `weights`
delivers weights. A comparison of log-probs with the trainer's model finds what no version tag can:
a server of another model, log-probs of another distribution, or half of the new weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import Tensor, nn

from engine.config import RolloutConfig, ServerConfig
from engine.config.text import validated
from engine.errors import ConfigError, DivergedRolloutError, RolloutError
from engine.rollout import protocol, stream, trainer_model
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.sampling import noise_keys
from engine.rollout.server.api import CompletionRequest, SampledCompletion, check_token_ids
from engine.rollout.server.servers import Server, Servers
from engine.rollout.server.weights import check_hook


def check_rollout(config: RolloutConfig) -> None:
    """Raise ConfigError for settings of a run that don't go together with a server."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={config.tensor_parallel_size} with "
            "rollout.engine=server: how many devices the server decodes on is settled where it is "
            "started; leave it at 1"
        )
    server = config.server
    check_settings(server)
    if server.weights == "none" and not server.allow_fixed_policy:
        raise ConfigError(
            "rollout.server.weights=none leaves the server at the policy that it was started with, "
            "while training moves the trainer's; choose a hook that brings it new weights, or set "
            "rollout.server.allow_fixed_policy=true to sample from the old ones"
        )


def check_settings(settings: ServerConfig) -> None:
    """Raise ConfigError for what is missing, unknown or contradicts another setting."""
    if not settings.addresses:
        raise ConfigError(
            "rollout.engine=server needs rollout.server.url, such as http://127.0.0.1:8000, or "
            "several addresses in rollout.server.urls"
        )
    if settings.url and settings.urls:
        raise ConfigError(
            f"rollout.server.url={settings.url} with rollout.server.urls; put it among the urls"
        )
    for name in ("reload_url", "version_url"):
        value = getattr(settings, name)
        if len(settings.urls) > 1 and "://" in value:
            raise ConfigError(
                f"rollout.server.{name}={value} is one address, and rollout.server.urls names "
                f"{len(settings.urls)} servers; give a path, which is asked of each"
            )
    check_hook(settings.weights)
    if settings.weights == "folder" and not settings.reload_url:
        raise ConfigError(
            "rollout.server.weights=folder needs rollout.server.reload_url, which has to load "
            "a folder; or set weights=vllm, or none"
        )
    for name, weights in (("reload_url", "folder"), ("allow_fixed_policy", "none")):
        value = getattr(settings, name)
        if value and settings.weights != weights:
            raise ConfigError(
                f"rollout.server.{name}={value} has no effect with weights={settings.weights}; "
                f"remove it, or set rollout.server.weights={weights}"
            )


_PROBE_TOKENS = 16
_PROBE_PARAMS = SamplingParams(temperature=0.7)  # other than 1, so that raw log-probs show


def check_log_probs(
    model: nn.Module, request: CompletionRequest, drawn: SampledCompletion, tolerance: float
) -> None:
    """Raise RolloutError if `drawn`'s log-probs are `tolerance` or more from `model`'s, on average.

    A model whose own log-probs are not finite passes: decoding reports that.
    """
    tokens, server_log_probs = torch.tensor(drawn.token_ids), torch.tensor(drawn.log_probs)
    ids = torch.tensor([*request.prompt, *drawn.token_ids])
    ids = ids.to(trainer_model.embedding_weight(model).device)
    with torch.no_grad(), trainer_model.eval_mode(model):
        logits = model(input_ids=ids[None]).logits[0, len(request.prompt) - 1 : -1].float().cpu()

    def log_probs_of(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    log_probs = log_probs_of(logits / request.params.temperature)
    distance = float((server_log_probs - log_probs).abs().mean())
    if not bool(log_probs.isfinite().all()) or distance < tolerance:
        return
    if float((server_log_probs - log_probs_of(logits)).abs().mean()) < tolerance:
        raise RolloutError(
            "the rollout server's log-probs are those of the model before temperature, top-k and "
            "top-p, not those that tokens were drawn with; start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    raise RolloutError(
        f"the rollout server's log-probs are {distance:.3f} from the policy's on average over "
        f"{len(tokens)} tokens: it serves another model or other weights; start it with "
        f"the policy's folder, or raise rollout.server.probe_tolerance={tolerance:g}"
    )


Answer = tuple[Server, list[SampledCompletion]]


@protocol.register_engine(
    "server",
    protocol.EngineCapabilities(
        streams=True,
        streams_experts=True,
        remote=True,
        adapters=True,
        settings=frozenset({"server", "enable_rollout_routing_replay"}),
    ),
    options=lambda config: dict(config.server, routed_experts=config.enable_rollout_routing_replay),
    check=check_rollout,
)
class ServerEngine:
    """Rollouts by one or more servers.

    >>> engine = ServerEngine(model, url="http://127.0.0.1:8000", weights="vllm")
    >>> engine.generate([[5, 6, 7]], SamplingParams(n=8, max_new_tokens=64))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int = 512,
        max_model_len: int | None = None,
        kv_cache_memory_mb: int | None = None,
        seed: int = 0,
        routed_experts: bool = False,
        **options: object,
    ) -> None:
        """Connect to the servers and deliver `model`'s weights, unless they are fixed.

        `options` are `ServerConfig`'s. Ranks of a process group (torch.distributed) create
        the engine, and update it, together: rank 0 delivers the weights, each has its own rollouts.
        `max_num_seqs` and `kv_cache_memory_mb`, options of all engines, are the server's own
        matter. `seed` is added to that of each request. `routed_experts`: completions have the
        experts that servers return. Raises ConfigError for bad options and a server with a shorter
        context, RolloutError for one that lacks what its hook needs or serves another model, and
        where none is there.
        """
        settings = validated(ServerConfig, options, "rollout.server: ")
        check_settings(settings)
        context = trainer_model.context_length(model)
        self._max_model_len = protocol.resolve_max_model_len(max_model_len, context)
        self._vocabulary = int(trainer_model.text_config(model).vocab_size)
        self._settings, self._seed, self._model = settings, seed, model
        self._routed_layers = list(trainer_model.routers(model)) if routed_experts else []
        self._guard = protocol.WeightGuard("server")
        with ExitStack() as undo:
            self._servers = Servers(settings)
            undo.callback(self._servers.close)
            self._servers.check(self._max_model_len)
            self._deliver(model, version=0)
            undo.pop_all()

    @property
    def policy_version(self) -> int:
        return self._guard.version

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Deliver `model`'s weights as policy `version`; the servers serve them on return.

        None: the last model's numbers have changed. One of several servers that doesn't take them
        is left out. With `weights=none` the version stays, and RolloutError says so unless that is
        allowed.
        """
        self._model = self._model if model is None else model
        if not self._servers.fixed:
            self._deliver(self._model, version)
        elif version > self._guard.version:
            self._servers.all[0].hook.deliver((), self._model, version)

    def _deliver(self, model: nn.Module, version: int) -> None:
        with self._guard.updating(version):
            if not self._servers.fixed:
                self._servers.deliver(model, version)
                # A server may name its model by the version.
                self._servers.run(self._servers.describe, "asking for its model")
            if self._settings.probe_tolerance:
                self._probe(model, first=version == 0)

    def _probe(self, model: nn.Module, first: bool) -> None:
        """Compare servers' log-probs with the model's; of several, leave out one that differs."""
        prompt = [self._vocabulary * share // 8 for share in (1, 3, 5, 7)]
        prompt = prompt[: self._max_model_len - 1]
        limit = min(_PROBE_TOKENS, self._max_model_len - len(prompt))
        request = CompletionRequest(0, prompt, 0, 1, limit, 1, _PROBE_PARAMS)
        for server in self._servers.serving:
            try:
                [drawn] = self._servers.run(partial(server.api.sample, request), "a probe")
                check_token_ids(drawn.token_ids, self._vocabulary)
                check_log_probs(model, request, drawn, self._settings.probe_tolerance)
            except RolloutError as error:
                if first or self._servers.on_ranks:
                    raise
                server.wrong = True
                self._servers.lose(server, error)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Return `n` completions a prompt, in order; `on_progress` gets the number finished so far.

        It is called in another thread. A completion ends at a stop token, at `max_new_tokens`, or
        at `max_model_len`. Raises RolloutError for a bad request, NaN logits, a server that fails
        or does not end within `timeout_s`, and one whose weights are not those that were
        delivered, at the beginning or at the end. Of several servers, what one that fails was
        asked for is sampled by the others; the last one's failure is raised.
        """
        self.check(prompts, params)
        if not prompts:
            return []
        requests: list[CompletionRequest] = []
        for index, prompt in enumerate(prompts):
            requests += self.requests(index, params.first_prompt + index, prompt, params)
        answers = self._servers.run(lambda: self._rollout(requests, on_progress), "a rollout")
        return [
            self.completion(drawn, request)
            for number, request in enumerate(requests)
            for drawn in answers[number][1]
        ]

    def stream(
        self,
        params: SamplingParams,
        *,
        max_num_seqs: int | None = None,
        longest_prompt: int | None = None,
        keep_prefixes: bool = False,
    ) -> ServerStream:
        """Open a stream: requests are added while others are answered.

        An update waits until what was sent is answered. `max_num_seqs` and `keep_prefixes` are the
        servers' own matter, and `longest_prompt` is checked prompt by prompt. Raises RolloutError
        for bad parameters.
        """
        protocol.check_params(params)
        return ServerStream(self, self._servers, params, self._settings)

    def close(self) -> None:
        """Drop the connections; the servers keep running. Safe to call twice."""
        self._guard.refuse("it was closed")
        self._servers.close()

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Raise RolloutError where nothing may be sampled, and for what can't be completed."""
        self._guard.check()
        protocol.check_request(prompts, params, self._max_model_len, self._vocabulary)

    def requests(
        self, index: int, number: int, prompt: Sequence[int], params: SamplingParams
    ) -> list[CompletionRequest]:
        """Split a prompt's completions into requests; `number` and the first one make each seed."""
        # vLLM refuses several greedy completions in one request.
        size = self._settings.completions_per_request if params.temperature > 0 else 1
        firsts = torch.arange(0, params.n, size)
        keys = noise_keys(params.seed + self._seed, torch.full_like(firsts, number), firsts)
        limit = min(params.max_new_tokens, self._max_model_len - len(prompt))
        return [
            CompletionRequest(
                index, prompt, first, min(size, params.n - first), limit, key & (2**63 - 1), params
            )
            for first, key in zip(firsts.tolist(), keys.tolist(), strict=True)
        ]

    def completion(self, drawn: SampledCompletion, request: CompletionRequest) -> Completion:
        """Cut at the first stop token; refuse what is no whole completion."""
        stops, index = request.params.stop_token_ids, request.index
        length = next((i + 1 for i, t in enumerate(drawn.token_ids) if t in stops), None)
        tokens, log_probs = drawn.token_ids[:length], drawn.log_probs[:length]
        if any(map(math.isnan, log_probs)):
            raise DivergedRolloutError(
                f"the model gave NaN logits for a completion of prompt {index}; its weights have "
                f"diverged: go back to a checkpoint and lower the learning rate"
            )
        check_token_ids(tokens, self._vocabulary)
        if length is None and len(tokens) != request.max_new_tokens:
            raise RolloutError(
                f"the rollout server ended a completion of prompt {index} after {len(tokens)} of "
                f"{request.max_new_tokens} tokens ({drawn.reason!r}) and on no token of "
                f"stop_token_ids={list(stops)}: it was interrupted or has end tokens of its own; "
                f"start vLLM with --generation-config vllm, or add them to the tokenizer"
            )
        reason = "length" if length is None else "stop"
        layers, read = self._routed_layers, len(request.prompt) + len(tokens) - 1
        experts = trainer_model.chosen_experts(drawn.routed_experts, layers, read)
        return Completion(index, tokens, log_probs, reason, self.policy_version, None, experts)

    async def _rollout(
        self, requests: list[CompletionRequest], on_progress: Callable[[int], None] | None
    ) -> dict[int, Answer]:
        """Return all answers; requests to a server that is lost before the end are sent again."""
        await self._servers.check_served("begins")
        answers: dict[int, Answer] = {}
        while len(answers) < len(requests):
            await self._ask(requests, answers, on_progress)
            await self._servers.check_served("ends")
            answers = {number: answer for number, answer in answers.items() if not answer[0].out}
        return answers

    async def _ask(
        self,
        requests: list[CompletionRequest],
        answers: dict[int, Answer],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        """Fill in the answers that are missing; the first failure ends the others."""
        turns = asyncio.Semaphore(self._settings.concurrency * len(self._servers.serving))
        finished = sum(requests[number].count for number in answers)

        async def ask(number: int) -> None:
            nonlocal finished
            async with turns:
                answers[number] = await self._servers.sample(requests[number])
            finished += requests[number].count
            if on_progress is not None:
                on_progress(finished)

        missing = [number for number in range(len(requests)) if number not in answers]
        try:
            async with asyncio.TaskGroup() as group:
                for number in missing:
                    group.create_task(ask(number))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None


_STEP_S = 0.02  # that a step of a stream waits for an answer


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a prompt's completions."""

    key: Hashable
    unfinished: frozenset[int]  # indices of those that are returned
    request: CompletionRequest
    sent: float = 0.0  # when


class ServerStream(stream.RolloutStream):
    """A stream that `ServerEngine.stream` makes: requests are sent while others are added."""

    def __init__(
        self, engine: ServerEngine, servers: Servers, params: SamplingParams, settings: ServerConfig
    ) -> None:
        self._engine, self._servers, self._params = engine, servers, params
        self._settings = settings
        self._queue: deque[_Part] = deque()  # not sent yet
        self._sent: dict[Future[Answer], _Part] = {}
        self._answers: SimpleQueue[Future[Answer]] = SimpleQueue()  # filled by the loop's thread
        self._answered: list[stream.StreamedCompletion] = []  # answered, not returned
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
        per_server = self._settings.concurrency * self._settings.completions_per_request
        return per_server * len(self._servers.serving)

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        resume: stream.PartialRequest | None = None,
        *,
        max_new_tokens: int | None = None,
        after: Hashable | None = None,
    ) -> None:
        """Queue completions; those that `resume` left unfinished are sampled from their beginning.

        Servers find by themselves what they have of a prompt, whatever `after` says.
        """
        self._check_open()
        stream.check_unused(key, {part.key for part in (*self._queue, *self._sent.values())})
        indices = frozenset(range(self._params.n))
        if resume is not None:
            indices = frozenset(part.completion_index for part in resume.completions)
        limit = stream.request_limit(max_new_tokens, self._params.max_new_tokens, key)
        params = replace(self._params, max_new_tokens=limit)
        number, prompt = stream.noise_index(key), list(prompt_ids)
        self._engine.check([prompt], params)
        for request in self._engine.requests(self._submitted, number, prompt, params):
            # A request is sent in full: its completions share one seed.
            unfinished = indices.intersection(range(request.first, request.first + request.count))
            if unfinished:
                self._queue.append(_Part(key, unfinished, request))
        self._submitted += 1
        self._send()

    def step(self) -> list[stream.StreamedCompletion]:
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
        self._engine.update_weights(model, version)
        self._send()

    def partials(self) -> list[stream.PartialRequest]:
        """Return all that is unfinished, without tokens: no server tells what it has so far."""
        self._check_open()
        partials: dict[Hashable, stream.PartialRequest] = {}
        parts = sorted((*self._sent.values(), *self._queue), key=lambda part: part.request.index)
        for part in parts:
            empty = stream.PartialRequest(part.key, list(part.request.prompt), [])
            partials.setdefault(part.key, empty).completions.extend(
                stream.PartialCompletion(index, [], [], []) for index in sorted(part.unfinished)
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
            completions = [self._engine.completion(row, part.request) for row in drawn]
        except Exception:
            self._queue.appendleft(part)  # not lost: a later step asks again
            raise
        for index, completion in enumerate(completions, part.request.first):
            if index in part.unfinished:
                completed = replace(completion, token_versions=completion.versions)
                self._answered.append(stream.StreamedCompletion(part.key, index, completed))

    def _check_deadline(self) -> None:
        oldest = min((part.sent for part in self._sent.values()), default=time.monotonic())
        if time.monotonic() - oldest > self._settings.timeout_s:
            names = ", ".join(server.client.url for server in self._servers.serving)
            raise RolloutError(
                f"a request to the rollout servers ({names}) was not answered within "
                f"rollout.server.timeout_s={self._settings.timeout_s:g}; look at their logs, or "
                "raise the deadline"
            )
