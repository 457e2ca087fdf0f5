"""The API of a rollout server as the engine uses it; each kind of API is a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions of one prompt."""

    prompt: Sequence[int]  # token ids, e.g. [5, 6, 7]
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
    prefill_tokens: int  # prompt tokens that its request computed, counted on one of its rows


class ServerAPI(Protocol):
    """Sends a `CompletionRequest` and parses the answer into `SampledCompletion`s."""

    max_per_request: int  # completions that one request can ask for

    async def describe(self) -> int | None:
        """Find the model; return its longest prompt plus completion, None if unknown."""
        ...

    async def sample(self, request: CompletionRequest) -> list[SampledCompletion]:
        """The server's samples, in the order of its own numbering; RolloutError if it can't."""
        ...

    def probe_prompt(self, vocabulary: int) -> list[int]:
        """A short prompt that the server can be sent."""
        ...


def field(answer: Any, *path: str | int) -> Any:
    """The value at `path` of a JSON answer, or RolloutError naming what is missing."""
    value = answer
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise RolloutError(
                f"the rollout server's answer has no {where}: {str(answer)[:300]}; see that "
                f"rollout.server.api is its kind"
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
    return float("nan") if value is None else float(value)
