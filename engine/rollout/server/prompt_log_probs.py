"""A server's log-probs of given tokens: each token's own, and the likeliest at its place.

`/v1/completions` with vLLM's `prompt_logprobs`, which `engine.serve` answers too. They are of the
model's own distribution, at temperature 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config.distillation import TeacherConfig
from engine.config.server import ServerConfig
from engine.errors import RolloutError
from engine.rollout.server.api import field, number
from engine.rollout.server.client import Client, Refused
from engine.rollout.server.openai_api import OpenAIAPI


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """What the model says at one place of a prompt."""

    log_prob: float  # of the token that stands there
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probs, falling


class PromptLogProbs:
    """One server, asked for log-probs.

    >>> server = PromptLogProbs(TeacherConfig(url="http://127.0.0.1:8000"), "teachers[0]")
    >>> server.read([[5, 6, 7]], [1], top_k=2)
    [[TokenLogProbs(-0.1, ((6, -0.1), (2, -2.4))), TokenLogProbs(…)]]
    """

    def __init__(self, config: TeacherConfig, section: str) -> None:
        """Ask for the model's name; RolloutError where no server answers. `section` has `config`'s
        settings, for messages."""
        read = ["url", "served_model", "api_key_env", "concurrency"]
        read += ["timeout_s", "request_timeout_s", "max_retries"]
        settings = ServerConfig(**{name: getattr(config, name) for name in read})
        self._section, self._concurrency = section, config.concurrency
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
        """For each row of token ids, what is said at its places from `starts` on (at least 1).

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
        turn = asyncio.Semaphore(self._concurrency)

        async def one(ids: Sequence[int], start: int) -> list[TokenLogProbs]:
            async with turn:
                return await self._read_row(ids, start, top_k)

        asked = [asyncio.ensure_future(one(*row)) for row in zip(rows, starts, strict=True)]
        try:
            return await asyncio.gather(*asked)
        except BaseException:
            for task in asked:
                task.cancel()
            raise

    async def _read_row(self, ids: Sequence[int], start: int, top_k: int) -> list[TokenLogProbs]:
        body = {
            "model": self._api.name,
            "prompt": [int(token) for token in ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
        try:
            answer = await self._client.post("/v1/completions", body)
        except Refused as refused:
            raise RolloutError(
                f"{refused} (prompt_logprobs={top_k}: vLLM gives as many as its --max-logprobs "
                "says, 20 by default)"
            ) from None
        found = field(answer, "choices", 0, "prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(ids):
            raise RolloutError(
                f"{self._client.url} gave no log-probs of the {len(ids)} tokens it was sent; "
                f"{self._section}.url needs a server that knows prompt_logprobs, as vLLM's and "
                "engine.serve do"
            )
        places = zip(found[start:], ids[start:], strict=True)
        return [self._place(entry, int(token), top_k) for entry, token in places]

    def _place(self, entry: object, token: int, top_k: int) -> TokenLogProbs:
        if not isinstance(entry, Mapping) or str(token) not in entry or len(entry) < top_k:
            raise RolloutError(
                f"{self._client.url} gave {str(entry)[:200]!r} as log-probs where token {token} "
                f"and {top_k} tokens were asked for; it serves another vocabulary, or is no such "
                "server"
            )
        said = {int(name): number(field(one, "logprob")) for name, one in entry.items()}
        best = sorted(said.items(), key=lambda item: -item[1])[:top_k]
        return TokenLogProbs(said[token], tuple(best))
