"""The native engine's stream: continuous batching without an end, over the trainer's own storage.

A stream owns a queue, a table of rows and the slots they decode in; `seating.py` brings rows in.
Whatever interrupts decoding (an update that recomputes, an error, the caller) takes the rows out
with their tokens; from there they are seated again. So no failure loses or doubles a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import get_args

import torch
from torch import nn

from engine.errors import ConfigError, RolloutError
from engine.rollout.native.decoder import LlamaDecoder, can_graph
from engine.rollout.native.generic_slots import GenericDecoder
from engine.rollout.native.model_handle import ServedModel, whole
from engine.rollout.native.prefill_admission import StreamDecoder, plan_seating, seat
from engine.rollout.native.slots import Slots, enough_to_admit
from engine.rollout.native.stream_limits import StreamLimits
from engine.rollout.native.stream_rows import Request, StreamRows
from engine.rollout.native.weights import Unsupported, bind
from engine.rollout.protocol import SamplingParams
from engine.rollout.requests import RolloutStats, check_params, check_tokens
from engine.rollout.stream import (
    KvOnUpdate,
    Partial,
    PartialCompletion,
    StreamedCompletion,
    check_partial,
    draw_number,
)


class NativeStream:
    """A `RolloutStream`; made by `NativeEngine.stream`, whose weights it serves.

    >>> stream = engine.stream(SamplingParams(n=8, max_new_tokens=512), max_num_seqs=256)
    >>> stream.submit("row 17", [5, 6, 7])
    >>> while stream.in_flight or stream.waiting:
    ...     for done in stream.step():
    ...         use(done.key, done.completion)
    """

    def __init__(
        self,
        served: ServedModel,
        params: SamplingParams,
        limits: StreamLimits,
        kv_on_update: KvOnUpdate,
        *,
        cuda_graphs: bool = False,
    ) -> None:
        """Serve `served` with `params`, whose seed is complete.

        Raises RolloutError for bad parameters and ConfigError for limits that hold no request.
        """
        check_params(params)
        limits.check(params.n)
        self.stats = RolloutStats()  # of the stream's life; `prefill_tokens` has recomputed ones
        self._served, self._params, self._limits = served, params, limits
        if kv_on_update not in get_args(KvOnUpdate):
            raise ConfigError(
                f"kv_on_update={kv_on_update!r} is unknown; use one of {get_args(KvOnUpdate)}"
            )
        self._keeps, self._cuda_graphs = kv_on_update == "keep", cuda_graphs
        device = next(served.get().parameters()).device
        self._table = StreamRows(limits.max_num_seqs, params, limits.max_new_tokens, device)
        self._table.version = served.version
        self._seen = served.state()  # weights that the rows in flight are decoded with
        self._queue: deque[Request] = deque()
        self._open: dict[Hashable, Request] = {}  # all that is unfinished
        self._submitted = 0
        self._finished: list[StreamedCompletion] = []  # not returned, as a step failed after them
        self._decoding: tuple[Slots, StreamDecoder] | None = None  # None: no row is seated
        self._closed = False

    @property
    def policy_version(self) -> int:
        """Version of the tokens to come."""
        return self._table.version

    @property
    def in_flight(self) -> int:
        """Completions being decoded."""
        return self._table.active

    @property
    def waiting(self) -> int:
        """Completions waiting for a slot."""
        return sum(len(request.parts) for request in self._queue)

    def submit(
        self, key: Hashable, prompt_ids: Sequence[int], resume: Partial | None = None
    ) -> None:
        """Queue the `n` completions of a prompt, or those that `resume` left unfinished.

        `key` decides the draws (see `draw_number`) and may be used again once all its completions
        have been returned. Raises RolloutError for a bad prompt or partial, and for a key in use.
        """
        self._check_open()
        self._served.check()
        if key in self._open:
            raise RolloutError(
                f"stream key {key!r} is in use by an unfinished request; give each request a key "
                f"of its own, such as (epoch, row)"
            )
        vocabulary = self._served.vocabulary()
        draw, limit = draw_number(key), self._limits.check_prompt(key, prompt_ids, vocabulary)
        if resume is None:
            parts = [PartialCompletion(index, [], [], []) for index in range(self._params.n)]
        else:
            stops = self._params.stop_token_ids
            check_partial(resume, key, prompt_ids, self._params.n, limit, stops)
            parts = sorted(resume.completions, key=lambda part: part.completion_index)
            for part in parts:
                name = f"completion {part.completion_index} of request {key!r}"
                check_tokens(name, [*part.token_ids, prompt_ids[0]], vocabulary)
        prompt, number = list(prompt_ids), self._submitted
        request = Request(key, prompt, number, draw, limit, len(parts), parts)
        self._submitted += 1
        self.stats.prompt_tokens += len(prompt)
        self._open[key] = request
        self._queue.append(request)

    def step(self) -> list[StreamedCompletion]:
        """Seat waiting completions where slots are free, then decode one token of every row.

        Returns the completions that ended; with nothing to do, [] at once. Raises RolloutError for
        NaN logits and for weights that are not whole or were changed without `update_weights`; all
        unfinished completions then wait in the queue, to go on after an update or be taken out by
        `interrupt`. What ended in a step that failed comes from the next call.
        """
        self._check_open()
        if self._finished:
            finished, self._finished = self._finished, []
            return finished
        self._served.check()
        if not self._open:
            return []
        self._check_unchanged()
        try:
            with torch.inference_mode():
                self._admit()
                self._decode()
        except Exception:
            self._finished = self._harvest()
            self._displace()
            raise
        return self._harvest()

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Let the rows in flight go on under `model`'s weights, as policy `version`.

        None: the served model's storage holds the new weights. The engine and its other streams
        are updated with it; a stream finds out at its next step. With `kv_on_update="recompute"`
        the keys of all unfinished tokens are computed anew here. Raises RolloutError if the update
        fails; the stream serves nothing then until one succeeds, and loses no token.
        """
        self._check_open()
        with self._served.updating(model, version) as chosen, torch.inference_mode():
            self._rebind(whole(chosen))
        self._table.version = version
        self._seen = self._served.state()

    def interrupt(self) -> list[Partial]:
        """Take out all that is unfinished, the oldest request first; the stream stays open.

        Completions that have ended and were not returned still come from `step`. Works on a stream
        that refuses to serve, too.
        """
        self._check_open()
        self._displace()
        partials = [request.partial() for request in self._queue]
        self._queue.clear()
        self._open.clear()
        return partials

    def partials(self) -> list[Partial]:
        """Copies of all that is unfinished, the oldest request first; decoding goes on."""
        self._check_open()
        waiting = [request.partial() for request in self._queue]
        return [*self._table.partials(), *waiting]

    def close(self) -> None:
        """Drop all that is unfinished and free the cache; the engine serves on."""
        self._closed, self._decoding = True, None
        self._queue.clear()
        self._open.clear()
        self._finished = []

    def _admit(self) -> None:
        """Seat whole requests from the queue, when enough slots are free to make it worth it."""
        waiting = self.waiting
        free = self._limits.max_num_seqs if self._decoding is None else self._decoding[0].free
        if not waiting or free < enough_to_admit(
            waiting, self._limits.max_num_seqs, self._params.n
        ):
            return
        count = 0
        for request in self._queue:
            free -= len(request.parts)
            if free < 0:
                break
            count += 1
        self._seat(count, whole(self._served.get()))

    def _seat(self, count: int, model: nn.Module) -> None:
        """Seat the first `count` requests of the queue, over `model` if no row is seated yet."""
        if not count:
            return
        slots, decoder = self._decoding = self._decoding or self._start(model)
        requests = list(islice(self._queue, count))
        plan = plan_seating(requests, decoder.shares_prompts)
        rows = self._table.add(requests)
        for _ in requests:
            self._queue.popleft()
        seat(plan, rows, slots, decoder, self.stats)

    def _start(self, model: nn.Module) -> tuple[Slots, StreamDecoder]:
        """Empty slots over `model`.

        Caches are new as well: numbers of weights that had diverged would outlive their masks.
        """
        limits, params = self._limits, self._params
        count = limits.max_num_seqs
        decoder: StreamDecoder
        try:
            weights = bind(model)
        except Unsupported:
            columns = limits.longest_prompt + limits.max_new_tokens
            decoder = GenericDecoder(model, count, columns, self._table.device)
        else:
            decoder = LlamaDecoder(
                weights,
                count,
                params.n,
                limits.longest_prompt,
                limits.max_new_tokens,
                cuda_graphs=self._cuda_graphs and can_graph(weights),
            )
        return Slots(decoder, self._table, params, count, self.stats), decoder

    def _decode(self) -> None:
        if self._decoding is None:
            return
        slots, _ = self._decoding
        slots.compact()
        if slots.busy:
            slots.step()

    def _rebind(self, model: nn.Module) -> None:
        """Put `model` under the rows in flight."""
        if self._decoding is None or (self._keeps and self._decoding[1].adopt(model)):
            return
        displaced = self._displace()
        try:
            self._seat(displaced, model)
        except Exception:
            self._displace()
            raise

    def _displace(self) -> int:
        """Move all rows that have not ended to the queue's front; return their requests' number."""
        requests = self._table.evacuate()
        self._queue.extendleft(reversed(requests))
        self._decoding = None
        return len(requests)

    def _harvest(self) -> list[StreamedCompletion]:
        found = self._table.harvest()
        for done in found:
            self.stats.generated_tokens += len(done.completion.token_ids)
        for key in {done.key for done in found}:
            if not self._open[key].open:
                del self._open[key]
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the stream was closed; open another one by engine.stream")

    def _check_unchanged(self) -> None:
        if self._served.state() != self._seen:
            raise RolloutError(
                f"the weights were changed since the stream took policy version "
                f"{self.policy_version}, so its tokens would be recorded under the wrong one; call "
                f"stream.update_weights(None, version) after each change"
            )
