"""The native engine's stream: open-ended continuous batching over the trainer's own storage.

It adds to the scheduler what changes from step to step: requests with keys of their own, and
weights. An update that recomputes, or an error, preempts the running sequences with their tokens,
and they are admitted again later: no failure loses or repeats a token.
"""

from collections.abc import Hashable, Sequence
from typing import get_args

import torch
from torch import nn

from engine.errors import ConfigError, RolloutError
from engine.rollout import protocol, stream
from engine.rollout.native.decoder import Decoder
from engine.rollout.native.kv_cache import KeptPrefix, KeptPrefixes, Limits
from engine.rollout.native.model_handle import Model, ModelHandle
from engine.rollout.native.scheduler import RolloutStats, Scheduler
from engine.rollout.native.sequences import Request, SequenceTable
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import KvOnUpdate, PartialRequest, StreamedCompletion


class NativeStream(stream.RolloutStream):
    """A stream that `NativeEngine.stream` makes, whose weights it serves."""

    def __init__(
        self,
        handle: ModelHandle,
        params: SamplingParams,
        limits: Limits,
        kv_on_update: KvOnUpdate,
        keep_prefixes: bool,
    ) -> None:
        """Serve the model of `handle` with `params`, whose seed is complete; see `NativeEngine`."""
        protocol.check_params(params)
        if limits.max_num_seqs < params.n:
            raise ConfigError(
                f"max_num_seqs={limits.max_num_seqs} is less than the n={params.n} completions of "
                f"a prompt, which a stream admits together; raise it to {params.n} or more"
            )
        if not 1 <= limits.longest_prompt < limits.max_model_len:
            raise ConfigError(
                f"longest_prompt={limits.longest_prompt} must be 1 or more and less than "
                f"max_model_len={limits.max_model_len}"
            )
        if kv_on_update not in get_args(KvOnUpdate):
            raise ConfigError(f"kv_on_update={kv_on_update!r} is none of {get_args(KvOnUpdate)}")
        if handle.budget is not None:
            longest = min(limits.longest_prompt + limits.max_new_tokens, limits.max_model_len)
            name = "the longest prompt of the stream"
            handle.budget.check(name, limits.longest_prompt, longest)
        self.stats = RolloutStats()  # recomputed prefills count again
        self._handle, self._params, self._limits = handle, params, limits
        self._keeps_kv = kv_on_update == "keep"
        self._table = SequenceTable(
            limits.max_num_seqs,
            params,
            limits.max_new_tokens,
            next(handle.get().parameters()).device,
            version=handle.version,
            track_versions=True,
        )
        self._prefixes: KeptPrefixes | None = None
        if keep_prefixes and params.n == 1 and handle.budget is None:
            self._prefixes = KeptPrefixes(limits.max_num_seqs * limits.max_model_len)
        self._scheduler = Scheduler(
            self._table,
            params,
            limits.max_num_seqs,
            self.stats,
            split_requests=False,
            prefixes=self._prefixes,
        )
        self._fingerprint = handle.fingerprint()  # of the weights of the running sequences
        self._open: dict[Hashable, Request] = {}  # all that is unfinished
        self._submitted = 0
        self._finished: list[StreamedCompletion] = []  # not returned, as a step failed after them

    @property
    def policy_version(self) -> int:
        return self._table.version

    @property
    def in_flight(self) -> int:
        return self._table.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        resume: PartialRequest | None = None,
        *,
        max_new_tokens: int | None = None,
        after: Hashable | None = None,
    ) -> None:
        self._check_open()
        self._handle.check()
        stream.check_unused(key, self._open)
        limits, vocab_size = self._limits, self._handle.vocab_size()
        name = f"request {key!r}"
        prompt_name, length = f"the prompt of {name}", len(prompt_ids)
        protocol.check_prompt(prompt_name, prompt_ids, limits.max_model_len, vocab_size)
        if length > limits.longest_prompt:
            raise RolloutError(
                f"{prompt_name} has {length} tokens and the stream takes "
                f"longest_prompt={limits.longest_prompt}; open the stream with a greater one"
            )
        index = stream.noise_index(key)
        max_tokens = min(limits.max_new_tokens, limits.max_model_len - length)
        max_tokens = stream.request_limit(max_new_tokens, max_tokens, key)
        parts = stream.parts_to_sample(
            key, prompt_ids, resume, self._params, max_tokens, vocab_size
        )
        prompt, number = list(prompt_ids), self._submitted
        request = Request(key, name, prompt, number, index, max_tokens, len(parts), parts, after)
        self._submitted += 1
        self._open[key] = request
        self._scheduler.add(request)

    def forget(self, key: Hashable) -> None:
        if self._prefixes is not None:
            self._prefixes.drop(key)

    def cut(self, key: Hashable) -> None:
        request = self._open.get(key)
        if request is not None:
            request.cut = True
            self._table.cut(request)

    def step(self) -> list[StreamedCompletion]:
        """Decode one token of every sequence, as `RolloutStream.step`.

        Raises RolloutError for NaN logits, and for weights that are incomplete or were changed
        without `update_weights`; what is unfinished then waits for an update, and what ended in a
        step that failed comes from the next call.
        """
        self._check_open()
        if self._finished:
            finished, self._finished = self._finished, []
            return finished
        self._handle.check()
        if not self._open:
            return []
        if self._handle.fingerprint() != self._fingerprint:
            raise RolloutError(
                f"the weights were changed since the stream took policy version "
                f"{self.policy_version}, so its tokens would be recorded under the wrong one; call "
                f"stream.update_weights(None, version) after each change"
            )
        try:
            with torch.inference_mode():
                decoder = self._scheduler.decoder or self._bind(self._handle.get())
                with decoder.session():
                    self._scheduler.step()
        except Exception:
            self._finished = self._take_finished()
            self._scheduler.preempt()
            raise
        return self._take_finished()

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Continue the running sequences under `model`'s weights, as policy `version`.

        None: the served model's storage holds the new weights. The engine and its other streams
        are updated with it. Raises RolloutError if that fails; nothing is served then until an
        update succeeds, and no token is lost.
        """
        self._check_open()
        with self._handle.updating(model, version) as chosen, torch.inference_mode():
            self._rebind(chosen)
        self._table.version = version
        self._fingerprint = self._handle.fingerprint()

    def partials(self) -> list[PartialRequest]:
        self._check_open()
        return self._scheduler.partials()

    def close(self) -> None:
        self._closed = True
        self._scheduler.clear()
        self._open.clear()
        self._finished = []

    def _bind(self, model: Model) -> Decoder:
        n, limits = self._params.n, self._limits
        decoder = self._handle.decoder(model, n, limits, static_batches=False)
        self._scheduler.bind(decoder)
        return decoder

    def _rebind(self, model: Model) -> None:
        assert isinstance(model, nn.Module), "streams are not opened over shards"
        decoder = self._scheduler.decoder
        if decoder is not None and self._keeps_kv and decoder.rebind(model):
            return
        if self._prefixes is not None:
            self._prefixes.clear()
        if decoder is None:
            return
        preempted = self._scheduler.preempt()
        if not preempted:
            return
        try:
            with self._bind(model).session():
                self._scheduler.admit_first(preempted)
        except Exception:
            self._scheduler.preempt()
            raise

    def _take_finished(self) -> list[StreamedCompletion]:
        finished = []
        for request, index, completion in self._table.take_finished():
            kv = self._scheduler.take_kept(request.number)
            if self._prefixes is not None and kv is not None:
                ids = request.prompt_ids + completion.token_ids[:-1]
                self._prefixes.add(request.key, KeptPrefix(ids, kv))
            finished.append(StreamedCompletion(request.key, index, completion))
            if not request.unfinished:
                self._open.pop(request.key, None)  # two may have ended at once
        return finished
