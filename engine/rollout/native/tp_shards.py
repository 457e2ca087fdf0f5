"""A tensor-parallel rank's shard of a model: local tensors by name, checked, to decode with.

The tensors are the caller's storage: a trainer's own (the local parts of DTensors), or buffers that
a resharding step fills. None is copied. How the ranks compute together is in `tensor_parallel.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine.errors import ModelError
from engine.rollout.native.llama_weights import LlamaWeights, UnsupportedModel, bind
from engine.rollout.native.tensor_parallel import TensorParallel

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
        group: ProcessGroup,
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
        """This rank's shard of a tensor-parallel trainer's model: the local parts of its DTensors.

        They must be sharded over one mesh of one axis (no FSDP on top: reshard such a model into
        buffers first). Raises ModelError otherwise.
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
        """This rank's weights for the decoder, in the storage they were given in."""
        whole = bind(self._skeleton)
        return dataclasses.replace(
            whole,
            heads=whole.heads // self.tp.size,
            kv_heads=max(1, whole.kv_heads // self.tp.size),
            tp=self.tp,
        )

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors by name."""
        yield from self._tensors.items()

    def parameters(self) -> Iterator[Tensor]:
        """This rank's tensors."""
        yield from self._tensors.values()

    def _fill(self, skeleton: nn.Module) -> None:
        """Put this rank's tensors in place of `skeleton`'s parameters."""
        left = dict(self._tensors)
        like = next(iter(left.values()), torch.empty(0))
        for name, whole in list(skeleton.named_parameters()):
            tensor = left.pop(name, None)
            if tensor is None:
                raise ModelError(f"{name!r} is missing")
            if (tensor.dtype, tensor.device) != (like.dtype, like.device):
                raise ModelError(
                    f"{name!r} is {tensor.dtype} on {tensor.device}, others are {like.dtype} on "
                    f"{like.device}"
                )
            wanted = self._local_shape(name, tuple(whole.shape), tensor)
            if tuple(tensor.shape) != wanted:
                raise ModelError(
                    f"{name!r} is {tuple(tensor.shape)}, and shard {self.tp.index} of "
                    f"{self.tp.size} is {wanted}"
                )
            _set(skeleton, name, tensor)
        tied = self.config.tie_word_embeddings
        if tied:
            left.pop("lm_head.weight", None)
            _set(skeleton, "lm_head.weight", self._tensors["model.embed_tokens.weight"])
        if left:
            raise ModelError(f"{sorted(left)[0]!r} is no parameter of a {type(skeleton).__name__}")

    def _local_shape(self, name: str, whole: tuple[int, ...], tensor: Tensor) -> tuple[int, ...]:
        """The shape that shard `index` of a parameter of shape `whole` must have."""
        module, size = name.split(".")[-2], self.tp.size
        if module in _VOCABULARY:  # any number of rows, but the head's are the embedding's
            rows = self._tensors["model.embed_tokens.weight"].shape[0]
            return (rows, *whole[1:])
        if module in ("k_proj", "v_proj") and self.config.num_key_value_heads < size:
            kv_heads = self.config.num_key_value_heads
            if size % kv_heads:
                raise ModelError(f"{size} ranks can't share {kv_heads} key heads evenly")
            return (whole[0] // kv_heads, *whole[1:])
        heads = self.config.num_attention_heads
        if heads % size:
            raise ModelError(f"{size} ranks can't share {heads} attention heads evenly")
        axis = 0 if module in _ROWS else 1
        if module not in _ROWS and (module not in _COLUMNS or len(whole) == 1):
            return whole
        if whole[axis] % size:
            raise ModelError(f"{size} ranks can't share the {whole[axis]} of {name!r} evenly")
        return tuple(n // size if i == axis else n for i, n in enumerate(whole))


def _skeleton(config: PretrainedConfig, device: torch.device) -> nn.Module:
    """The model without storage, but for the tables that its rotary embedding computes."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if not hasattr(getattr(skeleton, "model", None), "rotary_emb"):
        raise UnsupportedModel(
            f"{type(skeleton).__name__} is not a Llama, Mistral, Qwen2 or Qwen3 model"
        )
    rotary = skeleton.model.rotary_emb
    skeleton.model.rotary_emb = type(rotary)(config=config).to(device)
    return skeleton


def _set(skeleton: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(skeleton.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
