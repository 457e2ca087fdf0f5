"""The API of rollout servers as the engine uses it, and log-probs of given tokens for teachers.

It is OpenAI's `/v1/completions` with token ids in and out, as vLLM (0.11 and later) and others
serve it. Every sampling parameter is sent: what a request leaves out, vLLM fills from the model's
generation_config.json.
"""

import asyncio
import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.algorithm import TeacherConfig
from engine.config.rollout_engines import ServerConfig
from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams
from engine.rollout.server.client import Client, Refused


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions of one prompt."""

    index: int  # of the prompt in its rollout or stream
    prompt: Sequence[int]  # token ids, e.g. [5, 6, 7]
    first: int  # index of the first completion among those of the prompt
    count: int  # completions, e.g. 8
    max_new_tokens: int  # of each, e.g. 64
    seed: int  # 0 … 2**63-1
    params: SamplingParams  # temperature, top_k, top_p and stop_token_ids are read


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion as the server returned it."""

    token_ids: list[int]
    log_probs: list[float]  # one a token; NaN where the server had none to give
    reason: str  # in the server's words, e.g. "length"
    routed_experts: NDArray[Any] | None = None  # [tokens, layers, k], prompt first


def field(answer: Any, *path: str | int) -> Any:
    """Return the value at `path` of a JSON answer, or raise RolloutError that names the gap."""
    value = answer
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise RolloutError(
                f"the rollout server's answer has no {where}: {str(answer)[:300]}; use vLLM's "
                "server (0.11 or later), or one that answers as it does"
            ) from None
    return value


