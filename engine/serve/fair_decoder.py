"""Decodes for many clients at once, so that none waits long for the others.

Requests that draw tokens in the same way share a stream of the engine; one with a seed of its own
has a stream to itself, so that it gives the same tokens whoever else asks. A free place goes to the
request with the fewest sequences, and a request without any takes one from the request with the
most, whose tokens are kept and continued later. Of several streams, every other step is one of the
request that has had the fewest steps (least attained service); the others go round.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

import torch
from transformers import PreTrainedModel

from engine.errors import RolloutError
from engine.rollout.protocol import RolloutEngine, SamplingParams
from engine.rollout.stream import PartialRequest, RolloutStream, StreamedCompletion, open_stream

SEQUENCES = 64  # decoded at once
_PREFILL_TOKENS = 4096  # of prompts that begin in one step, or a single longer one
_SLICE = 64  # steps that a request with one sequence may be ahead of one that waits
_STEPS_A_READ = 4  # decoding steps for each prompt whose log-probs are read meanwhile
_COLUMNS = 4096  # completions up to so many tokens share a stream
_log = logging.getLogger(__name__)
LogProbs = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Decoded:
    index: int  # of its choice: prompt · n + completion
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"


Event = Decoded | list[LogProbs | None] | Exception | None
"""A message to a request: completions as they end, its prompts' log-probs in order, or an error;
then None."""


@dataclass(eq=False, slots=True)
class Job:
    """A request: all completions of its prompts."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams  # `max_new_tokens` is the longest answer to any of the prompts
    longest: Sequence[int]  # tokens of an answer, by prompt
    has_seed: bool  # whether params.seed is the client's
    deliver: Callable[[Event], None]  # is called in the decoder's thread
    prompt_logprobs: int | None = None  # log-probs of so many tokens at each place of the prompts
    cancelled: bool = False  # may be set by any thread
    running: int = 0  # sequences that are decoded
    steps: int = 0  # in which it had any
    unread: list[int] = field(init=False)  # prompts whose log-probs are to be computed, reversed
    waiting: int = field(init=False)  # sequences
    _rest: Iterator[_Sequence] = field(init=False)

    def __post_init__(self) -> None:
        count, n = len(self.prompts), self.params.n
        self.unread = [] if self.prompt_logprobs is None else list(range(count))[::-1]
        self.waiting = count * n
        self._rest = (_Sequence(self, *place) for place in product(range(count), range(n)))

    @property
    def stream_key(self) -> Hashable:
        """Equal for jobs that can share a stream."""
        params = self.params
        drawing = params.temperature, params.top_k, params.top_p
        return *drawing, self.columns, id(self) if self.has_seed else None

    @property
    def columns(self) -> int:
        """Tokens of the longest answer, rounded up."""
        return max(_COLUMNS, 1 << (self.params.max_new_tokens - 1).bit_length())

    def take(self) -> _Sequence:
        self.waiting -= 1
        self.running += 1
        return next(self._rest)

    def put_back(self, sequence: _Sequence) -> None:
        self.waiting += 1
        self._rest = chain([sequence], self._rest)


@dataclass(eq=False, slots=True)
class _Sequence:
    job: Job
    prompt: int
    completion: int
    key: Hashable = None  # in its stream; decides what is drawn
    begun: PartialRequest | None = None
    cut: bool = False  # ends with its next token, to be continued later

    def __post_init__(self) -> None:
        seeded = self.job.has_seed
        self.key = (self.prompt, self.completion) if seeded else random.getrandbits(62)

    def ended(self, sampled: StreamedCompletion) -> bool:
        """Whether its completion is whole; keeps the tokens of one that was cut."""
        completion, limit = sampled.completion, self.job.longest[self.prompt]
        if not self.cut or completion.finish_reason == "stop" or len(completion.token_ids) >= limit:
            return True
        prompt = list(self.job.prompts[self.prompt])
        self.begun = PartialRequest(self.key, prompt, [sampled.part])
        self.cut = False
        return False


@dataclass(eq=False, slots=True)
class _Lane:
    stream: RolloutStream
    running: dict[Hashable, _Sequence] = field(default_factory=dict)

    def jobs(self) -> set[Job]:
        return {sequence.job for sequence in self.running.values()}

    def cut(self, sequence: _Sequence) -> None:
        sequence.cut = True
        self.stream.cut(sequence.key)


