"""Text Generation Inference's `/generate`: text in, tokens with ids and log-probs out.

TGI takes no token ids, so a prompt travels as text, and TGI's own `/tokenize` must make the very
same ids of it. It knows no stop tokens but the model's end tokens either: others are cut off by
the engine. Its log-probs are those of the distribution that it drew from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from engine.config.server import ServerConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.server.api import CompletionRequest, SampledCompletion, field, number
from engine.rollout.server.client import Client, Refused
from engine.storage.hub import loading_error, split_revision

_REMEMBERED = 4096  # prompts whose text is kept; the completions of a group share one
_NAN = re.compile(r"\bnan\b", re.IGNORECASE)  # PyTorch's words when it can't draw, passed on as 424
_PROBE = "The answer is"


class TGIAPI:
    """One TGI server. `policy` is the trainer's model folder, for its tokenizer."""

    max_per_request = 1

    def __init__(self, client: Client, settings: ServerConfig, policy: str) -> None:
        self._client = client
        source = settings.tokenizer or policy
        name, revision = split_revision(source)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name, revision=revision or "main", trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"rollout.server.api='tgi' sends prompts as text and found no tokenizer in "
                f"{source!r}: {loading_error(error)}; name a model folder in "
                "rollout.server.tokenizer"
            ) from error
        self._texts: dict[tuple[int, ...], str] = {}

    async def describe(self) -> int | None:
        info = await self._client.get("/info")
        field(info, "model_id")  # else it is no TGI
        longest = info.get("max_total_tokens")
        return None if longest is None else int(longest)

    async def sample(self, request: CompletionRequest) -> list[SampledCompletion]:
        body = {"inputs": await self._text(request.prompt), "parameters": _parameters(request)}
        try:
            details = field(await self._client.post("/generate", body), "details")
        except Refused as refused:
            if not _NAN.search(refused.answer):
                raise
            return [SampledCompletion([0], [math.nan], "NaN", 0)]
        tokens = field(details, "tokens")
        return [
            SampledCompletion(
                [int(field(token, "id")) for token in tokens],
                [number(field(token, "logprob")) for token in tokens],
                str(field(details, "finish_reason")),
                len(request.prompt),
            )
        ]

    def probe_prompt(self, vocabulary: int) -> list[int]:
        ids: list[int] = self._tokenizer(_PROBE)["input_ids"]
        return ids

    async def _text(self, prompt: Sequence[int]) -> str:
        """The text that TGI reads as `prompt`: with or without a BOS token that it adds itself."""
        key = tuple(int(token) for token in prompt)
        if key in self._texts:
            return self._texts[key]
        read: list[int] = []
        for ids in (key[1:], key) if key[0] == self._tokenizer.bos_token_id else (key,):
            text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            read = await self._tokenize(text)
            if tuple(read) == key:
                if len(self._texts) >= _REMEMBERED:
                    self._texts.clear()
                self._texts[key] = text
                return text
        raise RolloutError(
            f"TGI reads the text of a prompt of {len(key)} tokens ({list(key)[:12]} …) as other "
            f"tokens ({read[:12]} …), so its completions would not be the policy's; use "
            f"rollout.server.api=openai, which takes token ids, or the server's own tokenizer"
        )

    async def _tokenize(self, text: str) -> list[int]:
        answer = await self._client.post("/tokenize", {"inputs": text})
        return [int(field(token, "id")) for token in answer]


def _parameters(request: CompletionRequest) -> dict[str, object]:
    """TGI's names and ranges: what is off is null, and a seed is above 0."""
    params = request.params
    drawn = params.temperature > 0
    return {
        "details": True,
        "return_full_text": False,
        "max_new_tokens": request.max_new_tokens,
        "do_sample": drawn,
        "temperature": params.temperature if drawn else None,
        "top_k": params.top_k if drawn and params.top_k else None,
        "top_p": params.top_p if drawn and params.top_p < 1 else None,
        "seed": request.seed or 1,
    }
