"""The trainer's own parameters, looked up for decoding without a copy.

`bind` reads a transformers model of the Llama family into plain tuples of its parameters and
refuses what it does not know exactly. A matrix with a LoRA adapter is computed, W + α/r · B·A, once
a binding; or it stays as it is and the adapter's product is added to its own, a packed one being
unpacked for each product. `TPModelShard` is a tensor-parallel rank's shard; all ranks of its group
run the same rollout in step, with whole hidden states after each block and whole logits.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from engine.errors import ModelError, RolloutError
from engine.kernels.decoding_ops import DecoderWeights, LayerWeights, LinearWeights, RMSNorm
from engine.rollout.protocol import SamplingParams, TokenLists
from engine.rollout.trainer_model import LinearFunction, linear_function


class TensorParallel:
    """This rank's index in a tensor-parallel group, and the collectives of decoding.

    A rank that dies or falls out of step makes the others raise RolloutError within the group's
    timeout; from then on nothing is decoded with it.
    """

    def __init__(self, group: dist.ProcessGroup, index: int, device: torch.device) -> None:
        """Join `group`, all ranks together, as the holder of shard `index`, of any order."""
        self._group, self.index, self._device = group, index, device
        self.size = group.size()
        self._failure: str | None = None
        indices = self._gather([index])[:, 0].tolist()
        if sorted(indices) != list(range(self.size)):
            raise RolloutError(
                f"the ranks of a tensor-parallel group say they hold shards {indices}; give each "
                f"of 0 to {self.size - 1} to one rank"
            )
        self._order = [indices.index(i) for i in range(self.size)]  # group rank of each shard
        self._widths = [0] * self.size  # rows of each shard of the vocabulary
        self._start = 0

    def partition_vocabulary(self, rows: int) -> int:
        """Return the sum of all ranks' `rows`; -1 if one passes -1. Collective."""
        widths = self._gather([rows])[:, 0].tolist()
        if min(widths) < 0:
            return -1
        self._widths = [widths[rank] for rank in self._order]
        self._start = sum(self._widths[: self.index])
        return sum(self._widths)

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Embed `ids` to `[…, hidden]`, from the embedding's shards `[v, H]`."""
        local, rows = ids - self._start, embedding.shape[0]
        if rows == 0:
            return self.all_reduce(embedding.new_zeros(*ids.shape, embedding.shape[1]))
        elsewhere = (local < 0) | (local >= rows)
        embedded = F.embedding(local.clamp(0, rows - 1), embedding)
        return self.all_reduce(embedded.masked_fill_(elsewhere[..., None], 0.0))

    def all_reduce(self, partial: Tensor) -> Tensor:
        with self._collective():
            dist.all_reduce(partial, group=self._group)
        return partial

    def gather_logits(self, local: Tensor) -> Tensor:
        """Concatenate the ranks' logits: `[R, v]` each → `[R, V]`."""
        widest = max(self._widths)
        padded = F.pad(local, (0, widest - local.shape[1])).contiguous()
        gathered = padded.new_empty(self.size, *padded.shape)
        with self._collective():
            dist.all_gather_into_tensor(gathered.flatten(0, 1), padded, group=self._group)
        shards = zip(self._order, self._widths, strict=True)
        return torch.cat([gathered[rank, :, :width] for rank, width in shards], dim=1)

    def sync_samples(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Broadcast the first rank's samples `[R]`, in place: GPUs' sums may round differently."""
        if tokens.device.type == "cpu":
            return
        with self._collective():
            dist.broadcast(tokens, group=self._group, group_src=0)
            dist.broadcast(log_probs, group=self._group, group_src=0)

    def check_same_request(
        self, version: int, prompts: TokenLists, params: SamplingParams, problem: Exception | None
    ) -> None:
        """Raise RolloutError on all ranks unless all are to decode the same with one policy.

        `problem` is why this rank can't; it is raised here, and the others name the rank.
        """
        digest = zlib.crc32(repr((params, [list(map(int, p)) for p in prompts])).encode())
        failed, versions, digests = self._gather([problem is not None, version, digest]).T.tolist()
        if problem is not None:
            raise problem
        if any(failed):
            raise RolloutError(
                f"rank {failed.index(1)} of the tensor-parallel group can't serve; see its error"
            )
        if len(set(versions)) > 1:
            raise RolloutError(
                f"the ranks of a tensor-parallel group hold policy versions {versions}; update the "
                "weights on all of them before the rollout"
            )
        if len(set(digests)) > 1:
            raise RolloutError(
                "the ranks of a tensor-parallel group were given different prompts or sampling "
                "parameters; give every rank of the group the same request"
            )

    def _gather(self, values: Sequence[int]) -> Tensor:
        """Gather the ranks' k `values` to `[size, k]` by group rank, int64 on the CPU."""
        mine = torch.tensor(values, dtype=torch.long, device=self._device)
        gathered = mine.new_empty(self.size * len(mine))
        with self._collective():
            dist.all_gather_into_tensor(gathered, mine, group=self._group)
        return gathered.view(self.size, -1).cpu()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        if self._failure is not None:
            raise RolloutError(self._failure)
        try:
            yield
        except RuntimeError as error:
            self._failure = (
                f"a rank of the tensor-parallel group of {self.size} was lost or fell out of step: "
                f"{error}; start the group's ranks again"
            )
            raise RolloutError(self._failure) from error


_FAMILIES = (
    *(transformers.LlamaForCausalLM, transformers.MistralForCausalLM),
    *(transformers.Qwen2ForCausalLM, transformers.Qwen3ForCausalLM),
)
_OTHER_FAMILY = "is not a Llama, Mistral, Qwen2 or Qwen3 model"
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # frequencies that don't follow the length


@dataclass(frozen=True, slots=True)
class LlamaWeights(DecoderWeights):
    """A Llama-shaped model: its parameters and the numbers its forward pass needs."""

    rotary: nn.Module
    linear: LinearFunction
    tp: TensorParallel | None = None  # set: these are one rank's shards, and heads are its own
    merged: bool = True  # adapters and base are one matrix, a copy

    def project(self, x: Tensor, by: LinearWeights) -> Tensor:
        """Return x·Wᵀ + b of x `[…, in]`, and what an adapter adds to it."""
        y = self.linear(x, by.weight if by.unpack is None else by.unpack(), by.bias)
        if by.adapter is not None:
            down, up = by.adapter
            y.flatten(0, -2).addmm_(self.linear(x, down, None).flatten(0, -2), up.T)
        return y


class UnsupportedModel(Exception):
    """The model differs from what `llama_decoder.py` computes; the message says where."""


def bind(model: Any, *, merge: bool = True) -> LlamaWeights:
    """Look up `model`'s parameters; raises UnsupportedModel if its forward pass is another.

    With `merge`, what has adapters or is packed is a dense copy, else the trainer's storage.
    """
    if type(model) not in _FAMILIES:
        raise UnsupportedModel(f"{type(model).__name__} {_OTHER_FAMILY}")
    _refuse_variants(model)
    config, body = model.config, model.model
    attention, activation = body.layers[0].self_attn, body.layers[0].mlp.act_fn
    is_silu = type(activation).__name__ in {"SiLUActivation", "SiLU"}
    head = _linear(model.lm_head, merge)
    return LlamaWeights(
        layers=tuple(_layer(layer, merge) for layer in body.layers),
        embedding=body.embed_tokens.weight,
        head=head,
        norm=_norm(body.norm),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        activation=F.silu if is_silu else activation,
        rotary=body.rotary_emb,
        linear=linear_function(head.weight),
        merged=merge,
    )


def _refuse_variants(model: Any) -> None:
    """Raise UnsupportedModel for what is computed otherwise, and for hooks and sharded tensors."""
    body, is_mistral = model.model, isinstance(model, transformers.MistralForCausalLM)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in body.layers]
    if any(windows) or (is_mistral and model.config.sliding_window is not None):
        raise UnsupportedModel("it uses sliding-window attention")
    if body.rotary_emb.rope_type not in _STATIC_ROPE:
        raise UnsupportedModel(f"its RoPE type is {body.rotary_emb.rope_type!r}")
    if type(body.embed_tokens) is not nn.Embedding:
        raise UnsupportedModel(f"its embedding is a {type(body.embed_tokens).__name__}")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnsupportedModel(f"its module {name!r} has forward hooks")
        for leaf, parameter in module._parameters.items():
            if parameter is not None and type(parameter.data) is not Tensor:
                kind = type(parameter.data).__name__
                raise UnsupportedModel(f"its parameter {f'{name}.{leaf}'!r} is a {kind}")


