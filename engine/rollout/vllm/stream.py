"""A stream over a vLLM engine: requests are added, and weights change, while others are decoded.

An update preempts what is running; vLLM computes its keys and values again under the new weights
and drops what was under way under the old ones. So each log-prob is that of its version's weights
over the whole sequence, as with the native engine. vLLM itself notes which version drew which
tokens. The noise of a completion depends on (seed, key, completion index), and, where it was
resumed, on its length then.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from engine.errors import RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.requests import RolloutStats, check_params, check_prompt, check_tokens
from engine.rollout.stream import (
    PartialCompletion,
    PartialRequest,
    StreamedCompletion,
    check_partial,
    noise_index,
    request_limit,
)
from engine.rollout.vllm.llm_requests import LLMRequests, VllmFailed, token_versions
from engine.rollout.vllm.options import VllmOptions


class Engine(Protocol):
    """What a stream needs of `VllmEngine`."""

    @property
    def policy_version(self) -> int: ...

    def require_serving(self) -> None: ...

    def update_weights(self, model: nn.Module, version: int) -> None: ...

    def failed(self, doing: str, error: Exception) -> RolloutError: ...


@dataclass(frozen=True, slots=True)
class _Open:
    """A completion that vLLM decodes."""

    key: Hashable
    number: int  # of its prompt among those of this stream
    prompt: list[int]
    before: PartialCompletion  # what it began with


class VllmStream:
    """A `RolloutStream`; made by `VllmEngine.stream`, whose weights it serves."""

    def __init__(
        self,
        engine: Engine,
        requests: LLMRequests,
        options: VllmOptions,
        vocabulary: int,
        params: SamplingParams,
        model: nn.Module,
    ) -> None:
        check_params(params)
        self.stats = RolloutStats()  # of all steps so far
        self._engine, self._requests, self._options = engine, requests, options
        self._vocabulary, self._params, self._model = vocabulary, params, model
        self._open: dict[str, _Open] = {}  # by vLLM's id
        self._cut: set[Hashable] = set()  # keys of requests that end with their next token
        self._submitted = 0
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def in_flight(self) -> int:
        """Completions being decoded."""
        return min(len(self._open), self._options.max_num_seqs)

    @property
    def waiting(self) -> int:
        """Completions that wait in vLLM."""
        return len(self._open) - self.in_flight

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        resume: PartialRequest | None = None,
        *,
        max_new_tokens: int | None = None,
        after: Hashable | None = None,
    ) -> None:
        """Queue the `n` completions of a prompt, or those that `resume` left unfinished.

        vLLM finds by itself what it has of a prompt; `after` says nothing to it.
        """
        self._check_open()
        self._engine.require_serving()
        if any(one.key == key for one in self._open.values()):
            raise RolloutError(
                f"stream key {key!r} is in use by an unfinished request; give each request a key "
                f"of its own, such as (epoch, row)"
            )
        prompt, params, name = list(prompt_ids), self._params, f"the prompt of request {key!r}"
        check_prompt(name, prompt, self._options.max_model_len, self._vocabulary)
        most = min(params.max_new_tokens, self._options.max_model_len - len(prompt))
        most = request_limit(max_new_tokens, most, key)
        parts = [PartialCompletion(index, [], [], []) for index in range(params.n)]
        if resume is not None:
            check_partial(resume, key, prompt, params.n, most, params.stop_token_ids)
            parts = resume.completions
        for part in parts:
            if part.token_ids:
                tokens = f"completion {part.completion_index} of request {key!r}"
                check_tokens(tokens, part.token_ids, self._vocabulary)
        for part in parts:
            done = len(part.token_ids)
            left = replace(params, max_new_tokens=most - done)
            place = part.completion_index + done * params.n
            noise = self._requests.noise(params.seed, noise_index(key), [place])
            [id] = self._requests.submit_keyed([*prompt, *part.token_ids], noise, left)
            self._open[id] = _Open(key, self._submitted, prompt, part)
        self._submitted += 1
        self.stats.prompt_tokens += len(prompt)

    def forget(self, key: Hashable) -> None:
        """Nothing: vLLM drops what it keeps when its room is needed."""

    def cut(self, key: Hashable) -> None:
        """End the completions of an open request with their next token, as at a length limit."""
        if any(one.key == key for one in self._open.values()):
            self._cut.add(key)

    def step(self) -> list[StreamedCompletion]:
        """Let vLLM make a step; return the completions that ended. Raises RolloutError as
        `VllmEngine.generate` does."""
        self._check_open()
        if not self._open:
            return []
        self._engine.require_serving()
        try:
            outputs = self._requests.step()
        except VllmFailed as error:
            raise self._engine.failed("decoding", error) from error
        self.stats.decode_steps += 1
        ended = []
        for output in outputs:
            if not output.finished or output.request_id not in self._open:
                continue
            one = self._open.pop(output.request_id)
            version = self.policy_version
            done = self._requests.completion(one.number, output, version, self.stats)
            whole = _whole(one.before, done, token_versions(output))
            ended.append(StreamedCompletion(one.key, one.before.completion_index, whole))
        return ended + (self._end_cut() if self._cut else [])

    def _end_cut(self) -> list[StreamedCompletion]:
        """Take out the completions that are cut, once they have a token."""
        ended, now = [], self._requests.unfinished()
        for id, one in list(self._open.items()):
            so_far = now.get(id)
            if one.key not in self._cut or so_far is None or not so_far.token_ids:
                continue
            if any(map(math.isnan, so_far.log_probs)):
                continue  # it ends by itself, with the error that says why
            self._requests.abort([id])
            del self._open[id]
            self.stats.generated_tokens += len(so_far.token_ids)
            oldest = min(so_far.versions)
            done = Completion(
                one.number, so_far.token_ids, so_far.log_probs, "length", oldest, so_far.versions
            )
            whole = _whole(one.before, done, so_far.versions)
            ended.append(StreamedCompletion(one.key, one.before.completion_index, whole))
        self._cut &= {one.key for one in self._open.values()}
        return ended

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Continue under `model`'s weights; None: the numbers of the served model have changed.

        Raises RolloutError as `VllmEngine.update_weights` does.
        """
        self._check_open()
        self._model = self._model if model is None else model
        self._engine.update_weights(self._model, version)

    def partials(self) -> list[PartialRequest]:
        """Copies of all that is unfinished, the oldest request first; decoding is not affected."""
        self._check_open()
        now, found = self._requests.unfinished(), dict[Hashable, PartialRequest]()
        for id, one in self._open.items():
            partial = found.setdefault(one.key, PartialRequest(one.key, one.prompt, []))
            before, more = one.before, now[id]
            part = PartialCompletion(
                before.completion_index,
                [*before.token_ids, *more.token_ids],
                [*before.log_probs, *more.log_probs],
                [*before.token_versions, *more.versions],
            )
            partial.completions.append(part)
        return list(found.values())

    def close(self) -> None:
        """Drop all that is unfinished; the engine still serves."""
        with suppress(RolloutError):  # of an engine that has ended, and its requests with it
            self._engine.require_serving()
            self._requests.abort(list(self._open))
        self._closed = True
        self._open.clear()
        self._cut.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the stream was closed; open another one by engine.stream")


def _whole(before: PartialCompletion, done: Completion, versions: list[int]) -> Completion:
    """A completion with the tokens that it began with, and each token's version."""
    versions = [*before.token_versions, *(versions or [done.policy_version] * len(done.token_ids))]
    return replace(
        done,
        token_ids=[*before.token_ids, *done.token_ids],
        log_probs=[*before.log_probs, *done.log_probs],
        policy_version=min(versions),
        token_versions=versions,
    )
