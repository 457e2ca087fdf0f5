"""The rollout engine `native`: decodes with the trainer's own parameters, copying none of them.

An optimizer step is seen by the next rollout as it is; `update_weights` only records the version.
Models of the Llama family take the fast path of `decoder.py`, others that of `generic.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from engine.errors import RolloutError
from engine.rollout.native import generic
from engine.rollout.native.decoder import LlamaDecoder, can_graph
from engine.rollout.native.model_handle import Model, ServedModel
from engine.rollout.native.rows import RowResults
from engine.rollout.native.scheduler import Scheduler
from engine.rollout.native.stream import NativeStream, StreamLimits
from engine.rollout.native.tp_shards import SlicedModel
from engine.rollout.native.weights import ModelWeights, Unsupported, bind
from engine.rollout.protocol import Completion, SamplingParams, register_engine
from engine.rollout.requests import RolloutStats, check_request, resolve_max_model_len
from engine.rollout.stream import KvOnUpdate


@register_engine("native")
class NativeEngine:
    """Rollouts on the device and in the storage of the trainer's model.

    >>> engine = NativeEngine(model, max_num_seqs=512)
    >>> engine.generate([[5, 6, 7]], SamplingParams(n=2, max_new_tokens=16, stop_token_ids=(2,)))
    [Completion(prompt_index=0, …), Completion(prompt_index=0, …)]
    """

    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int = 512,
        max_model_len: int | None = None,
        kv_cache_memory_mb: int | None = None,
        seed: int = 0,
        cuda_graphs: bool = False,
    ) -> None:
        """Bind to `model`, a transformers causal LM, or to this rank's slices of one.

        With slices, all ranks of their group must make the same calls; each gets all completions.

        `max_model_len` defaults to the model's context. `kv_cache_memory_mb` is taken for the sake
        of one set of options and not used: the cache follows the rows in flight. `seed` is added
        to that of each request. `cuda_graphs` replays decode steps as graphs where the model is on
        a GPU, whole and of the Llama family; each completion then keeps its prompt's keys for
        itself. Raises ConfigError for a length beyond the model's context.
        """
        if max_num_seqs < 1:
            raise RolloutError(f"max_num_seqs={max_num_seqs} decodes nothing; use 1 or more")
        self.stats = RolloutStats()
        self._max_num_seqs, self._seed = max_num_seqs, seed
        self._cuda_graphs = cuda_graphs
        self._served = ServedModel(model)
        self._max_model_len = resolve_max_model_len(max_model_len, _context(model))

    @property
    def policy_version(self) -> int:
        return self._served.version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Return `n` completions a prompt, in order; `on_progress` gets the number finished so far.

        A completion ends at a stop token, at `max_new_tokens`, or at `max_model_len`. Raises
        RolloutError for a bad request, NaN logits, and weights that are not whole.
        """
        model = self._checked(prompts, params)
        self.stats = RolloutStats(prompt_tokens=sum(map(len, prompts)))
        if not prompts:
            return []
        started = time.perf_counter()
        with torch.inference_mode():
            completions = self._decode(model, prompts, params, on_progress)
        self.stats.seconds = time.perf_counter() - started
        return completions

    def _checked(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Model:
        """The model, if this rank and those it decodes with can serve this request."""
        tp, problem = self._served.tp, None
        try:
            model = self._served.get()
            check_request(prompts, params, self._max_model_len, self._served.vocabulary())
        except RolloutError as error:
            if tp is None:
                raise
            problem = error
        if tp is not None:
            tp.agree(self._served.version, prompts, params, problem)
        return model

    def prepare(self) -> None:
        """Do now what a rollout does before its first token, to see what it costs.

        It looks the weights up; only those with LoRA adapters are computed and take memory.
        """
        with suppress(Unsupported), torch.inference_mode():
            _weights(self._served.get())

    def _decode(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None,
    ) -> list[Completion]:
        params = dataclasses.replace(params, seed=params.seed + self._seed)
        slots = min(self._max_num_seqs, len(prompts) * params.n)
        device = next(model.parameters()).device
        results = RowResults(prompts, params, self._max_model_len, device, on_progress)
        try:
            weights = _weights(model)
        except Unsupported:
            assert isinstance(model, nn.Module)  # slices were checked when they came
            generic.decode(model, prompts, params, slots, results, self.stats)
        else:
            longest = max(map(len, prompts))
            new_tokens = min(params.max_new_tokens, self._max_model_len)
            graphs = can_graph(weights) and self._cuda_graphs
            decoder = LlamaDecoder(
                weights, slots, params.n, longest, new_tokens, cuda_graphs=graphs
            )
            Scheduler(decoder, prompts, params, slots, results, self.stats).run()
        return results.completions(self._served.version, self.stats)

    def stream(
        self,
        params: SamplingParams,
        *,
        max_num_seqs: int | None = None,
        longest_prompt: int | None = None,
        kv_on_update: KvOnUpdate = "recompute",
    ) -> NativeStream:
        """Open a stream: requests come and go, and weights change, while it decodes.

        At most `max_num_seqs` rows (default: the engine's) decode at once, `params.n` a request,
        on prompts of at most `longest_prompt` tokens (default: all that leave room).

        `kv_on_update` says what an update does with the keys and values of the tokens in flight.
        "recompute", the default, computes them anew from the new weights: each log-prob is then
        exactly that of a forward pass of its version's weights over the whole sequence, which is
        what importance ratios assume, for the price of one prefill of all that is in flight.
        "keep" (PipelineRL) leaves the old ones, so that an update costs nothing and later tokens
        are drawn from a mixture of policies, whose log-probs are recorded as they were drawn. A
        model outside the Llama family is recomputed in either case.

        Raises ConfigError for limits that hold no request and RolloutError for bad `params`, and
        on tensor-parallel ranks, where nothing keeps the ranks' requests and steps alike.
        """
        if self._served.tp is not None:
            raise RolloutError(
                "a native stream decodes on one rank, and this engine holds a tensor-parallel "
                "slice; use rollout tp=1 for streams, or generate"
            )
        limits = StreamLimits(
            max_num_seqs=self._max_num_seqs if max_num_seqs is None else max_num_seqs,
            longest_prompt=self._max_model_len - 1 if longest_prompt is None else longest_prompt,
            max_new_tokens=min(params.max_new_tokens, self._max_model_len - 1),
            max_model_len=self._max_model_len,
        )
        params = dataclasses.replace(params, seed=params.seed + self._seed)
        return NativeStream(
            self._served, params, limits, kv_on_update, cuda_graphs=self._cuda_graphs
        )

    def update_weights(self, model: Model | None, version: int) -> None:
        """Serve `model`'s storage from now on, as policy `version`; nothing is copied.

        None: the served model's storage holds the new weights.
        """
        with self._served.updating(model, version):
            pass

    def close(self) -> None:
        """Let go of the model; `generate` and streams raise RolloutError afterwards."""
        self._served.release()


def _weights(model: Model) -> ModelWeights:
    """Look the weights up; raises Unsupported where only a model's own forward will do."""
    return model.weights() if isinstance(model, SlicedModel) else bind(model)


def _context(model: Any) -> int | None:
    config: Any = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None)