def _layer(layer: Any, merge: bool) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return LayerWeights(
        q=_linear(attention.q_proj, merge),
        k=_linear(attention.k_proj, merge),
        v=_linear(attention.v_proj, merge),
        o=_linear(attention.o_proj, merge),
        gate=_linear(mlp.gate_proj, merge),
        up=_linear(mlp.up_proj, merge),
        down=_linear(mlp.down_proj, merge),
        input_norm=_norm(layer.input_layernorm),
        post_norm=_norm(layer.post_attention_layernorm),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
    )


@torch.no_grad()
def _linear(module: Any, merge: bool) -> LinearWeights:
    """Return a linear: dense with its adapters in it, or as it is stored and they beside it."""
    if type(module) is nn.Linear:
        return LinearWeights(module.weight, module.bias)
    from peft.tuners.lora import Linear  # plain projections do without it

    if type(module) is not Linear:
        dense = getattr(module, "dense", None)  # what a quantised one computes with
        if not isinstance(module, nn.Linear) or dense is None:
            raise UnsupportedModel(f"a projection is a {type(module).__name__}, not a plain Linear")
        if merge:
            return LinearWeights(dense(), module.bias)
        return LinearWeights(module.weight, module.bias, unpack=dense)
    if module.merged or module.lora_variant or any(module.lora_bias.values()):
        raise UnsupportedModel("an adapter is not plain LoRA")
    adapted: Any = module
    base, names = _linear(adapted.get_base_layer(), merge), adapted.active_adapters
    if adapted.disable_adapters:
        return base
    if merge:
        delta = sum(adapted.get_delta_weight(name) for name in names)
        return base._replace(weight=(base.weight + delta).to(base.weight.dtype))
    dtype = getattr(adapted.get_base_layer(), "dense_dtype", base.weight.dtype)
    down = torch.cat([adapted.lora_A[name].weight for name in names])
    up = torch.cat([adapted.lora_B[name].weight * adapted.scaling[name] for name in names], dim=1)
    return base._replace(adapter=(down.to(dtype), up.to(dtype)))


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


_ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}  # outputs are split
_COLUMNS = {"o_proj", "down_proj"}  # inputs are split, results are to be summed
_VOCABULARY = {"embed_tokens", "lm_head"}


class TPModelShard:
    """What `NativeEngine` decodes with on a rank of a tensor-parallel group.

    >>> local = {name: p.to_local() for name, p in model.named_parameters()}  # DTensors
    >>> engine = NativeEngine(TPModelShard(model.config, local, group))
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        index: int | None = None,
    ) -> None:
        """Check shard `index` (None: this rank's number in `group`) of a Llama-shaped model.

        `config` is the whole model's; `tensors` has this rank's part of each parameter under its
        Hugging Face name. With t ranks, shard i of

        - q, k, v, gate and up projections (weights and biases) is the i-th of t runs of rows; with
          fewer key heads than ranks, k and v are key head i // (t / kv_heads);
        - o and down projections is the i-th of t runs of columns, their biases being whole;
        - the embedding and the head is a run of rows of any length, in order, V rows in all;
        - anything else is the whole tensor. A tied head may be left out.

        Collective over `group`. Raises ModelError on every rank if on any a tensor is missing, too
        many or of another shape, dtype or device, or if the model can't be split so.
        """
        self.config = config
        self._tensors = dict(tensors)
        index = group.rank() if index is None else index
        device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.tp = TensorParallel(group, index, device)
        problem, rows = "", 0
        try:
            self._skeleton = _skeleton(config, device)
            self._fill(self._skeleton)
            weights = bind(self._skeleton)
            rows = weights.embedding.shape[0]
        except (UnsupportedModel, ModelError) as error:
            problem = str(error)
        total = self.tp.partition_vocabulary(-1 if problem else rows)
        if problem:
            raise ModelError(f"the model's shards can't be decoded with: {problem}")
        if total < 0:
            raise ModelError("another rank's shards can't be decoded with; see its own error")
        if total != config.vocab_size:
            raise ModelError(
                f"the ranks hold {total} rows of the embedding and the vocabulary has "
                f"{config.vocab_size}; give each rank its own run of rows"
            )

    @classmethod
    def from_dtensors(cls, model: nn.Module) -> TPModelShard:
        """Take this rank's shard of a tensor-parallel trainer's model: its DTensors' local parts.

        Raises ModelError unless they are sharded over one mesh of one axis, without FSDP on top.
        """
        tensors: dict[str, Tensor] = {}
        mesh = None
        for name, parameter in model.named_parameters():
            data = parameter.data
            if not isinstance(data, DTensor):
                tensors[name] = data
                continue
            mesh = data.device_mesh if mesh is None else mesh
            if data.device_mesh != mesh or mesh.ndim != 1:
                raise ModelError(
                    f"parameter {name!r} is sharded over a mesh {data.device_mesh}, not over "
                    "tensor-parallel ranks alone; reshard the model into buffers"
                )
            tensors[name] = data.to_local()
        if mesh is None:
            raise ModelError("no parameter is a DTensor; pass the whole model to NativeEngine")
        return cls(model.config, tensors, mesh.get_group())

    def weights(self) -> LlamaWeights:
        """Return this rank's weights for the decoder, in the storage they were given in."""
        weights = bind(self._skeleton)
        return dataclasses.replace(
            weights,
            heads=weights.heads // self.tp.size,
            kv_heads=max(1, weights.kv_heads // self.tp.size),
            tp=self.tp,
        )

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def parameters(self) -> Iterator[Tensor]:
        yield from self._tensors.values()

    def _fill(self, skeleton: nn.Module) -> None:
        remaining = dict(self._tensors)
        like = next(iter(remaining.values()), torch.empty(0))
        for name, full in list(skeleton.named_parameters()):
            tensor = remaining.pop(name, None)
            if tensor is None:
                raise ModelError(f"{name!r} is missing")
            if (tensor.dtype, tensor.device) != (like.dtype, like.device):
                raise ModelError(
                    f"{name!r} is {tensor.dtype} on {tensor.device}, others are {like.dtype} on "
                    f"{like.device}"
                )
            expected = self._local_shape(name, tuple(full.shape))
            if tuple(tensor.shape) != expected:
                raise ModelError(
                    f"{name!r} is {tuple(tensor.shape)}, and shard {self.tp.index} of "
                    f"{self.tp.size} is {expected}"
                )
            _set(skeleton, name, tensor)
        if self.config.tie_word_embeddings:
            remaining.pop("lm_head.weight", None)
            _set(skeleton, "lm_head.weight", self._tensors["model.embed_tokens.weight"])
        if remaining:
            raise ModelError(f"{min(remaining)!r} is no parameter of a {type(skeleton).__name__}")

    def _local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a parameter of the full `shape`."""
        module, size = name.split(".")[-2], self.tp.size
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        if module in _VOCABULARY:  # any number of rows, but the head's are the embedding's
            return (self._tensors["model.embed_tokens.weight"].shape[0], *shape[1:])
        if module in ("k_proj", "v_proj") and kv_heads < size:
            if size % kv_heads:
                raise ModelError(f"{size} ranks can't share {kv_heads} key heads evenly")
            return (shape[0] // kv_heads, *shape[1:])
        if heads % size:
            raise ModelError(f"{size} ranks can't share {heads} attention heads evenly")
        axis = 0 if module in _ROWS else 1
        if module not in _ROWS and (module not in _COLUMNS or len(shape) == 1):
            return shape
        if shape[axis] % size:
            raise ModelError(f"{size} ranks can't share the {shape[axis]} of {name!r} evenly")
        return tuple(n // size if i == axis else n for i, n in enumerate(shape))


def _skeleton(config: Any, device: torch.device) -> nn.Module:
    """Build the model without storage, but for the tables that its rotary embedding computes."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if not hasattr(getattr(skeleton, "model", None), "rotary_emb"):
        raise UnsupportedModel(f"{type(skeleton).__name__} {_OTHER_FAMILY}")
    rotary = skeleton.model.rotary_emb
    skeleton.model.rotary_emb = type(rotary)(config=config).to(device)
    return skeleton


def _set(skeleton: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(skeleton.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
