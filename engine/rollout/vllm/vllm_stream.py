"""A stream over a vLLM engine: requests are added, and weights change, while others are decoded.

An update preempts what is running; vLLM computes its keys and values again under the new weights.
So each log-prob is that of its version's weights over the whole sequence, as with the native
engine. With `keeps_kv` they stay as they are, and what begins later shares none of them.

vLLM takes a request when there is room for its prompt, and preempts where running ones outgrow the
cache. Here (`KvAdmission`) a completion waits until its keys and values will fit beside those of
the running ones. Each is taken for `expected` tokens long, the mean of a stream that hasn't ended:
tokens sampled / completions ended, the estimate of an exponential lifetime under censoring. Of N
completions that begin together the share still running after t tokens is at most mean / t (Markov's
inequality), so together they hold N · mean tokens at most, and the rest is vLLM's preemption.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import nn

from engine.errors import RolloutError
from engine.rollout import protocol, stream
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import PartialCompletion, PartialRequest, StreamedCompletion
from engine.rollout.vllm.llm_requests import LLMRequests, VllmFailed
from engine.rollout.vllm.options import VllmOptions


class Row(NamedTuple):
    """A completion that vLLM has, or may be given."""

    key: Hashable  # of its prompt
    prompt: int  # tokens, e.g. 900
    limit: int  # longest completion, in tokens, e.g. 1024
    tokens: int = 0  # sampled so far


@dataclass(slots=True)
class KvAdmission:
    """The room of one KV cache."""

    capacity: int  # tokens that the cache holds, e.g. 65536
    block: int  # tokens of a block, e.g. 32
    shares_prompts: bool  # completions of a prompt share its whole blocks
    ended: int = 0  # completions
    sampled: int = 0  # their tokens

    def end(self, tokens: int) -> None:
        """Count a completion that has ended after `tokens` tokens."""
        self.ended += 1
        self.sampled += tokens

    def count(self, running: Iterable[Row], waiting: Iterable[Row]) -> int:
        """Return how many of `waiting`, from the first on, vLLM may be given beside `running`."""
        rows, expected = list(running), math.inf  # the mean length of a completion
        if self.ended:
            expected = (self.sampled + sum(row.tokens for row in rows)) / self.ended
        prompts: set[Hashable] = set()
        held = sum(self._need(row, expected, prompts) for row in rows)
        count = 0
        for row in waiting:
            held += self._need(row, expected, prompts)
            if held > self.capacity and (rows or count):  # one alone always fits
                break
            count += 1
        return count

    def _need(self, row: Row, expected: float, prompts: set[Hashable]) -> int:
        """Count tokens of cache for a completion, and its prompt unless that is in `prompts`."""
        shared = row.prompt // self.block * self.block if self.shares_prompts else 0
        longest = min(row.limit, max(expected, row.tokens + self.block))
        unshared = row.prompt - shared + int(longest)
        need = -(-unshared // self.block) * self.block
        if row.key not in prompts:
            prompts.add(row.key)
            need += shared
        return need


class Engine(Protocol):
    """What a stream needs of `VllmEngine`."""

    @property
    def policy_version(self) -> int: ...
    def require_serving(self) -> None: ...
    def update_weights(self, model: nn.Module | None, version: int) -> None: ...
    def abort(self, ids: list[str]) -> None: ...
    def failed(self, doing: str, error: Exception) -> RolloutError: ...


@dataclass(frozen=True, slots=True)
class _Open:
    """A completion that vLLM decodes, or will."""

    key: Hashable
    number: int  # of its prompt among those of this stream
    prompt: list[int]
    prior: PartialCompletion  # the tokens that it resumes from
    limit: int  # its longest, in tokens
    versions: list[int] = field(default_factory=list)  # of its tokens before the latest update

    def row(self, sampled: int = 0) -> Row:
        """Return its size after `sampled` more tokens."""
        return Row(self.key, len(self.prompt), self.limit, len(self.prior.token_ids) + sampled)

    def with_sampled(
        self, token_ids: list[int], log_probs: list[float], version: int
    ) -> PartialCompletion:
        """Return the tokens that it began with, and those sampled, of `version` at the end."""
        prior = self.prior
        latest = [version] * (len(token_ids) - len(self.versions))
        return PartialCompletion(
            prior.completion_index,
            [*prior.token_ids, *token_ids],
            [*prior.log_probs, *log_probs],
            [*prior.token_versions, *self.versions, *latest],
        )

    def streamed(self, rest: protocol.Completion) -> StreamedCompletion:
        """Return the completion that ends with `rest`."""
        part = self.with_sampled(rest.token_ids, rest.log_probs, rest.policy_version)
        completion = replace(
            rest,
            token_ids=part.token_ids,
            log_probs=part.log_probs,
            policy_version=min(part.token_versions),
            token_versions=part.token_versions,
        )
        return StreamedCompletion(self.key, part.completion_index, completion)


class VllmStream(stream.RolloutStream):
    """A stream that `VllmEngine.stream` makes, whose weights it serves."""

    def __init__(
        self,
        engine: Engine,
        requests: LLMRequests,
        options: VllmOptions,
        vocabulary: int,
        params: SamplingParams,
        *,
        keeps_kv: bool = False,
    ) -> None:
        protocol.check_params(params)
        self.keeps_kv = keeps_kv  # whether an update leaves keys and values as they are
        self._engine, self._requests, self._options = engine, requests, options
        self._vocabulary, self._params = vocabulary, params
        self._open: dict[str, _Open] = {}  # that vLLM has, by its id
        self._held: deque[_Open] = deque()  # until there is room
        capacity, block = requests.kv_cache()
        self._room = KvAdmission(capacity, block, options.settings.enable_prefix_caching)
        self._may_fit = False  # whether room or held ones have come since the last look
        self._cut: set[Hashable] = set()  # keys of requests that end with their next token
        self._submitted = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def in_flight(self) -> int:
        return min(len(self._open), self._options.max_num_seqs)

    @property
    def waiting(self) -> int:
        """Completions that wait, in vLLM or for room in its cache."""
        return len(self._open) + len(self._held) - self.in_flight

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        resume: PartialRequest | None = None,
        *,
        max_new_tokens: int | None = None,
        after: Hashable | None = None,
    ) -> None:
        """Queue completions; vLLM finds what it has of a prompt, whatever `after` says."""
        self._check_open()
        self._engine.require_serving()
        stream.check_unused(key, {request.key for request in self._unfinished()})
        prompt, params, longest = list(prompt_ids), self._params, self._options.max_model_len
        protocol.check_prompt(f"the prompt of request {key!r}", prompt, longest, self._vocabulary)
        limit = min(params.max_new_tokens, longest - len(prompt))
        limit = stream.request_limit(max_new_tokens, limit, key)
        parts = stream.parts_to_sample(key, prompt, resume, params, limit, self._vocabulary)
        self._held.extend(_Open(key, self._submitted, prompt, part, limit) for part in parts)
        self._may_fit = True
        self._submitted += 1
        self._admit()

    def cut(self, key: Hashable) -> None:
        if any(request.key == key for request in self._unfinished()):
            self._cut.add(key)

    def step(self) -> list[StreamedCompletion]:
        """Let vLLM make a step; return what ended. RolloutError as of `VllmEngine.generate`."""
        self._check_open()
        if not self._open and not self._held:
            return []
        self._engine.require_serving()
        self._admit()
        try:
            outputs = self._requests.step()
        except VllmFailed as error:
            raise self._engine.failed("decoding", error) from error
        ended = []
        for output in outputs:
            if not output.finished or output.request_id not in self._open:
                continue
            request = self._open.pop(output.request_id)
            self._may_fit = True
            version = self.policy_version
            rest = self._requests.completion(request.number, output, version)
            ended.append(request.streamed(rest))
            self._room.end(len(ended[-1].completion.token_ids))
        return ended + (self._end_cut() if self._cut else [])

    def _end_cut(self) -> list[StreamedCompletion]:
        """Take out the completions that are cut, once they have a token."""
        ended, unfinished = [], self._requests.unfinished()
        for id, request in list(self._open.items()):
            tokens, log_probs = unfinished.get(id, ([], []))
            if request.key not in self._cut or not tokens:
                continue
            if any(map(math.isnan, log_probs)):
                continue  # it ends by itself, with the error that says why
            self._requests.abort([id])
            del self._open[id]
            self._may_fit = True
            version, number = self.policy_version, request.number
            rest = protocol.Completion(number, tokens, log_probs, "length", version)
            ended.append(request.streamed(rest))
        self._cut &= {request.key for request in self._unfinished()}
        return ended

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Continue under new weights; RolloutError as of `VllmEngine.update_weights`."""
        self._check_open()
        self._engine.update_weights(model, version)

    def note_version(self) -> None:
        """Note that tokens so far are of the present version: an update follows."""
        lengths = self._requests.lengths()
        for id, request in self._open.items():
            latest = lengths[id] - len(request.versions)
            request.versions.extend([self.policy_version] * latest)

    def partials(self) -> list[PartialRequest]:
        self._check_open()
        rest, partials = self._requests.unfinished(), dict[Hashable, PartialRequest]()
        parts = [r.with_sampled(*rest[id], self.policy_version) for id, r in self._open.items()]
        parts += [request.prior for request in self._held]
        for request, part in zip(self._unfinished(), parts, strict=True):
            partial = PartialRequest(request.key, request.prompt, [])
            partials.setdefault(request.key, partial).completions.append(part)
        return list(partials.values())

    def close(self) -> None:
        self._engine.abort(list(self._open))
        self._closed = True
        self._open.clear()
        self._cut.clear()
        self._held.clear()

    def _unfinished(self) -> Iterator[_Open]:
        """Yield the completions that vLLM has, then those held, in order of submission."""
        yield from self._open.values()
        yield from self._held

    def _admit(self) -> None:
        """Give vLLM the held completions that its cache has room for."""
        if not self._held or not self._may_fit:
            return
        lengths = self._requests.lengths()
        running = [request.row(lengths.get(id, 0)) for id, request in self._open.items()]
        self._may_fit = False
        for _ in range(self._room.count(running, (request.row() for request in self._held))):
            request, n = self._held[0], self._params.n
            tokens, number = request.prior.token_ids, stream.noise_index(request.key)
            noise = request.prior.completion_index + len(tokens) * n
            remaining = replace(self._params, max_new_tokens=request.limit - len(tokens))
            prompt = [*request.prompt, *tokens]
            [id] = self._requests.submit(prompt, number, [noise], remaining)
            self._open[id] = self._held.popleft()
