"""The rollout engine `native`: decodes with the trainer's own parameters, copying none of them.

An optimizer step is seen by the next rollout as it is; `update_weights` only records the version.
"""

import dataclasses
from contextlib import suppress

import torch

from engine.errors import RolloutError
from engine.rollout import protocol
from engine.rollout.native.decoding_weights import UnsupportedModel
from engine.rollout.native.kv_cache import Limits
from engine.rollout.native.model_handle import Model, ModelHandle
from engine.rollout.native.native_stream import NativeStream
from engine.rollout.native.scheduler import RolloutStats, Scheduler
from engine.rollout.native.sequences import Request, SequenceTable
from engine.rollout.protocol import Completion, OnProgress, SamplingParams, TokenLists
from engine.rollout.stream import KvOnUpdate, PartialCompletion
from engine.rollout.trainer_model import context_length

_SETTINGS = frozenset(
    {"max_num_seqs", "kv_cache_memory_mb", "cuda_graphs", "kv_on_update"}
    | {"enable_rollout_routing_replay", "lora"}
)


@protocol.register_engine(
    "native",
    protocol.EngineCapabilities(
        streams=True, cuts=True, adapters=True, decodes_shards=True, settings=_SETTINGS
    ),
    options=lambda config: {
        "cuda_graphs": config.cuda_graphs,
        "lora": config.lora,
        "routed_experts": config.enable_rollout_routing_replay,
    },
)
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
        routed_experts: bool = False,
        lora: str = "",
    ) -> None:
        """Bind to a transformers causal LM, or to this rank's shard of one.

        With a shard, all ranks of its group must make the same calls; each gets all completions.
        `max_model_len` defaults to the model's context. The cache grows with the running sequences,
        or is allocated for as many of the longest as fit `kv_cache_memory_mb` MiB on this rank; the
        others wait, and one that can't fit is refused. `seed` is added to that of each request.
        `cuda_graphs` needs a whole model of the Llama family on a GPU; completions then share no
        keys. `routed_experts`: completions of `generate` say which experts their tokens were given
        to. `lora="adapter"`: adapters and a packed base are decoded as they are stored; otherwise
        decoding begins with a dense copy of what they are on, which is dropped when it ends.

        Raises ConfigError for a length beyond the context, for an unknown cache size, and for an
        unknown `lora`.
        """
        if max_num_seqs < 1:
            raise RolloutError(f"max_num_seqs={max_num_seqs} decodes nothing; use 1 or more")
        protocol.check_lora(lora)
        self.stats = RolloutStats()
        self._max_num_seqs, self._seed, self._routed_experts = max_num_seqs, seed, routed_experts
        self._max_model_len = protocol.resolve_max_model_len(max_model_len, context_length(model))
        self._handle = ModelHandle(model, cuda_graphs, kv_cache_memory_mb, merge=lora != "adapter")

    @property
    def policy_version(self) -> int:
        return self._handle.version

    def generate(
        self, prompts: TokenLists, params: SamplingParams, on_progress: OnProgress = None
    ) -> list[Completion]:
        """Return `n` completions a prompt, in order.

        A completion ends at a stop token, at `max_new_tokens`, or at `max_model_len`. Raises
        RolloutError for a bad request, NaN logits, and incomplete weights.
        """
        model = self._checked_model(prompts, params)
        self.stats = RolloutStats()
        if not prompts:
            return []
        with torch.inference_mode():
            return self._generate(model, prompts, params, on_progress)

    def _checked_model(self, prompts: TokenLists, params: SamplingParams) -> Model:
        """Return the model, if this rank and those it decodes with can serve this request."""
        tp, budget, problem = self._handle.tp, self._handle.budget, None
        try:
            model, vocabulary = self._handle.get(), self._handle.vocab_size()
            protocol.check_request(prompts, params, self._max_model_len, vocabulary)
            for index, prompt in enumerate(prompts):
                longest = min(len(prompt) + params.max_new_tokens, self._max_model_len)
                if budget is not None:
                    budget.check(f"prompt {index}", len(prompt), longest)
        except RolloutError as error:
            if tp is None:
                raise
            problem = error
        if tp is not None:
            tp.check_same_request(self._handle.version, prompts, params, problem)
        return model

    def prepare(self) -> None:
        """Do what a rollout does before its first token, to see what merging adapters costs."""
        with suppress(UnsupportedModel), torch.inference_mode():
            self._handle.bind(self._handle.get())

    def _generate(
        self, model: Model, prompts: TokenLists, params: SamplingParams, on_progress: OnProgress
    ) -> list[Completion]:
        params = dataclasses.replace(params, seed=params.seed + self._seed)
        total, longest = len(prompts) * params.n, max(map(len, prompts))
        slots = min(self._max_num_seqs, total)
        new_tokens = min(params.max_new_tokens, self._max_model_len)
        decoder = self._handle.decoder(
            model,
            params.n,
            Limits(slots, longest, new_tokens, self._max_model_len),
            static_batches=True,
            routed_experts=self._routed_experts,
        )
        table = SequenceTable(
            total,
            params,
            new_tokens,
            next(model.parameters()).device,
            version=self._handle.version,
            track_versions=False,
            longest_prompt=longest,
        )
        split_requests = not decoder.static_batches
        scheduler = Scheduler(table, params, slots, self.stats, split_requests=split_requests)
        scheduler.bind(decoder)
        for index, prompt in enumerate(prompts):
            request = Request(
                key=index,
                name=f"prompt {index}",
                prompt_ids=list(prompt),
                number=index,
                noise_index=params.first_prompt + index,
                max_tokens=min(params.max_new_tokens, self._max_model_len - len(prompt)),
                unfinished=params.n,
                waiting=[PartialCompletion(i, [], [], []) for i in range(params.n)],
            )
            scheduler.add(request)
        with decoder.session():
            while (finished := table.finished) < total:
                scheduler.step()
                if on_progress is not None and table.finished > finished:
                    on_progress(table.finished)
        sequences = table.take_finished()
        sequences.sort(key=lambda s: (s.request.number, s.completion_index))
        return [sequence.completion for sequence in sequences]

    def stream(
        self,
        params: SamplingParams,
        *,
        max_num_seqs: int | None = None,
        longest_prompt: int | None = None,
        kv_on_update: KvOnUpdate = "recompute",
        keep_prefixes: bool = False,
    ) -> NativeStream:
        """Open a stream: requests are added, and weights change, while it decodes.

        At most `max_num_seqs` sequences (default: the engine's) run at once, `params.n` a request,
        on prompts of at most `longest_prompt` tokens (default: all that leave room).

        `kv_on_update` says what an update does with the keys and values of the running sequences.
        "recompute" prefills them again: each log-prob is then exactly that of its version's weights
        over the whole sequence, as importance ratios assume. "keep" (PipelineRL) costs nothing, and
        later tokens are drawn from a mixture of policies, whose log-probs are recorded as drawn.
        A model outside the Llama family is recomputed in either case.

        `keep_prefixes`, for n=1 of the Llama family without `kv_cache_memory_mb`: what ended is
        kept, as much as the slots hold, for requests that go on from it (`submit(…, after=key)`).

        Raises ConfigError for limits that fit no request, RolloutError for bad `params` and on
        tensor-parallel ranks, where nothing keeps the ranks' requests and steps alike.
        """
        if self._handle.tp is not None:
            raise RolloutError(
                "a native stream decodes on one rank, and this engine has a tensor-parallel "
                "shard; use rollout tp=1 for streams, or generate"
            )
        limits = Limits(
            max_num_seqs=self._max_num_seqs if max_num_seqs is None else max_num_seqs,
            longest_prompt=self._max_model_len - 1 if longest_prompt is None else longest_prompt,
            max_new_tokens=min(params.max_new_tokens, self._max_model_len - 1),
            max_model_len=self._max_model_len,
        )
        params = dataclasses.replace(params, seed=params.seed + self._seed)
        return NativeStream(self._handle, params, limits, kv_on_update, keep_prefixes)

    def update_weights(self, model: Model | None, version: int) -> None:
        """Serve `model`'s storage (None: the present one's) as policy `version`, uncopied."""
        with self._handle.updating(model, version):
            pass

    def close(self) -> None:
        """Drop the model; `generate` and streams raise RolloutError afterwards."""
        self._handle.release()
