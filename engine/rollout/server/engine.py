"""The rollout engine `server`: inference servers started by somebody else, over HTTP.

A rollout is split into requests, and their answers are put together again. Nothing is returned
unless the server that gave it said before and after that it serves the weights that were delivered.
Which server is asked is settled in `servers.py`; requests are written and answers read by
`openai_api.py` and `tgi_api.py`, weights are delivered by `weights.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from engine.config.parse import explain
from engine.config.server import ServerConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import (
    Completion,
    EngineCapabilities,
    SamplingParams,
    register_engine,
)
from engine.rollout.requests import (
    RolloutStats,
    WeightGuard,
    check_params,
    check_request,
    resolve_max_model_len,
)
from engine.rollout.server.api import CompletionRequest, SampledCompletion, check_token_ids
from engine.rollout.server.completions import split_requests, whole_completion
from engine.rollout.server.log_prob_probe import check_log_probs, probe_request
from engine.rollout.server.servers import Server, Servers
from engine.rollout.server.settings import check_rollout, check_settings
from engine.rollout.server.stream import ServerStream
from engine.rollout.server.weights import RankZeroDelivery

Answers = dict[int, tuple[Server, list[SampledCompletion]]]  # by number of request


@register_engine(
    "server",
    EngineCapabilities(streams=True, remote=True, adapters=True, settings=frozenset({"server"})),
    options=lambda config: dict(config.server),
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
        **options: object,
    ) -> None:
        """Connect to the servers and deliver `model`'s weights, unless they are fixed.

        `options` are `ServerConfig`'s. Ranks of a process group (torch.distributed) create
        the engine, and update it, together: rank 0 delivers the weights, each has its own rollouts.
        `max_num_seqs` and `kv_cache_memory_mb` are accepted, as all engines have the same options,
        and not used: the server was started with its own. `seed` is added to that
        of each request. Raises ConfigError for bad options and a server with a shorter context,
        RolloutError for one that lacks what its hook needs or serves another model, and where none
        is there.
        """
        try:
            settings = ServerConfig.model_validate(options)
        except ValidationError as error:
            raise ConfigError(f"rollout.server: {explain(error)}") from None
        check_settings(settings)
        config: Any = model.config
        config = config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        self._max_model_len = resolve_max_model_len(max_model_len, context)
        self._vocabulary = int(config.vocab_size)
        self._settings, self._seed, self._model = settings, seed, model
        self.stats = RolloutStats()
        self._guard = WeightGuard("server")
        with ExitStack() as undo:
            self._servers = Servers(settings, model)
            undo.callback(self._servers.close)
            self._servers.check(self._max_model_len)
            self._delivery = RankZeroDelivery(self._servers, settings.timeout_s)
            undo.callback(self._delivery.close)
            self._deliver(model, version=0)
            undo.pop_all()

    @property
    def policy_version(self) -> int:
        return self._guard.version

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Deliver `model`'s weights as policy `version`; the servers serve them on return.

        One of several that doesn't take them is left out. With `weights=none` the version stays,
        and RolloutError says so unless that is allowed.
        """
        if self._servers.fixed:
            if version > self._guard.version:
                self._servers.deliver((), model, version)
            return
        self._deliver(model, version)

    def _deliver(self, model: nn.Module, version: int) -> None:
        self._model = model
        with self._guard.updating(version):
            if not self._servers.fixed:
                self._delivery.deliver(model, version)
                # A server may name its model by the version.
                self._servers.run(self._servers.describe, "asking for its model")
            if self._settings.probe_tolerance:
                self._probe(model, first=version == 0)

    def _probe(self, model: nn.Module, first: bool) -> None:
        """Compare each server's log-probs with the model's. One of several that gives others is
        left out, but not at the start, and not where ranks would disagree about it."""
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        for server in self._servers.serving:
            request = probe_request(server.api.probe_prompt(self._vocabulary), self._max_model_len)
            try:
                drawn = self._ask_for_probe(server, request)
                check_token_ids(drawn.token_ids, self._vocabulary)
                check_log_probs(model, request, drawn, self._settings.probe_tolerance)
            except RolloutError as error:
                if first or not alone:
                    raise
                server.wrong = True
                self._servers.lose(server, error)

    def _ask_for_probe(self, server: Server, request: CompletionRequest) -> SampledCompletion:
        return self._servers.run(lambda: server.api.sample(request), "a probe")[0]

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
        self._guard.check()
        check_request(prompts, params, self._max_model_len, self._vocabulary)
        self.stats = RolloutStats(prompt_tokens=sum(map(len, prompts)))
        if not prompts:
            return []
        started = time.perf_counter()
        numbers = [params.first_prompt + index for index in range(len(prompts))]
        requests = self._requests(prompts, numbers, params)
        asked = [request for _, _, request in requests]
        answers = self._servers.run(lambda: self._rollout(asked, on_progress), "a rollout")
        completions = []
        for number, (index, _, request) in enumerate(requests):
            for drawn in answers[number][1]:
                completions.append(self.completion(index, drawn, request))
        self.stats.seconds = time.perf_counter() - started
        return completions

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
        check_params(params)
        return ServerStream(self, self._servers, params, self._settings)

    def close(self) -> None:
        """Drop the connections; the servers keep running. Safe to call twice."""
        self._guard.refuse("it was closed")
        self._delivery.close()
        self._servers.close()

    def serve_again(self, model: nn.Module | None, version: int) -> None:
        """`update_weights`; None: the numbers of the model that was given last have changed."""
        self.update_weights(model if model is not None else self._model, version)

    def stream_requests(
        self, number: int, prompt: Sequence[int], params: SamplingParams
    ) -> list[tuple[int, int, CompletionRequest]]:
        """Requests for one prompt of a stream, whose noise is that of prompt `number`."""
        self._guard.check()
        check_request([prompt], params, self._max_model_len, self._vocabulary)
        return self._requests([prompt], [number], params)

    def completion(
        self, index: int, drawn: SampledCompletion, request: CompletionRequest
    ) -> Completion:
        """A whole completion of prompt `index`; counted in `stats`."""
        version = self.policy_version
        completion = whole_completion(index, drawn, request, version, self._vocabulary)
        self.stats.generated_tokens += len(completion.token_ids)
        self.stats.prefill_tokens += drawn.prefill_tokens
        return completion

    def _requests(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], params: SamplingParams
    ) -> list[tuple[int, int, CompletionRequest]]:
        return split_requests(
            prompts,
            numbers,
            params,
            seed=self._seed,
            size=self._servers.all[0].api.max_per_request,
            max_model_len=self._max_model_len,
        )

    async def _rollout(
        self, requests: list[CompletionRequest], on_progress: Callable[[int], None] | None
    ) -> Answers:
        """All answers; what a server was asked for that is lost before the end is asked again."""
        await self._servers.check_served("begins")
        answers: Answers = {}
        while len(answers) < len(requests):
            await self._ask(requests, answers, on_progress)
            await self._servers.check_served("ends")
            answers = {number: one for number, one in answers.items() if not one[0].out}
        return answers

    async def _ask(
        self,
        requests: list[CompletionRequest],
        answers: Answers,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        """Fill in the answers that are missing; the first failure ends the others."""
        turns = asyncio.Semaphore(self._settings.concurrency * len(self._servers.serving))
        finished = sum(requests[number].count for number in answers)

        async def one(number: int) -> None:
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
                    group.create_task(one(number))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
