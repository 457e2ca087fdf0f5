"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053): a transformers model over `tp` ranks.

Matrices that read the residual stream are split by rows of the weight (queries, keys, values, gate,
up, the head), those that write it by columns (output, down), and the vocabulary by entries. With
sequence parallelism (Korthikanti et al., arXiv:2205.05198) norms and residuals between them are on
shards of the tokens. The styles are in `tp_styles`, the loss over a sharded vocabulary in
`vocab_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from engine.errors import ConfigError
from engine.parallel.decoder_plan import DecoderPlan, within_layer
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.tp_styles import (
    BlockInput,
    ColumnParallel,
    GatheredColumns,
    GatherOutput,
    InputStyle,
    LocalHeads,
    Replicated,
    RowParallel,
    SelectedColumns,
    VocabularyParallel,
    copy_to_ranks,
    gather_tokens,
    shard_tokens,
)
from engine.parallel.vocab_parallel import vocabulary_bounds

_HEAD = "lm_head"


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True
) -> None:
    """Shard `model` over the ranks of the one-dimensional `mesh`, in place.

    `model` is a causal language model whose configuration has a `DecoderPlan`, a critic or
    classifier on such a body, or a pipeline stage of one; every rank of the mesh has the same
    weights. LoRA adapters must be in place already. Afterwards

    - every parameter is a DTensor on `mesh` of the same full shape and name, tied ones are one,
      and gradients arrive placed as their parameter is;
    - hidden states that leave the layers are full on every rank, for any sequence length, and so
      must their gradient be: run the same loss on every rank;
    - the head gives logits of this rank's part of the vocabulary (`VocabParallelStatistics.of`),
      uneven where tp does not divide it.

    A mesh of one rank leaves the model as it is. Raises ConfigError, before anything has changed,
    for a model that can't be sharded so.
    """
    if mesh.size() == 1:
        return
    split = _check(model, mesh.size())
    tied = tied_parameters(model)
    plan = [
        *_parameter_plan(model, split, sequence_parallel).items(),
        *_activation_plan(model, split, sequence_parallel),
    ]
    for name, style in plan:
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for module, name, owner, name_there in tied:
        module.register_parameter(name, owner.get_parameter(name_there))


@dataclass(frozen=True, slots=True)
class _Split:
    """What decides how the modules of a model are split over `tp` ranks."""

    plan: DecoderPlan
    shape: ModelShape
    tp: int

    def columns(self, name: str) -> ParallelStyle:
        """The style of a layer's linear whose outputs are split."""
        shape, last = self.shape, name.rpartition(".")[2]
        keys = (shape.kv_heads * shape.head_dim, shape.kv_heads)
        if self.plan.computes_whole(name):
            return GatheredColumns()
        if last == "qkv_proj":
            return SelectedColumns([(shape.heads * shape.head_dim, shape.heads), keys, keys])
        if last == "gate_up_proj":
            return SelectedColumns([(shape.intermediate, self.tp)] * 2)
        if last in ("k_proj", "v_proj") and shape.kv_heads < self.tp:
            return SelectedColumns([keys])
        return ColumnParallel()

    def rows(self, name: str, sequence_parallel: bool) -> ParallelStyle:
        """The style of a layer's linear whose inputs are split."""
        return RowParallel(sequence_parallel, split_input=self.plan.computes_whole(name))

    def norm(self, name: str, sequence_parallel: bool) -> ParallelStyle:
        """The style of a layer's other modules, which every rank has."""
        if name.partition(".")[0] in self.plan.blocks:  # on this rank's heads
            return Replicated(sum_gradients=not self.plan.computes_whole(name))
        return Replicated(sum_gradients=sequence_parallel)  # on its share of the tokens

    def changes_heads(self, block: str) -> bool:
        """Whether attention must be told how many heads it has."""
        packed = any(name.endswith("qkv_proj") for name in self.plan.packed)
        return not self.plan.computes_whole(block) and (packed or self.shape.kv_heads < self.tp)


def _parameter_plan(
    model: nn.Module, split: _Split, sequence_parallel: bool
) -> dict[str, ParallelStyle]:
    """The style of every module that has parameters of its own, by the module's name."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        within, last = within_layer(name), name.rpartition(".")[2]
        if within in split.plan.columns or last == _HEAD:
            base, downs, ups = _linear_names(name, module)
            style = split.columns(within) if within else ColumnParallel()
            plan |= dict.fromkeys((base, *ups), style)
            # Their gradient comes from this rank's part of the output alone.
            plan |= dict.fromkeys(downs, Replicated(sum_gradients=True))
        elif within is not None and within in split.plan.rows:
            base, downs, ups = _linear_names(name, module)
            plan |= dict.fromkeys((base, *downs), split.rows(within, sequence_parallel))
            plan |= dict.fromkeys(ups, Replicated(sum_gradients=sequence_parallel))
        elif last == split.plan.embedding and isinstance(module, nn.Embedding):
            plan[name] = VocabularyParallel()
    for name, module in model.named_modules():  # norms, and a value head among them
        if name not in plan and any(True for _ in module.parameters(recurse=False)):
            within = within_layer(name)
            if within is None:
                plan[name] = Replicated(sum_gradients=False)
            else:
                plan[name] = split.norm(within, sequence_parallel)
    return plan


def _activation_plan(
    model: nn.Module, split: _Split, sequence_parallel: bool
) -> Iterator[tuple[str, ParallelStyle]]:
    """Names of modules, and what ranks communicate where activations enter and leave them."""
    named = list(model.named_modules())
    layers = [name for name, _ in named if within_layer(name) == ""]
    enter = gather_tokens if sequence_parallel else copy_to_ranks
    for name, module in named:
        block = within_layer(name)
        if block is not None and block in split.plan.blocks:
            yield name, BlockInput(enter)
            if split.changes_heads(block) and hasattr(module, "num_key_value_groups"):
                yield name, LocalHeads()
        elif name.rpartition(".")[2] == _HEAD:
            yield name, InputStyle(copy_to_ranks)
    if sequence_parallel and layers:
        yield layers[0], InputStyle(shard_tokens)
        yield layers[-1], GatherOutput()


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
    """Module and name of each repeated parameter, and where it is first."""
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    tied = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in first:
                tied.append((module, name, *first[parameter]))
            first.setdefault(parameter, (module, name))
    return tied


def _check(model: nn.Module, tp: int) -> _Split:
    """How to split the model; raises ConfigError for one without a plan, or that tp can't split."""
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
    return _Split(plan, shape, tp)


def _check_module(name: str, module: nn.Module, plan: DecoderPlan) -> None:
    within, last = within_layer(name), name.rpartition(".")[2]
    base = getattr(module, "base_layer", module)
    if within in plan.columns | plan.rows or last == _HEAD:
        if type(base) is not nn.Linear:
            raise ConfigError(
                f"{name!r} is a {type(base).__name__}, which tp can't split (only plain linear "
                "modules); set tp=1 and shard it by fsdp"
            )
        if base is not module and len(getattr(module, "lora_magnitude_vector", ())):
            raise ConfigError(f"{name!r} has a DoRA adapter, which tp can't split; set tp=1")
    elif base is not module:
        raise ConfigError(
            f"model.lora.target_modules names {name!r}, whose adapter tp can't split; leave "
            f"{last!r} out, or set tp=1"
        )
    elif isinstance(module, nn.Embedding):
        if type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
            raise ConfigError(
                f"{name!r} is a {type(module).__name__}, which tp can't split; set tp=1 and shard "
                "it by fsdp"
            )
    elif within is not None and not plan.covers(within):
        matrices = [n for n, p in module.named_parameters(recurse=False) if p.dim() > 1]
        if matrices:
            raise ConfigError(
                f"{name!r} has a matrix {matrices[0]!r} that the model's tensor-parallel plan does "
                "not name; set tp=1 and shard it by fsdp"
            )