class FairDecoder:
    """Decodes jobs in a thread until it is closed."""

    def __init__(self, engine: RolloutEngine, model: PreTrainedModel | None = None) -> None:
        """Decode with `engine`; log-probs of prompts are those of `model`, which is its model."""
        self._engine, self._model = engine, model
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._jobs: list[Job] = []  # the oldest first
        self._lanes: dict[Hashable, _Lane] = {}  # the one that has waited longest first
        self._closed = False
        self._turn = 0
        threading.Thread(target=self._run, name="decode", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queue a job, whose prompts must have been checked."""
        if self._closed:
            job.deliver(RolloutError("the server is stopping"))
        else:
            self._inbox.put(job)

    def close(self) -> None:
        """Take no more jobs; those that are not finished get an error after the present step."""
        self._closed = True
        self._inbox.put(None)

    def _run(self) -> None:
        while self._receive():
            self._admit()
            self._make_room()
            if not self._lanes or self._turn % _STEPS_A_READ == 0:
                self._read_prompt()
            if self._lanes:
                self._step(self._next_lane())
            for job in [j for j in self._jobs if not (j.waiting or j.running or j.unread)]:
                self._end(job, None)
        for job in list(self._jobs):
            self._end(job, RolloutError("the server is stopping"))

    def _receive(self) -> bool:
        """Take new jobs, waiting for one where there is nothing to do, and drop cancelled ones."""
        while not (self._jobs or self._lanes) or not self._inbox.empty():
            job = self._inbox.get()
            if job is None:
                return False
            self._jobs.append(job)
        for lane in self._lanes.values():
            for sequence in lane.running.values():
                if sequence.job.cancelled and not sequence.cut:
                    lane.cut(sequence)
        self._jobs = [job for job in self._jobs if not job.cancelled]
        return True

    def _free(self) -> int:
        return SEQUENCES - sum(len(lane.running) for lane in self._lanes.values())

    def _admit(self) -> None:
        """Give free places to the requests with the fewest sequences."""
        free, tokens = self._free(), _PREFILL_TOKENS
        while free > 0 and tokens > 0 and (ready := [j for j in self._jobs if j.waiting]):
            job = min(ready, key=lambda j: (j.running, j.steps))
            sequence = job.take()
            prompt, begun = job.prompts[sequence.prompt], sequence.begun
            try:
                lane = self._lanes.get(job.stream_key) or self._open_lane(job)
                longest = job.longest[sequence.prompt]
                lane.stream.submit(sequence.key, prompt, begun, max_new_tokens=longest)
            except Exception as error:  # goes to its client
                _log.exception("a request can't be decoded")
                self._end(job, error)
                continue
            self._lanes[job.stream_key] = lane
            lane.running[sequence.key] = sequence
            free -= 1
            tokens -= len(prompt) + (len(begun.completions[0].token_ids) if begun else 0)

    def _open_lane(self, job: Job) -> _Lane:
        seed = job.params.seed if job.has_seed else 0
        params = replace(job.params, n=1, max_new_tokens=job.columns, seed=seed)
        return _Lane(open_stream(self._engine, params, max_num_seqs=SEQUENCES))

    def _make_room(self) -> None:
        """Cut sequences of greedy requests for requests that have none."""
        starved = [job for job in self._jobs if job.waiting and not job.running]
        if not starved or self._free() > 0:
            return
        uncut = {job: list[tuple[_Lane, _Sequence]]() for job in self._jobs}
        being_cut = 0
        for lane in self._lanes.values():
            for sequence in lane.running.values():
                if sequence.cut:
                    being_cut += 1
                elif sequence.job in uncut:
                    uncut[sequence.job].append((lane, sequence))
        fewest = min(job.steps for job in starved)
        for _ in range(len(starved) - being_cut):
            job = max(uncut, key=lambda j: (len(uncut[j]), j.steps))
            if not uncut[job] or (len(uncut[job]) == 1 and job.steps < fewest + _SLICE):
                return
            lane, sequence = uncut[job].pop()  # the latest, which has the fewest tokens
            lane.cut(sequence)

    def _next_lane(self) -> Hashable:
        self._turn += 1
        first = next(iter(self._lanes))
        if self._turn % 2:
            return first
        return min(self._lanes, key=lambda key: min(j.steps for j in self._lanes[key].jobs()))

    def _step(self, key: Hashable) -> None:
        lane = self._lanes.pop(key)
        jobs = lane.jobs()
        try:
            finished = lane.stream.step()
        except Exception as error:  # goes to its clients; the next requests are tried
            _log.exception("%d requests failed", len(jobs))
            lane.stream.close()
            for job in jobs:
                self._end(job, error)
            return
        for job in jobs:
            job.steps += 1
        for done in finished:
            sequence = lane.running.pop(done.key)
            job, completion = sequence.job, done.completion
            job.running -= 1
            if job.cancelled:
                continue
            if sequence.ended(done):
                index = sequence.prompt * job.params.n + sequence.completion
                job.deliver(Decoded(index, completion.token_ids, completion.finish_reason))
            else:
                job.put_back(sequence)
        if lane.running:
            self._lanes[key] = lane
        else:
            lane.stream.close()

    def _read_prompt(self) -> None:
        """Compute the log-probs of one prompt, of the request that has had the fewest."""
        reading = [job for job in self._jobs if job.unread]
        if not reading:
            return
        job = min(reading, key=lambda j: len(j.prompts) - len(j.unread))
        prompt = job.prompts[job.unread.pop()]
        assert self._model is not None
        assert job.prompt_logprobs is not None
        try:
            job.deliver(prompt_log_probs(self._model, prompt, job.prompt_logprobs))
        except Exception as error:  # goes to its client
            _log.exception("log-probs of a prompt failed")
            self._end(job, error)

    def _end(self, job: Job, event: Exception | None) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            job.cancelled = event is not None  # what it has in a lane is cut
            job.deliver(event)


@torch.inference_mode()
def prompt_log_probs(
    model: PreTrainedModel, ids: Sequence[int], top_k: int
) -> list[LogProbs | None]:
    """Return the log-probs of each token of a prompt; None for the first.

    An entry has the ids of the likeliest tokens, and the token's own, each with `logprob` (at
    temperature 1) and `rank` (from 1, of equals the highest).
    """
    tokens = torch.tensor(ids, device=model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    log_probs = logits.log_softmax(-1)
    token_log_probs = log_probs.gather(1, tokens[1:, None])
    ranks = (log_probs > token_log_probs).sum(1) + 1
    top_log_probs, likeliest = log_probs.topk(min(top_k, log_probs.shape[1]))
    rows: list[LogProbs | None] = [None]
    columns = (tokens[1:], token_log_probs[:, 0], ranks, likeliest, top_log_probs)
    lists = (column.tolist() for column in columns)
    for token, log_prob, rank, top, values in zip(*lists, strict=True):
        row = {str(id): {"logprob": values[at], "rank": at + 1} for at, id in enumerate(top)}
        rows.append(row | {str(token): {"logprob": log_prob, "rank": rank}})
    return rows
