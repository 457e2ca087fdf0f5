"""The model that an engine and its streams decode with: its version, and whether it may serve.

It is the trainer's whole model, or a tensor-parallel rank's shard of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from engine.errors import ConfigError, RolloutError
from engine.rollout.native import decoding_weights
from engine.rollout.native.decoder import Decoder, GenericDecoder, RoutedExperts
from engine.rollout.native.kv_cache import KvBudget, Limits
from engine.rollout.native.llama_decoder import LlamaDecoder, can_graph
from engine.rollout.protocol import WeightGuard
from engine.rollout.trainer_model import embedding_weight, text_config

Model = nn.Module | decoding_weights.TPModelShard


class ModelHandle:
    """One model in the trainer's storage, shared by all that decode with it."""

    def __init__(
        self,
        model: Model,
        cuda_graphs: bool = False,
        kv_cache_memory_mb: int | None = None,
        *,
        merge: bool = True,
    ) -> None:
        """Hold `model`; `merge`: its decoders use adapters merged into a dense copy of the base."""
        self._guard = WeightGuard("native")
        self._model: Model | None = model
        self._parameters = list(model.parameters())
        self._cuda_graphs, self._merge = cuda_graphs, merge
        self.budget: KvBudget | None = None
        if kv_cache_memory_mb is not None:
            self.budget = KvBudget(kv_cache_memory_mb, self.kv_token_bytes())

    @property
    def version(self) -> int:
        return self._guard.version

    def check(self) -> None:
        """Raise RolloutError unless the weights are complete."""
        self._guard.check()

    def get(self) -> Model:
        """Return the model; raises RolloutError unless its weights are complete."""
        self._guard.check()
        assert self._model is not None
        return self._model

    @property
    def tp(self) -> decoding_weights.TensorParallel | None:
        """The ranks that decode together with this one."""
        return self._model.tp if isinstance(self._model, decoding_weights.TPModelShard) else None

    @contextmanager
    def updating(self, model: Model | None, version: int) -> Iterator[Model]:
        """Serve `model` (None: the same one) as policy `version` once the block has ended."""
        with self._guard.updating(version):
            chosen = self._model if model is None else model
            if chosen is None:
                raise RolloutError("the engine was closed and has no model; pass one")
            named = dict(chosen.named_parameters())
            if meta := next((name for name, p in named.items() if p.is_meta), None):
                raise RolloutError(f"parameter {meta!r} is on the meta device; load the model")
            self._model, self._parameters = chosen, list(named.values())
            yield chosen

    def release(self) -> None:
        """Drop the model; nothing is served from now on."""
        self._guard.refuse("it was closed")
        self._model, self._parameters = None, []

    def vocab_size(self) -> int:
        """Count the rows of the input embedding, on all ranks together."""
        model = self.get()
        if isinstance(model, decoding_weights.TPModelShard):
            return int(model.config.vocab_size)
        return embedding_weight(model).shape[0]

    def kv_token_bytes(self) -> int:
        """Count a token's bytes of keys and values on this rank; ConfigError if unknown."""
        model = self.get()
        config = text_config(model)
        heads = getattr(config, "num_attention_heads", 0)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        hidden = getattr(config, "hidden_size", 0)
        width = getattr(config, "head_dim", None) or hidden // max(1, heads)
        layers = getattr(config, "num_hidden_layers", 0)
        if not (layers and kv_heads and width):
            raise ConfigError(
                "rollout.kv_cache_memory_mb with a model whose config names no num_hidden_layers, "
                "num_attention_heads and hidden_size, so its cache has no known size; leave it out"
            )
        if self.tp is not None:
            kv_heads = max(1, kv_heads // self.tp.size)
        return 2 * layers * kv_heads * width * next(iter(model.parameters())).element_size()

    def fingerprint(self) -> tuple[int, int, int]:
        """Return a value that changes with the model and with writes that autograd counts."""
        writes = sum(p._version for p in self._parameters if not p.is_inference())
        return self.version, id(self._model), writes

    def bind(self, model: Model) -> decoding_weights.LlamaWeights:
        """Look the weights up; raises UnsupportedModel where only a model's own forward will do."""
        if isinstance(model, decoding_weights.TPModelShard):
            return model.weights()
        return decoding_weights.bind(model, merge=self._merge)

    def decoder(
        self,
        model: Model,
        n: int,
        limits: Limits,
        *,
        static_batches: bool,
        routed_experts: bool = False,
    ) -> Decoder:
        """Create the fastest decoder for `model`, with `n` sequences a prompt.

        `static_batches` has a model outside the Llama family decode batch after batch, each of them
        prefilled once. CUDA graphs are left out where steps can't be captured.
        """
        slots, columns = limits.max_num_seqs, limits.longest_prompt + limits.max_new_tokens
        try:
            weights = self.bind(model)
        except decoding_weights.UnsupportedModel:
            if self.budget is not None:
                slots, columns, _ = self.budget.room(1, limits)
            assert isinstance(model, nn.Module), "a shard was bound before"
            device = next(model.parameters()).device
            routed = RoutedExperts(model) if routed_experts else None
            return GenericDecoder(
                model, slots, columns, device, static_batches=static_batches, routed=routed
            )
        graphed = self._cuda_graphs and can_graph(weights)
        room = None if self.budget is None else self.budget.room(1 if graphed else n, limits)
        sizes = limits.longest_prompt, limits.max_new_tokens
        return LlamaDecoder(weights, slots, n, *sizes, room=room, cuda_graphs=graphed)
