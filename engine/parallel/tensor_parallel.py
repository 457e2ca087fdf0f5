"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053): a transformers model over `tp` ranks.

Matrices that read the residual stream are split by rows of the weight (queries, keys, values, gate,
up, the head), those that write it by columns (output, down), and the vocabulary by entries. With
sequence parallelism (Korthikanti et al., arXiv:2205.05198) norms and residuals between them are on
shards of the tokens. The styles are in `tp_styles`, the loss over a sharded vocabulary in
`vocab_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from engine.errors import ConfigError
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.tp_styles import (
    AttentionInput,
    ColumnParallel,
    GatherOutput,
    InputStyle,
    Replicated,
    RowParallel,
    VocabularyParallel,
    copy_to_ranks,
    gather_tokens,
    shard_tokens,
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
    """Shard `model` over the ranks of the one-dimensional `mesh`, in place.

    `model` is a causal language model of `FAMILIES`, a critic or classifier on such a body, or a
    pipeline stage of one; every rank of the mesh has the same weights. LoRA adapters must be in
    place already. Afterwards

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
    _check(model, mesh.size())
    tied = tied_parameters(model)
    plan = [
        *parameter_plan(model, sequence_parallel).items(),
        *activation_plan(model, sequence_parallel),
    ]
    for name, style in plan:
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for module, name, owner, name_there in tied:
        module.register_parameter(name, owner.get_parameter(name_there))


def parameter_plan(model: nn.Module, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The style of every module that has parameters of its own, by the module's name."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in _COLUMN:
            base, downs, ups = _linear_names(name, module)
            plan |= dict.fromkeys((base, *ups), ColumnParallel())
            # Their gradient comes from this rank's part of the output alone.
            plan |= dict.fromkeys(downs, Replicated(sum_gradients=True))
        elif last in _ROW:
            base, downs, ups = _linear_names(name, module)
            plan |= dict.fromkeys((base, *downs), RowParallel(sequence_parallel))
            plan |= dict.fromkeys(ups, Replicated(sum_gradients=sequence_parallel))
        elif last == "embed_tokens" and isinstance(module, nn.Embedding):
            plan[name] = VocabularyParallel()
        elif last in _BETWEEN or last in _PER_HEAD:
            plan[name] = Replicated(sum_gradients=last in _PER_HEAD or sequence_parallel)
    for name, module in model.named_modules():  # the final norm and a value head among them
        if name not in plan and any(True for _ in module.parameters(recurse=False)):
            plan[name] = Replicated(sum_gradients=False)
    return plan


def activation_plan(
    model: nn.Module, sequence_parallel: bool
) -> Iterator[tuple[str, ParallelStyle]]:
    """Names of modules, and what ranks communicate where activations enter and leave them."""
    layers = [name for name, module in model.named_modules() if hasattr(module, "self_attn")]
    enter = gather_tokens if sequence_parallel else copy_to_ranks
    for layer in layers:
        yield f"{layer}.self_attn", AttentionInput(enter)
        yield f"{layer}.mlp", InputStyle(enter)
    if sequence_parallel and layers:
        yield layers[0], InputStyle(shard_tokens)
        yield layers[-1], GatherOutput()
    for name, _ in model.named_modules():
        if name.rpartition(".")[2] == "lm_head":
            yield name, InputStyle(copy_to_ranks)


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


def _check(model: nn.Module, tp: int) -> None:
    """Raise ConfigError for a family without a plan, sizes that tp can't split, odd adapters."""
    configs = [m.config for m in model.modules() if getattr(m, "config", None) is not None]
    family = getattr(configs[0], "model_type", None) if configs else type(model).__name__
    if family not in FAMILIES:
        raise ConfigError(
            f"a model of type {family!r} has no tensor-parallel plan (there are plans for "
            f"{', '.join(FAMILIES)}); set tp=1 and shard it by fsdp"
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
                "can't split (only plain linear modules); set tp=1 and shard it by fsdp"
            )
        if adapted and len(getattr(module, "lora_magnitude_vector", ())):
            raise ConfigError(f"{name!r} has a DoRA adapter, which tp can't split; set tp=1")
    elif adapted:
        raise ConfigError(
            f"model.lora.target_modules names {name!r}, whose adapter tp can't split; leave "
            f"{last!r} out, or set tp=1"
        )
