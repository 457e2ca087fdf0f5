"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053): a transformers model over `tp` ranks.

Matrices that read the residual stream are split by rows of the weight (queries, keys, values, gate,
up, the head), those that write it by columns (output, down), and the vocabulary by entries. With
sequence parallelism (Korthikanti et al., arXiv:2205.05198) norms and residuals between them are on
shards of the tokens. Parameters become DTensors, so that FSDP, checkpoints and optimizers know
their full shape; the forward pass computes on local tensors (`module.forward` is replaced, the
class stays). torch's own styles need vocabularies and sequences that the ranks divide.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from engine.errors import ConfigError
from engine.parallel.decoder_plan import DecoderPlan, within_layer
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.vocab_parallel import vocabulary_bounds

TOKENS = Shard(1)  # of activations [B, L, H]


def redistribute(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """Return the local part of a tensor placed as `target`, from that placed as `source`.

    The backward pass moves gradients the other way: each term of a sum gets the full gradient, and
    the gradient of a `Replicate()` target must be the same on every rank.
    """
    return DTensor.from_local(x, mesh, [source]).redistribute(placements=[target]).to_local()


def copy_to_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A replicated tensor, for computation that differs by rank: backward sums its gradients."""
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def gather_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather token shards `[B, L/tp, H]` → `[B, L, H]`, for computation that differs by rank."""
    full = DTensor.from_local(x, mesh, [TOKENS]).redistribute(placements=[Replicate()])
    return full.to_local(grad_placements=[Partial()])


def shard_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take this rank's shard of the padded tokens, of replicated `[B, L, H]`."""
    return redistribute(pad_tokens(x, mesh), mesh, Replicate(), TOKENS)


def pad_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add columns of 0 to `[B, L, H]` until the mesh's size divides L."""
    missing = -x.shape[1] % mesh.size()
    return F.pad(x, (0, 0, 0, missing)) if missing else x


Style = Callable[[nn.Module, DeviceMesh], None]  # changes a module in place, for a mesh's ranks


def sharded(placements: Mapping[str, Placement], forward: Callable[..., Tensor]) -> Style:
    """Shard a module's parameters; `forward`, its forward pass then, computes on local parts.

    `placements`: by parameter name; others are replicated.
    """

    @torch.no_grad()
    def apply(module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            # All ranks have the same one, so that nothing is sent.
            placement, full = placements.get(name, Replicate()), parameter.detach()
            local = torch.distributed.tensor.distribute_tensor(
                full, mesh, [placement], src_data_rank=None
            )
            trained = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(local, requires_grad=trained))
        module.forward = MethodType(forward, module)

    return apply


_BY_ROWS = {"weight": Shard(0), "bias": Shard(0)}


def column_parallel() -> Style:
    """A linear whose weight's rows, so its outputs, are sharded. Inputs are replicated."""
    return sharded(_BY_ROWS, partial(_forward, sum_gradients=False))


def gathered_columns() -> Style:
    """A linear whose weight's rows are sharded, and whose outputs every rank gets in full."""
    return sharded(_BY_ROWS, _gathered_forward)


def selected_columns(parts: Sequence[tuple[int, int]]) -> Style:
    """A linear whose weight's rows are sharded, though a rank computes with others than it stores.

    Of each of `parts`, which have rows and heads, e.g. [(1024, 8), (256, 2), (256, 2)], it computes
    with a share; several ranks have a head in common where there are too few. Ranks gather the
    matrix while they compute with it, as FSDP does; gradients are summed and sharded again.
    """
    return sharded(_BY_ROWS, partial(_selected_forward, parts=parts))


def row_parallel(shard_tokens: bool, split_input: bool = False) -> Style:
    """A linear whose weight's columns, and inputs `x [B, L, in/tp]`, are sharded.

    y = Σ_ranks x_local W_localᵀ + b is replicated, or, with `shard_tokens`, this rank's shard of
    the padded tokens. With `split_input` each rank has all of x and takes its part.
    """
    forward = partial(_row_forward, shard_tokens=shard_tokens, split_input=split_input)
    return sharded({"weight": Shard(1)}, forward)


def vocabulary_parallel() -> Style:
    """An embedding whose rows are sharded: ranks look up their own, and the sum is replicated."""
    return sharded({"weight": Shard(0)}, _embedding_forward)


def replicated(sum_gradients: bool) -> Style:
    """A module with all parameters on every rank; `sum_gradients`: activations differ by rank."""
    return sharded({}, partial(_forward, sum_gradients=sum_gradients))


def _forward(module: nn.Module, *args: object, sum_gradients: bool, **kwargs: object) -> Tensor:
    """Run the forward pass of the module's class, on local parts of its parameters."""
    parameters = module._parameters
    local = {name: _local(p, sum_gradients) for name, p in parameters.items()}
    module.__dict__["_parameters"] = local
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module.__dict__["_parameters"] = parameters


def _gathered_forward(module: nn.Linear, x: Tensor) -> Tensor:
    y = _forward(module, x, sum_gradients=False)
    weight: Any = module.weight
    return redistribute(y, weight.device_mesh, Shard(y.dim() - 1), Replicate())


def _selected_forward(module: nn.Linear, x: Tensor, *, parts: Sequence[tuple[int, int]]) -> Tensor:
    def local_rows(parameter: Any) -> Any:
        """Return the rows of a sharded parameter that this rank computes with."""
        if parameter is None:
            return None
        size, index = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
        full = parameter.redistribute(placements=[Replicate()])
        full = full.to_local(grad_placements=[Partial()])
        rows, heads = zip(*parts, strict=True)
        shares = [min(size, count) for count in heads]
        pieces = zip(full.split(rows), shares, strict=True)
        return torch.cat([piece.chunk(n)[index * n // size] for piece, n in pieces])

    return F.linear(x, local_rows(module.weight), local_rows(module.bias))


def _row_forward(module: nn.Linear, x: Tensor, *, shard_tokens: bool, split_input: bool) -> Tensor:
    weight: Any = module.weight
    mesh = weight.device_mesh
    if split_input:
        x = redistribute(x, mesh, Replicate(), Shard(x.dim() - 1))
    y = F.linear(x, weight.to_local())
    if shard_tokens:
        y = redistribute(pad_tokens(y, mesh), mesh, Partial(), TOKENS)
    else:
        y = redistribute(y, mesh, Partial(), Replicate())
    return y if module.bias is None else y + _local(module.bias, shard_tokens)


def _embedding_forward(module: nn.Embedding, ids: Tensor) -> Tensor:
    weight: Any = module.weight
    mesh, table = weight.device_mesh, weight.to_local()
    start, stop = vocabulary_bounds(module.num_embeddings, mesh.size(), mesh.get_local_rank())
    elsewhere = (ids < start) | (ids >= stop)
    padding = module.padding_idx  # its row gets no gradient
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    states = F.embedding((ids - start).masked_fill(elsewhere, 0), table, padding)
    states = redistribute(states.masked_fill(elsewhere[..., None], 0), mesh, Partial(), Replicate())
    scale: Tensor | None = getattr(module, "embed_scale", None)  # Gemma's
    return states if scale is None else states * scale.to(states.dtype)


def _local(parameter: Any, sum_gradients: bool) -> Any:
    if parameter is None:
        return None
    local: Tensor = parameter.to_local()
    replicated = parameter.placements == (Replicate(),)
    return copy_to_ranks(local, parameter.device_mesh) if sum_gradients and replicated else local


def change_input(change: Callable[[Tensor, DeviceMesh], Tensor]) -> Style:
    """Change the first argument of a module's forward pass, e.g. by `gather_tokens`."""

    def apply(module: nn.Module, mesh: DeviceMesh) -> None:
        def prepare(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return change(args[0], mesh), *args[1:]

        module.register_forward_pre_hook(prepare)

    return apply


def change_block_input(change: Callable[[Tensor, DeviceMesh], Tensor]) -> Style:
    """Change the hidden states that attention or MLP read; attention's are without padding."""

    def apply(module: nn.Module, mesh: DeviceMesh) -> None:
        def prepare(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            named = "hidden_states" in kwargs
            hidden = change(kwargs["hidden_states"] if named else args[0], mesh)
            if "position_embeddings" in kwargs:
                hidden = hidden[:, : _length(kwargs)]
            if named:
                return args, kwargs | {"hidden_states": hidden}
            return (hidden, *args[1:]), kwargs

        module.register_forward_pre_hook(prepare, with_kwargs=True)

    return apply


def count_local_heads(attention: Any, mesh: DeviceMesh) -> None:
    """Let attention count this rank's heads, where it reads their number off its configuration."""
    config, size = copy.copy(attention.config), mesh.size()
    key_heads = max(1, config.num_key_value_heads // size)
    config.num_attention_heads //= size
    config.num_key_value_heads = key_heads
    attention.config = config
    attention.num_key_value_groups = config.num_attention_heads // key_heads
    if hasattr(attention, "num_key_value_heads"):
        attention.num_key_value_heads = key_heads


def gather_output(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Make the token shards that a decoder layer returns replicated, without padding."""

    def gather(module: nn.Module, args: object, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        full = redistribute(out, mesh, TOKENS, Replicate())[:, : _length(kwargs)]
        return full.clone()  # FSDP's backward hooks are on outputs, and views may lose them

    layer.register_forward_hook(gather, with_kwargs=True)


def _length(kwargs: dict[str, Any]) -> int:
    """Return the sequence length, which with token shards only the rotary cosines have."""
    return int(kwargs["position_embeddings"][0].shape[1])


_HEAD = "lm_head"


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True
) -> None:
    """Shard `model` over the ranks of the one-dimensional `mesh`, in place.

    `model` is a causal language model whose configuration has a `DecoderPlan`, a critic or
    classifier on such a body, or a pipeline stage of one, with LoRA adapters in place already; all
    ranks have the same weights. Afterwards

    - every parameter is a DTensor on `mesh` of the same full shape and name, tied ones are one,
      and gradients arrive placed as their parameter is;
    - hidden states that leave the layers are full on every rank, for any sequence length, and so
      must their gradient be: run the same loss on every rank;
    - the head gives logits of this rank's part of the vocabulary (`VocabParallelStatistics.of`).

    A mesh of one rank leaves the model as it is. Raises ConfigError, before anything has changed,
    for a model that can't be sharded so.
    """
    if mesh.size() == 1:
        return
    split = _check(model, mesh.size(), sequence_parallel)
    tied = tied_parameters(model)
    plan = [*_parameter_plan(model, split).items(), *_activation_plan(model, split)]
    for name, style in plan:
        style(model.get_submodule(name), mesh)
    for module, name, owner, name_there in tied:
        module.register_parameter(name, owner.get_parameter(name_there))


@dataclass(frozen=True, slots=True)
class _Split:
    """What decides how the modules of a model are split over `tp` ranks."""

    plan: DecoderPlan
    shape: ModelShape
    tp: int
    sequence_parallel: bool

    def columns(self, name: str) -> Style:
        """Return the style of a layer's linear whose outputs are split."""
        shape, last = self.shape, name.rpartition(".")[2]
        keys = (shape.kv_heads * shape.head_dim, shape.kv_heads)
        if self.plan.computes_whole(name):
            return gathered_columns()
        if last == "qkv_proj":
            return selected_columns([(shape.heads * shape.head_dim, shape.heads), keys, keys])
        if last == "gate_up_proj":
            return selected_columns([(shape.intermediate, self.tp)] * 2)
        if last in ("k_proj", "v_proj") and shape.kv_heads < self.tp:
            return selected_columns([keys])
        return column_parallel()

    def others(self, name: str | None) -> Style:
        """Return the style of a layer's other modules, or those outside of it: all ranks' own."""
        if name is None:
            return replicated(sum_gradients=False)
        if name.partition(".")[0] in self.plan.blocks:  # on this rank's heads
            return replicated(sum_gradients=not self.plan.computes_whole(name))
        return replicated(sum_gradients=self.sequence_parallel)  # on its share of the tokens

    def changes_heads(self, block: str) -> bool:
        """Whether attention needs its number of heads set."""
        packed = any(name.endswith("qkv_proj") for name in self.plan.packed)
        return not self.plan.computes_whole(block) and (packed or self.shape.kv_heads < self.tp)


def _parameter_plan(model: nn.Module, split: _Split) -> dict[str, Style]:
    """Return the style of every module that has parameters of its own, by the module's name."""
    plan: dict[str, Style] = {}
    for name, module in model.named_modules():
        within, last = within_layer(name), name.rpartition(".")[2]
        if within in split.plan.columns or last == _HEAD:
            base, downs, ups = _linear_names(name, module)
            style = split.columns(within) if within else column_parallel()
            plan |= dict.fromkeys((base, *ups), style)
            # Their gradient comes from this rank's part of the output alone.
            plan |= dict.fromkeys(downs, replicated(sum_gradients=True))
        elif within is not None and within in split.plan.rows:
            base, downs, ups = _linear_names(name, module)
            style = row_parallel(split.sequence_parallel, split.plan.computes_whole(within))
            plan |= dict.fromkeys((base, *downs), style)
            plan |= dict.fromkeys(ups, replicated(split.sequence_parallel))
        elif last == split.plan.embedding and isinstance(module, nn.Embedding):
            plan[name] = vocabulary_parallel()
    for name, module in model.named_modules():  # norms, and a value head among them
        if name not in plan and any(True for _ in module.parameters(recurse=False)):
            plan[name] = split.others(within_layer(name))
    return plan


def _activation_plan(model: nn.Module, split: _Split) -> Iterator[tuple[str, Style]]:
    """Yield names of modules, and what ranks communicate where activations enter and leave them."""
    named = list(model.named_modules())
    layers = [name for name, _ in named if within_layer(name) == ""]
    enter = gather_tokens if split.sequence_parallel else copy_to_ranks
    for name, module in named:
        block = within_layer(name)
        if block is not None and block in split.plan.blocks:
            yield name, change_block_input(enter)
            if split.changes_heads(block) and hasattr(module, "num_key_value_groups"):
                yield name, count_local_heads
        elif name.rpartition(".")[2] == _HEAD:
            yield name, change_input(copy_to_ranks)
    if split.sequence_parallel and layers:
        yield layers[0], change_input(shard_tokens)
        yield layers[-1], gather_output


def _linear_names(name: str, module: nn.Module) -> tuple[str, list[str], list[str]]:
    """A linear module's name, and those of A and B of peft's adapters on it if it has any."""
    if not hasattr(module, "base_layer"):
        return name, [], []
    downs, ups = (
        [f"{name}.{part}.{key}" for key, _ in module.get_submodule(part).named_children()]
        for part in ("lora_A", "lora_B")
    )
    return f"{name}.base_layer", downs, ups


def tied_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Return the module and name of each repeated parameter, and where it is first."""
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    tied = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in first:
                tied.append((module, name, *first[parameter]))
            first.setdefault(parameter, (module, name))
    return tied


def _check(model: nn.Module, tp: int, sequence_parallel: bool) -> _Split:
    """Plan how to split the model; raise ConfigError for one that tp can't split."""
    configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    plan = DecoderPlan.of(configs[0] if configs else model)
    shape = ModelShape.of(configs[0])
    check_layout(Layout(tp=tp), tp, shape)
    if vocabulary_bounds(shape.vocab, tp, tp - 1)[0] >= shape.vocab:
        raise ConfigError(
            f"tp={tp} leaves a rank without any of the vocabulary's {shape.vocab} entries; lower tp"
        )
    for name, module in model.named_modules():
        _check_module(name, module, plan)
    return _Split(plan, shape, tp, sequence_parallel)


def _check_module(name: str, module: nn.Module, plan: DecoderPlan) -> None:
    within, last = within_layer(name), name.rpartition(".")[2]
    base = getattr(module, "base_layer", module)
    problem = ""
    if within in plan.columns | plan.rows or last == _HEAD:
        if type(base) is not nn.Linear:
            problem = f"is a {type(base).__name__}"
        elif base is not module and len(getattr(module, "lora_magnitude_vector", ())):
            problem = "has a DoRA adapter"
    elif base is not module:
        raise ConfigError(
            f"model.lora.target_modules names {name!r}, whose adapter tp can't split; leave "
            f"{last!r} out, or set tp=1"
        )
    elif isinstance(module, nn.Embedding):
        if type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
            problem = f"is a {type(module).__name__}"
    elif within is not None and not plan.covers(within):
        for matrix in (n for n, p in module.named_parameters(recurse=False) if p.dim() > 1):
            problem = f"has a matrix {matrix!r} that the model's plan doesn't name"
    if problem:
        raise ConfigError(f"{name!r} {problem}, which tp can't split; set tp=1, and use fsdp")
