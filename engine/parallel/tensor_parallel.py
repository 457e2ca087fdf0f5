"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053): a transformers model over `tp` ranks.

Matrices that read the residual stream are split by rows of the weight (queries, keys, values, gate,
up, the head), those that write it by columns (output, down), and the vocabulary by entries. With
sequence parallelism (Korthikanti et al., arXiv:2205.05198) norms and residuals between them are on
shares of the tokens. The modules themselves are in `parallel.shards`, the loss over a vocabulary in
shards in `parallel.vocab`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from engine.errors import ConfigError
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.tp_modules import (
    TOKENS,
    RowLinear,
    VocabularyEmbedding,
    compute_locally,
    distribute,
    enter,
    gather_tokens,
    move,
    pad_tokens,
)
from engine.parallel.vocab_parallel import vocabulary_bounds

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # model types with a plan

_COLUMN = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"}
_ROW = {"o_proj", "down_proj"}
_BETWEEN = {"input_layernorm", "post_attention_layernorm"}  # on token shards, if there are any
_PER_HEAD = {"q_norm", "k_norm"}


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True
) -> None:
    """Spread `model` over the ranks of the one-dimensional `mesh`, in place.

    `model` is a causal language model of `FAMILIES`, a critic or classifier on such a body, or a
    pipeline stage of one; every rank of the mesh holds the same weights. LoRA adapters must be in
    place already. Afterwards

    - every parameter is a DTensor on `mesh` of the same whole shape and name, tied ones are one,
      and gradients arrive placed as their parameter is;
    - hidden states that leave the layers are whole on every rank, for any sequence length, and so
      must their gradient be: run the same loss on every rank;
    - the head gives logits of this rank's part of the vocabulary (`VocabParallelStatistics.of`),
      uneven where tp does not divide it.

    A mesh of one rank leaves the model as it is. Raises ConfigError, before anything has changed,
    for a model that can't be spread so.
    """
    if mesh.size() == 1:
        return
    _check(model, mesh.size())
    plan = _Plan(mesh, sequence_parallel)
    for name, module in list(model.named_modules()):
        plan.apply(name.rpartition(".")[2], module)
    plan.replicate_the_rest(model)
    _connect(model, mesh, sequence_parallel)


class _Plan:
    """Places modules' parameters; a tied parameter is placed once."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.mesh, self.over_tokens = mesh, sequence_parallel
        self._placed: dict[nn.Parameter, nn.Parameter] = {}

    def apply(self, name: str, module: nn.Module) -> None:
        """Split or replicate `module`, called `name` by its parent, if the plan knows it."""
        if name in _COLUMN:
            self._column(module)
        elif name in _ROW:
            self._row(module)
        elif name == "embed_tokens" and isinstance(module, nn.Embedding):
            self._place(module, weight=Shard(0))
            module.__class__ = VocabularyEmbedding
        elif name in _BETWEEN or name in _PER_HEAD:
            self._replicate(module, name in _PER_HEAD or self.over_tokens)

    def replicate_the_rest(self, model: nn.Module) -> None:
        """What no plan names, the final norm and a value head among them, is on every rank."""
        done = {id(parameter) for parameter in self._placed.values()}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own and not done.intersection(map(id, own)):
                self._replicate(module, False)

    def _column(self, module: nn.Module) -> None:
        base, downs, ups = _adapted(module)
        for linear in (base, *ups):
            self._place(linear, weight=Shard(0), bias=Shard(0))
            compute_locally(linear, False)
        for linear in downs:  # their gradient comes from this rank's part of the output alone
            self._replicate(linear, True)

    def _row(self, module: nn.Module) -> None:
        base, downs, ups = _adapted(module)
        for linear in (base, *downs):
            self._place(linear, weight=Shard(1), bias=Replicate())
            linear.__class__ = RowLinear
            linear.over_tokens = self.over_tokens  # type: ignore[assignment]
        for linear in ups:
            self._replicate(linear, self.over_tokens)

    def _replicate(self, module: nn.Module, sum_gradients: bool) -> None:
        self._place(module, **{name: Replicate() for name in module._parameters})
        compute_locally(module, sum_gradients)

    def _place(self, module: nn.Module, **placements: Placement) -> None:
        for name, placement in placements.items():
            whole = module._parameters.get(name)
            if whole is None:
                continue
            if whole not in self._placed:
                self._placed[whole] = distribute(whole, self.mesh, placement)
            module._parameters[name] = self._placed[whole]


def _connect(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Put the communication between the modules where activations pass into them."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "self_attn")]
    inward = gather_tokens if sequence_parallel else enter
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(partial(_attend, mesh, inward), with_kwargs=True)
        layer.mlp.register_forward_pre_hook(partial(_first_argument, mesh, inward))
    if sequence_parallel and layers:
        layers[0].register_forward_pre_hook(partial(_first_argument, mesh, _split_tokens))
        layers[-1].register_forward_hook(partial(_whole_tokens, mesh), with_kwargs=True)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "lm_head":
            module.register_forward_pre_hook(partial(_first_argument, mesh, enter))


def _split_tokens(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return move(pad_tokens(hidden, mesh), mesh, Replicate(), TOKENS)


def _first_argument(mesh: DeviceMesh, change: Any, module: nn.Module, args: Any) -> Any:
    return change(args[0], mesh), *args[1:]


def _attend(mesh: DeviceMesh, change: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Attention reads all tokens, without the padding that made shards equal."""
    hidden = change(kwargs["hidden_states"], mesh)[:, : _length(kwargs)]
    return args, kwargs | {"hidden_states": hidden}


