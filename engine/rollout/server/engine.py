"""The rollout engine `server`: an inference server started by somebody else, over HTTP.

A rollout is split into requests, and their answers are put together again. Nothing is returned
unless the server said before and after that it serves the weights that were delivered. Requests are
written and answers read by `openai_api.py` and `tgi_api.py`, weights are delivered by `weights.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from engine.config.parse import explain
from engine.config.server import ServerConfig
from engine.errors import ConfigError, DivergedRolloutError, RolloutError
from engine.rollout.protocol import (
    Completion,
    EngineCapabilities,
    SamplingParams,
    register_engine,
)
from engine.rollout.requests import (
    RolloutStats,
    WeightGuard,
    check_request,
    resolve_max_model_len,
)
from engine.rollout.sampling import noise_keys
from engine.rollout.server.api import (
    CompletionRequest,
    SampledCompletion,
    ServerAPI,
    check_token_ids,
)
from engine.rollout.server.client import Client
from engine.rollout.server.log_prob_probe import check_log_probs, probe_request
from engine.rollout.server.openai_api import OpenAIAPI
from engine.rollout.server.settings import check_rollout, check_settings
from engine.rollout.server.tgi_api import TGIAPI
from engine.rollout.server.weights import RankZeroDelivery, create_hook


@register_engine(
    "server",
    EngineCapabilities(remote=True, adapters=True, settings=frozenset({"server"})),
    options=lambda config: dict(config.server),
    check=check_rollout,
)
class ServerEngine:
    """Rollouts by a server.

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
        **options: Any,
    ) -> None:
        """Connect to the server and deliver `model`'s weights, unless they are fixed.

        `options` are `ServerConfig`'s. Ranks of a process group (torch.distributed) create
        the engine, and update it, together: rank 0 delivers the weights, each has its own rollouts.
        `max_num_seqs` and `kv_cache_memory_mb` are accepted, as all engines have the same options,
        and not used: the server was started with its own. `seed` is added to that
        of each request. Raises ConfigError for bad options and a server with a shorter context,
        RolloutError for one that is not there, lacks what its hook needs, or serves another model.
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
        self._settings, self._seed = settings, seed
        self.stats = RolloutStats()
        self._guard = WeightGuard("server")
        self._client = Client(settings)
        with ExitStack() as undo:
            undo.callback(self._client.close)
            self._api = _api(self._client, settings, model)
            self._check_context()
            self._hook = create_hook(self._client, settings)
            undo.callback(self._hook.close)
            self._hook.check()
            self._delivery = RankZeroDelivery(self._hook, settings.timeout_s)
            undo.callback(self._delivery.close)
            self._deliver(model, version=0)
            undo.pop_all()

    @property
    def policy_version(self) -> int:
        return self._guard.version

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Deliver `model`'s weights as policy `version`; the server serves them on return.

        With `weights=none` the version stays, and RolloutError says so unless that is allowed.
        """
        if self._hook.fixed:
            if version > self._guard.version:
                self._hook.deliver((), model, version)
            return
        self._deliver(model, version)

    def _deliver(self, model: nn.Module, version: int) -> None:
        with self._guard.updating(version):
            if not self._hook.fixed:
                self._delivery.deliver(model, version)
                self._describe()  # a server may name its model by the version
            if self._settings.probe_tolerance:
                request = probe_request(
                    self._api.probe_prompt(self._vocabulary), self._max_model_len
                )
                drawn = self._client.run(lambda: self._api.sample(request), "a probe")
                check_token_ids(drawn[0].token_ids, self._vocabulary)
                check_log_probs(model, request, drawn[0], self._settings.probe_tolerance)

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
        delivered, at the beginning or at the end.
        """
        self._guard.check()
        check_request(prompts, params, self._max_model_len, self._vocabulary)
        self.stats = RolloutStats(prompt_tokens=sum(map(len, prompts)))
        if not prompts:
            return []
        started = time.perf_counter()
        requests = self._requests(prompts, params)
        drawn = self._client.run(lambda: self._rollout(requests, on_progress), "a rollout")
        completions = [
            self._completion(index, one, request)
            for (index, request), several in zip(requests, drawn, strict=True)
            for one in several
        ]
        self.stats.seconds = time.perf_counter() - started
        return completions

    def close(self) -> None:
        """Drop the connections; the server keeps running. Safe to call twice."""
        self._guard.refuse("it was closed")
        self._delivery.close()
        self._hook.close()
        self._client.close()

    def _requests(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[tuple[int, CompletionRequest]]:
        """Prompt index and request, in order. A request's seed depends on its place alone."""
        # vLLM refuses several greedy completions in one request.
        size = self._api.max_per_request if params.temperature > 0 else 1
        places = [
            (index, first) for index in range(len(prompts)) for first in range(0, params.n, size)
        ]
        index, first = torch.tensor(places).T
        keys = noise_keys(params.seed + self._seed, params.first_prompt + index, first).tolist()
        return [
            (
                index,
                CompletionRequest(
                    prompt=prompts[index],
                    count=min(size, params.n - first),
                    max_new_tokens=min(
                        params.max_new_tokens, self._max_model_len - len(prompts[index])
                    ),
                    seed=key & (2**63 - 1),
                    params=params,
                ),
            )
            for (index, first), key in zip(places, keys, strict=True)
        ]

    async def _rollout(
        self,
        requests: list[tuple[int, CompletionRequest]],
        on_progress: Callable[[int], None] | None,
    ) -> list[list[SampledCompletion]]:
        """All answers, in the order of `requests`; the first failure ends the others."""
        await self._check_served("begins")
        turns = asyncio.Semaphore(self._settings.concurrency)
        finished = 0

        async def one(request: CompletionRequest) -> list[SampledCompletion]:
            nonlocal finished
            async with turns:
                drawn = await self._api.sample(request)
            finished += request.count
            if on_progress is not None:
                on_progress(finished)
            return drawn

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for _, request in requests]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        await self._check_served("ends")
        return [task.result() for task in tasks]

    async def _check_served(self, moment: str) -> None:
        """Raise RolloutError unless the server says that it serves the delivered weights."""
        if self._hook.fixed:
            return
        said = await self._hook.served()
        if said != self._hook.tag:
            raise RolloutError(
                f"the rollout server {self._client.url} says that it serves {said or 'no tag'} "
                f"when a rollout of {self._hook.tag} {moment}: it was restarted, or somebody else "
                f"brought it weights; its completions are dropped. Call update_weights to bring "
                f"it the policy again"
            )

    def _completion(
        self, index: int, drawn: SampledCompletion, request: CompletionRequest
    ) -> Completion:
        """Cut at the first stop token, and refuse what is not a whole completion."""
        stops = request.params.stop_token_ids
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
        self.stats.generated_tokens += len(tokens)
        self.stats.prefill_tokens += drawn.prefill_tokens
        reason = "length" if length is None else "stop"
        return Completion(index, tokens, log_probs, reason, self.policy_version)

    def _describe(self) -> int | None:
        return self._client.run(self._api.describe, "asking for its model")

    def _check_context(self) -> None:
        longest = self._describe()
        if longest is not None and longest < self._max_model_len:
            raise ConfigError(
                f"the rollout server's context is {longest} tokens and this run's "
                f"{self._max_model_len}; start it with --max-model-len {self._max_model_len}, or "
                f"lower data.max_prompt_length or data.max_response_length"
            )


def _api(client: Client, settings: ServerConfig, model: nn.Module) -> ServerAPI:
    if settings.api == "tgi":
        return TGIAPI(client, settings, getattr(model, "name_or_path", ""))
    return OpenAIAPI(client, settings)
