"""Requests of many clients as batches of the rollout engine, in one thread.

With the log-probs of a prompt's tokens. Loads torch, so `native_server` imports it once it
listens.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from engine.errors import RolloutError
from engine.rollout.protocol import Completion, RolloutEngine, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


BATCH = 64  # sequences
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a request."""

    prompt: Sequence[int]
    params: SamplingParams
    has_seed: bool  # whether params.seed is the client's
    result: Future[list[Completion]] = field(default_factory=Future)  # params.n completions

    @property
    def batch_key(self) -> object:
        """Equal for jobs that can be decoded in one call; lengths are rounded up together."""
        params = self.params
        if self.has_seed:
            return id(self)
        longest = 1 << (params.max_new_tokens - 1).bit_length()
        return params.n, params.temperature, params.top_k, params.top_p, longest


class Batcher:
    """Decodes jobs until it is closed.

    >>> batcher = Batcher(engine)
    >>> batcher.submit([5, 6, 7], SamplingParams(max_new_tokens=8)).result(timeout=60)
    [Completion(prompt_index=0, …)]
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._later: list[Job] = []  # taken from the queue, of another kind than what is decoded
        self._random = random.Random()
        self.failed = ""  # why it decodes nothing any more
        threading.Thread(target=self._run, name="decode", daemon=True).start()

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, has_seed: bool = False
    ) -> Future[list[Completion]]:
        """Queue a prompt's completions; the prompt must have been checked."""
        job = Job(prompt, params, has_seed)
        if self.failed:
            job.result.set_exception(RolloutError(self.failed))
        else:
            self._waiting.put(job)
        return job.result

    def close(self) -> None:
        """Take no more jobs; those that wait are cancelled, one that is decoded ends by itself."""
        self.failed = self.failed or "the server is stopping"
        self._waiting.put(None)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._decode(batch)
            except Exception as error:  # its clients are told, and the next batch is tried
                _log.exception("a batch of %d requests failed", len(batch))
                for job in batch:
                    if not job.result.done():
                        job.result.set_exception(error)
        for job in self._later:
            job.result.cancel()

    def _next_batch(self) -> list[Job]:
        """Wait for a job; return it with all others of its kind that fit, none when closed."""
        batch: list[Job] = []
        while not batch:
            if not self._take():
                break
            first, rest, size = self._later[0].batch_key, [], 0
            for job in self._later:
                if job.batch_key != first or (batch and size + job.params.n > BATCH):
                    rest.append(job)
                elif job.result.set_running_or_notify_cancel():  # else its client has gone
                    batch.append(job)
                    size += job.params.n
            self._later = rest
        return batch

    def _take(self) -> bool:
        """Move what waits to `_later`, one at least; False when closed."""
        while True:
            try:
                job = self._waiting.get(block=not self._later)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._later.append(job)

    def _decode(self, batch: list[Job]) -> None:
        first = batch[0].params
        seed = first.seed if batch[0].has_seed else self._random.getrandbits(62)
        longest = max(job.params.max_new_tokens for job in batch)
        params = replace(first, max_new_tokens=longest, seed=seed)
        done = self._engine.generate([job.prompt for job in batch], params)
        for i, job in enumerate(batch):
            own = done[i * params.n : (i + 1) * params.n]
            job.result.set_result([_cut(one, job.params.max_new_tokens) for one in own])


def _cut(one: Completion, limit: int) -> Completion:
    """A completion as it would have ended at its own limit."""
    if len(one.token_ids) <= limit:
        return one
    return replace(
        one,
        token_ids=one.token_ids[:limit],
        log_probs=one.log_probs[:limit],
        finish_reason="length",
    )


LogProbs = dict[str, dict[str, float]]


@torch.inference_mode()
def prompt_log_probs(
    model: PreTrainedModel, ids: Sequence[int], top_k: int
) -> list[LogProbs | None]:
    """For each token: None for the first; then the likeliest tokens' ids, and its own, each with
    `logprob` (at temperature 1) and `rank` (from 1, of equals the highest)."""
    tokens = torch.tensor(ids, device=model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    log_probs = logits.log_softmax(-1)
    own = log_probs.gather(1, tokens[1:, None])
    ranks = (log_probs > own).sum(1) + 1
    values, likeliest = log_probs.topk(min(top_k, log_probs.shape[1]))
    found: list[LogProbs | None] = [None]
    columns = (x.tolist() for x in (tokens[1:], own[:, 0], ranks, likeliest, values))
    for token, log_prob, rank, top, top_values in zip(*columns, strict=True):
        place = {
            str(one): {"logprob": value, "rank": i}
            for i, (one, value) in enumerate(zip(top, top_values, strict=True), 1)
        }
        found.append(place | {str(token): {"logprob": log_prob, "rank": rank}})
    return found