def _whole_tokens(mesh: DeviceMesh, layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Any:
    whole = move(out, mesh, TOKENS, Replicate())[:, : _length(kwargs)]
    return whole.clone()  # FSDP hangs its gathering for backward on outputs, which views may lose


def _length(kwargs: Any) -> int:
    """Sequence length, which only the rotary embedding's cosines still tell on token shards."""
    return int(kwargs["position_embeddings"][0].shape[1])


def _adapted(module: Any) -> tuple[nn.Module, list[nn.Module], list[nn.Module]]:
    """A linear module, and the A and B of peft's adapters on it if it has any."""
    if not hasattr(module, "base_layer"):
        return module, [], []
    return module.base_layer, list(module.lora_A.values()), list(module.lora_B.values())


def _check(model: nn.Module, tp: int) -> None:
    """Raise ConfigError for a family without a plan, sizes that tp can't split, odd adapters."""
    configs = [m.config for m in model.modules() if getattr(m, "config", None) is not None]
    family = getattr(configs[0], "model_type", None) if configs else type(model).__name__
    if family not in FAMILIES:
        raise ConfigError(
            f"a model of type {family!r} has no tensor-parallel plan (there are plans for "
            f"{', '.join(FAMILIES)}); set tp=1 and spread it by fsdp"
        )
    shape = ModelShape.of(configs[0])
    check_layout(Layout(tp=tp), tp, shape)
    if vocabulary_bounds(shape.vocab, tp, tp - 1)[0] >= shape.vocab:
        raise ConfigError(
            f"tp={tp} leaves a rank without any of the vocabulary's {shape.vocab} entries; lower tp"
        )
    for name, module in model.named_modules():
        _check_module(name, module)


def _check_module(name: str, module: Any) -> None:
    last = name.rpartition(".")[2]
    adapted = hasattr(module, "base_layer")
    if last in _COLUMN | _ROW:
        if type(getattr(module, "base_layer", module)) is not nn.Linear:
            raise ConfigError(
                f"{name!r} is a {type(getattr(module, 'base_layer', module)).__name__}, which tp "
                "can't split (only plain linear modules); set tp=1 and spread it by fsdp"
            )
        if adapted and len(getattr(module, "lora_magnitude_vector", ())):
            raise ConfigError(f"{name!r} has a DoRA adapter, which tp can't split; set tp=1")
    elif adapted:
        raise ConfigError(
            f"model.lora.target_modules names {name!r}, whose adapter tp can't split; leave "
            f"{last!r} out, or set tp=1"
        )
