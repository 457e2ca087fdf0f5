"""`/v1/completions` with token ids in and out, as vLLM (0.10 and later) and others serve it.

Every sampling parameter is sent: what a request leaves out, vLLM fills from the model's
generation_config.json, and then tokens are drawn from another distribution than was asked for.
"""

from __future__ import annotations

import math
from typing import Any

from engine.config.server import ServerConfig
from engine.errors import RolloutError
from engine.rollout.server.api import CompletionRequest, SampledCompletion, field, number
from engine.rollout.server.client import Client, Refused

_NAN = "float values are not JSON compliant"  # how vLLM fails on NaN log-probs
_TOKEN = "token_id:"  # how vLLM names tokens under return_tokens_as_token_ids


class OpenAIAPI:
    """One server's completions endpoint, for one model name."""

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self.max_per_request = settings.completions_per_request
        self._client, self._asked = client, settings.served_model
        self._name = settings.served_model

    @property
    def name(self) -> str:
        """The model's name there, which `describe` finds out."""
        return self._name

    async def describe(self) -> int | None:
        """Ask for the models; the first one's name is used unless the settings name one."""
        models = field(await self._client.get("/v1/models"), "data")
        names = [str(field(model, "id")) for model in models]
        if not names:
            raise RolloutError(f"{self._client.url} serves no model; start it with one")
        if self._asked and self._asked not in names:
            raise RolloutError(
                f"{self._client.section}.served_model={self._asked!r} is not served by "
                f"{self._client.url}; it has {', '.join(names)}"
            )
        self._name = self._asked or names[0]
        longest = models[names.index(self._name)].get("max_model_len")
        return None if longest is None else int(longest)

    async def sample(self, request: CompletionRequest) -> list[SampledCompletion]:
        try:
            answer = await self._client.post("/v1/completions", self._body(request))
        except Refused as refused:
            if _NAN not in refused.answer:
                raise
            return [SampledCompletion([0], [math.nan], "NaN", 0)] * request.count
        choices = sorted(field(answer, "choices"), key=lambda choice: int(field(choice, "index")))
        if len(choices) != request.count:
            raise RolloutError(
                f"{self._client.url} gave {len(choices)} completions where {request.count} were "
                f"asked for; set rollout.server.completions_per_request=1"
            )
        prefill = [_computed(answer.get("usage") or {}, len(request.prompt))]
        prefill += [0] * (len(choices) - 1)
        return [_drawn(choice, count) for choice, count in zip(choices, prefill, strict=True)]

    def probe_prompt(self, vocabulary: int) -> list[int]:
        return [vocabulary * share // 8 for share in (1, 3, 5, 7)]

    def _body(self, request: CompletionRequest) -> dict[str, object]:
        params = request.params
        return {
            "model": self._name,
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
            "return_tokens_as_token_ids": True,
        }


def _drawn(choice: dict[str, Any], prefill_tokens: int) -> SampledCompletion:
    log_probs = [number(value) for value in field(choice, "logprobs", "token_logprobs")]
    tokens = choice.get("token_ids")
    if tokens is None:
        tokens = [_token_id(name) for name in field(choice, "logprobs", "tokens")]
    if len(tokens) != len(log_probs):
        raise RolloutError(
            f"the rollout server gave {len(tokens)} tokens and {len(log_probs)} log-probs; use a "
            f"server that gives one log-prob a token"
        )
    reason = str(choice.get("finish_reason"))
    return SampledCompletion([int(token) for token in tokens], log_probs, reason, prefill_tokens)


def _token_id(name: str) -> int:
    number = name.removeprefix(_TOKEN)
    if number == name or not number.isdecimal():
        raise RolloutError(
            f"the rollout server gave the token {name!r} and no token id; it must know "
            f"return_token_ids or return_tokens_as_token_ids, as vLLM 0.10 and later do"
        )
    return int(number)


def _computed(usage: dict[str, Any], prompt: int) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return int(usage.get("prompt_tokens", prompt)) - int(details.get("cached_tokens") or 0)
