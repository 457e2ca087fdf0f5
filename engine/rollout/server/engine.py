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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from engine.config import RolloutConfig, ServerConfig
from engine.config.text import explain
from engine.errors import ConfigError, DivergedRolloutError, RolloutError
from engine.rollout.protocol import (
    Completion,
    EngineCapabilities,
    RolloutStats,
    SamplingParams,
    WeightGuard,
    check_params,
    check_request,
    register_engine,
    resolve_max_model_len,
)
from engine.rollout.sampling import noise_keys
from engine.rollout.server.api import CompletionRequest, SampledCompletion, check_token_ids
from engine.rollout.server.server_stream import ServerStream
from engine.rollout.server.servers import RankZeroDelivery, Server, Servers
from engine.rollout.server.weights import check_hook
from engine.rollout.trainer_model import embedding_weight, eval_mode


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
            f"rollout.server.url={settings.url} beside rollout.server.urls; put it among the urls"
        )
    for name in ("reload_url", "version_url"):
        value = getattr(settings, name)
        if len(settings.urls) > 1 and "://" in value:
            raise ConfigError(
                f"rollout.server.{name}={value} is one address, and rollout.server.urls names "
                f"{len(settings.urls)} servers; give a path, which is asked of each"
            )
    check_hook(settings.weights)
    if settings.api == "tgi" and settings.weights == "vllm":
        raise ConfigError(
            "rollout.server.api=tgi with weights=vllm: these are vLLM's own endpoints; set "
            "rollout.server.weights to folder, or to none"
        )
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


def split_requests(
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    size: int,
    max_model_len: int,
) -> list[tuple[int, int, CompletionRequest]]:
    """Split a rollout into requests of at most `size` completions, in order.

    Each comes with the index of its prompt and of its first completion. Its seed depends on its
    prompt's number (`numbers`) and that first completion alone.
    """
    # vLLM refuses several greedy completions in one request.
    size = size if params.temperature > 0 else 1
    starts = [(index, first) for index in range(len(prompts)) for first in range(0, params.n, size)]
    prompt = torch.tensor([numbers[index] for index, _ in starts])
    firsts = torch.tensor([first for _, first in starts])
    keys = noise_keys(params.seed + seed, prompt, firsts).tolist()
    return [
        (
            index,
            first,
            CompletionRequest(
                prompt=prompts[index],
                count=min(size, params.n - first),
                max_new_tokens=min(params.max_new_tokens, max_model_len - len(prompts[index])),
                seed=key & (2**63 - 1),
                params=params,
            ),
        )
        for (index, first), key in zip(starts, keys, strict=True)
    ]


def whole_completion(
    index: int, drawn: SampledCompletion, request: CompletionRequest, version: int, vocabulary: int
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
    check_token_ids(tokens, vocabulary)
    if length is None and len(tokens) != request.max_new_tokens:
        raise RolloutError(
            f"the rollout server ended a completion of prompt {index} after {len(tokens)} of "
            f"{request.max_new_tokens} tokens ({drawn.reason!r}) and on no token of "
            f"stop_token_ids={list(stops)}: it was interrupted or has end tokens of its own; "
            f"start vLLM with --generation-config vllm, or add them to the tokenizer"
        )
    reason = "length" if length is None else "stop"
    return Completion(index, tokens, log_probs, reason, version)


_TOKENS = 16
_PARAMS = SamplingParams(temperature=0.7)  # other than 1, so that raw log-probs show


def probe_request(prompt: list[int], max_model_len: int) -> CompletionRequest:
    """Build a request for one completion of a short prompt."""
    prompt = prompt[: max_model_len - 1]
    return CompletionRequest(prompt, 1, min(_TOKENS, max_model_len - len(prompt)), 1, _PARAMS)


def check_log_probs(
    model: nn.Module, request: CompletionRequest, drawn: SampledCompletion, tolerance: float
) -> None:
    """Raise RolloutError if `drawn`'s log-probs are `tolerance` or more from `model`'s, on average.

    A model whose own log-probs are not finite passes: decoding reports that.
    """
    logits = _logits(model, request.prompt, drawn.token_ids)
    server_log_probs = torch.tensor(drawn.log_probs)
    model_log_probs = _log_probs(logits / request.params.temperature, drawn.token_ids)
    if not len(server_log_probs) or not bool(model_log_probs.isfinite().all()):
        return
    distance = float((server_log_probs - model_log_probs).abs().mean())
    if distance < tolerance:
        return
    raw = float((server_log_probs - _log_probs(logits, drawn.token_ids)).abs().mean())
    if raw < tolerance:
        raise RolloutError(
            "the rollout server's log-probs are those of the model before temperature, top-k and "
            "top-p, not those that tokens were drawn with; start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    raise RolloutError(
        f"the rollout server's log-probs are {distance:.3f} from the policy's on average over "
        f"{len(server_log_probs)} tokens: it serves another model or other weights; start it with "
        f"the policy's folder, or raise rollout.server.probe_tolerance={tolerance:g}"
    )


@torch.no_grad()
def _logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return the logits, float32 `[len(tokens), V]`, of the positions that drew `tokens`."""
    device = embedding_weight(model).device
    with eval_mode(model):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]], device=device)).logits[0]
    rows: Tensor = logits[len(prompt) - 1 : -1].float().cpu()
    return rows


def _log_probs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


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
        """Compare each server's log-probs with the model's.

        One of several servers that gives others is left out, but not at the start, and not where
        ranks would disagree about it.
        """
        single_rank = not (
            dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        )
        for server in self._servers.serving:
            request = probe_request(server.api.probe_prompt(self._vocabulary), self._max_model_len)
            try:
                [drawn] = self._servers.run(partial(server.api.sample, request), "a probe")
                check_token_ids(drawn.token_ids, self._vocabulary)
                check_log_probs(model, request, drawn, self._settings.probe_tolerance)
            except RolloutError as error:
                if first or not single_rank:
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
        self._guard.check()
        check_request(prompts, params, self._max_model_len, self._vocabulary)
        self.stats = RolloutStats(prompt_tokens=sum(map(len, prompts)))
        if not prompts:
            return []
        started = time.perf_counter()
        numbers = [params.first_prompt + index for index in range(len(prompts))]
        requests = self._requests(prompts, numbers, params)
        answers = self._servers.run(
            lambda: self._rollout([request for _, _, request in requests], on_progress), "a rollout"
        )
        completions = [
            self.completion(index, drawn, request)
            for number, (index, _, request) in enumerate(requests)
            for drawn in answers[number][1]
        ]
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
        """Call `update_weights`; None: the last model's numbers have changed."""
        self.update_weights(model if model is not None else self._model, version)

    def stream_requests(
        self, number: int, prompt: Sequence[int], params: SamplingParams
    ) -> list[tuple[int, int, CompletionRequest]]:
        """Build the requests for one prompt of a stream, whose noise is that of prompt `number`."""
        self._guard.check()
        check_request([prompt], params, self._max_model_len, self._vocabulary)
        return self._requests([prompt], [number], params)

    def completion(
        self, index: int, drawn: SampledCompletion, request: CompletionRequest
    ) -> Completion:
        """Return a whole completion of prompt `index`, and count it in `stats`."""
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
        """Return all answers; requests to a server that is lost before the end are sent again."""
        await self._servers.check_served("begins")
        answers: Answers = {}
        while len(answers) < len(requests):
            await self._ask(requests, answers, on_progress)
            await self._servers.check_served("ends")
            answers = {number: answer for number, answer in answers.items() if not answer[0].out}
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