def check_token_ids(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise RolloutError if a sampled token is outside the policy's vocabulary."""
    unknown = [token for token in tokens if not 0 <= token < vocabulary]
    if unknown:
        raise RolloutError(
            f"the rollout server gave token id {unknown[0]}, outside the policy's vocabulary of "
            f"{vocabulary}; start it with the policy's folder"
        )


def number(value: float | str | None) -> float:
    """A log-prob of a JSON answer; servers write NaN, which JSON lacks, as null."""
    return math.nan if value is None else float(value)


_NAN = "float values are not JSON compliant"  # how vLLM fails on NaN log-probs


class OpenAIAPI:
    """One server's completions endpoint, for one model name."""

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self._client, self._configured_name = client, settings.served_model
        self.name = settings.served_model  # which `describe` finds out

    async def describe(self) -> int | None:
        """Ask for the models; the first one's name is used unless the settings name one."""
        models = field(await self._client.get("/v1/models"), "data")
        names = [str(field(model, "id")) for model in models]
        if not names:
            raise RolloutError(f"{self._client.url} serves no model; start it with one")
        if self._configured_name and self._configured_name not in names:
            raise RolloutError(
                f"{self._client.section}.served_model={self._configured_name!r} is not served by "
                f"{self._client.url}; it has {', '.join(names)}"
            )
        self.name = self._configured_name or names[0]
        longest = models[names.index(self.name)].get("max_model_len")
        return None if longest is None else int(longest)

    async def sample(self, request: CompletionRequest) -> list[SampledCompletion]:
        try:
            answer = await self._client.post("/v1/completions", self._body(request))
        except Refused as refused:
            if _NAN not in refused.answer:
                raise
            return [SampledCompletion([0], [math.nan], "NaN")] * request.count
        choices = sorted(field(answer, "choices"), key=lambda choice: int(field(choice, "index")))
        if len(choices) != request.count:
            raise RolloutError(
                f"{self._client.url} gave {len(choices)} completions where {request.count} were "
                f"asked for; set rollout.server.completions_per_request=1"
            )
        return list(map(_drawn, choices))

    def _body(self, request: CompletionRequest) -> dict[str, object]:
        params = request.params
        return {
            "model": self.name,
            "prompt": [int(token) for token in request.prompt],
            "n": request.count,
            "max_tokens": request.max_new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # with log-probs: nothing is decoded to text
        }


def _drawn(choice: dict[str, Any]) -> SampledCompletion:
    log_probs = [number(value) for value in field(choice, "logprobs", "token_logprobs")]
    tokens = field(choice, "token_ids")
    if len(tokens) != len(log_probs):
        raise RolloutError(
            f"the rollout server gave {len(tokens)} tokens and {len(log_probs)} log-probs; use a "
            f"server that gives one log-prob a token"
        )
    reason = str(choice.get("finish_reason"))
    experts, encoded = None, choice.get("routed_experts")
    if encoded is not None:  # the file of an array
        experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return SampledCompletion([int(token) for token in tokens], log_probs, reason, experts)


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """The model's log-probs at one position of a prompt."""

    log_prob: float  # of the token that stands there
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probs, falling


class PromptLogProbs:
    """A client of one server for log-probs of prompts.

    >>> server = PromptLogProbs(TeacherConfig(url="http://127.0.0.1:8000"), "teachers[0]")
    >>> server.read([[5, 6, 7]], [1], top_k=2)
    [[TokenLogProbs(-0.1, ((6, -0.1), (2, -2.4))), TokenLogProbs(…)]]
    """

    def __init__(self, config: TeacherConfig, section: str) -> None:
        """Ask for the model's name; RolloutError without an answer. Messages name the `section`."""
        fields = ["url", "served_model", "api_key_env", "concurrency"]
        fields += ["timeout_s", "request_timeout_s", "max_retries"]
        settings = ServerConfig(**{name: getattr(config, name) for name in fields})
        self._section, self._turns = section, asyncio.Semaphore(config.concurrency)
        self._client = Client(settings, section=section)
        self._api = OpenAIAPI(self._client, settings)
        try:
            self.longest = self._client.run(self._api.describe, "asking for the model")
        except BaseException:
            self._client.close()
            raise

    def read(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[list[TokenLogProbs]]:
        """Return the log-probs of each row of token ids, from its position in `starts` (≥ 1) on.

        `top_k`: of how many tokens; 0: the row's own alone. Raises RolloutError for a row that is
        longer than the server's context, and for an answer of another form.
        """
        longest = max(map(len, rows), default=0) + 1  # a server generates one token at least
        if self.longest is not None and longest > self.longest:
            raise RolloutError(
                f"{self._client.url} reads {self.longest} tokens, and a row with the one that it "
                f"has to add has {longest}; start it with a longer context, or lower "
                "data.max_response_length"
            )
        return self._client.run(
            lambda: self._read_all(rows, starts, top_k), f"log-probs of {len(rows)} completions"
        )

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    async def _read_all(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[list[TokenLogProbs]]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._read_row(ids, start, top_k))
                    for ids, start in zip(rows, starts, strict=True)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _read_row(self, ids: Sequence[int], start: int, top_k: int) -> list[TokenLogProbs]:
        body = {
            "model": self._api.name,
            "prompt": [int(token) for token in ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
        try:
            async with self._turns:
                answer = await self._client.post("/v1/completions", body)
        except Refused as refused:
            raise RolloutError(
                f"{refused} (prompt_logprobs={top_k}: vLLM gives as many as its --max-logprobs "
                "says, 20 by default)"
            ) from None
        entries = field(answer, "choices", 0, "prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise RolloutError(
                f"{self._client.url} gave no log-probs of the {len(ids)} tokens it was sent; "
                f"{self._section}.url needs a server that knows prompt_logprobs, as vLLM's and "
                "engine.serve do"
            )
        pairs = zip(entries[start:], ids[start:], strict=True)
        return [self._token_log_probs(entry, int(token), top_k) for entry, token in pairs]

    def _token_log_probs(self, entry: object, token: int, top_k: int) -> TokenLogProbs:
        if not isinstance(entry, Mapping) or str(token) not in entry or len(entry) < top_k:
            raise RolloutError(
                f"{self._client.url} gave {str(entry)[:200]!r} as log-probs where token {token} "
                f"and {top_k} tokens were asked for; it serves another vocabulary, or is no such "
                "server"
            )
        log_probs = {int(name): number(field(value, "logprob")) for name, value in entry.items()}
        best = sorted(log_probs.items(), key=lambda item: -item[1])[:top_k]
        return TokenLogProbs(log_probs[token], tuple(best))
