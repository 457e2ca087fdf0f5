"""AdamW steps of a tiny policy on a layout, and the same steps on one rank, to compare them.

Each rank takes every n-th row, the first in more micro-batches than the others. Those pass a loss
of 0, since all ranks of a sharded model must take part in every pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tiny_engine import response_log_probs, tiny_model, training_batch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.config import LoRAConfig, OptimConfig, ParallelConfig
from engine.models.forward import TokenOutputs, token_outputs
from engine.models.lora import add_adapters
from engine.parallel import fsdp, gradients
from engine.parallel import module_shards as full
from engine.parallel.layout import DATA_AXES, Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.optimizer import Optimizer

STEPS = 2
ROWS = 11
_TEMPERATURE = 0.9
_TOKEN_AXES = (*DATA_AXES, "sp")  # ranks with tokens of their own


@dataclass(frozen=True, slots=True)
class Run:
    """How to train. Everything but `layout` may change what is computed on one rank as well."""

    layout: Layout = field(default_factory=Layout)
    family: str = "qwen2"  # with tied embeddings; llama without
    lora: bool = False
    dtype: str = "float32"  # of the stored weights
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    clip: float = 0.1


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened, the same on every rank."""

    losses: list[float]
    norms: list[float]
    log_probs: Tensor  # of all rows, before the last step
    weights: dict[str, Tensor]


def build(run: Run) -> PreTrainedModel:
    model = tiny_model(run.family).to(getattr(torch, run.dtype))
    if run.lora:
        add_adapters(model, LoRAConfig(rank=3, target_modules=("q_proj", "up_proj")), seed=0)
        with torch.no_grad():  # B = 0 would leave A without a gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.02)
    return model


def train(run: Run) -> Trace:
    """Take the steps on this rank; every rank of the layout must."""
    ranks = Ranks.form(run.layout)
    model = build(run)
    layers = decoder_layers(model)
    if checkpoints := run.parallel.activation_checkpointing:
        fsdp.checkpoint_activations(layers, checkpoints)
    fsdp.shard_model(model, ranks, run.parallel, layers=layers)
    optimizer = Optimizer(
        model,
        OptimConfig(lr=3e-3, grad_clip=run.clip, warmup_ratio=0.0),
        STEPS,
        ranks,
        offload=run.parallel.offload_optimizer,
    )
    losses, norms = [], []
    log_probs = torch.empty(0)
    for step in range(STEPS):
        batch = training_batch(ROWS, seed=step)
        log_probs = everyones_log_probs(model, batch, ranks)
        losses.append(accumulate(model, batch, ranks))
        log_probs_again = everyones_log_probs(model, batch, ranks)  # leaves gathered weights behind
        torch.testing.assert_close(log_probs_again, log_probs, rtol=0, atol=0)
        gradients.all_reduce_gradients(model.parameters(), ranks, bucket_elements=1000)
        norms.append(optimizer.step())
    weights = {name: w.clone() for name, w in full.gather_full_tensors(model, ranks)}
    return Trace(losses, norms, log_probs, weights)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    layers: Any = model.get_submodule("model.layers")
    return list(layers)


@functools.cache
def alone(family: str = "qwen2", lora: bool = False, dtype: str = "float32") -> Trace:
    """The same training on one rank."""
    return train(Run(family=family, lora=lora, dtype=dtype))


def accumulate(model: PreTrainedModel, batch: Batch, ranks: Ranks) -> float:
    """Add the gradients of this rank's micro-batches; return the loss over all ranks' tokens."""
    tokens = batch["response_mask"].sum()
    micros = list(_micro_batches(batch, ranks))
    passes = ranks.max_over(len(micros), _TOKEN_AXES)
    total = torch.zeros(())
    for index in range(passes):
        fsdp.reduce_over_copies(model, index == passes - 1)
        micro = micros[index] if index < len(micros) else micros[0]
        got = _forward(model, micro)
        loss = -(got.log_probs * micro["advantages"]).sum() / tokens
        if index >= len(micros):
            loss = 0.0 * loss
        loss.backward()
        total += loss.detach()
    return float(ranks.sum_over(total, _TOKEN_AXES))


def _forward(model: PreTrainedModel, micro: Batch) -> TokenOutputs:
    return fsdp.run_forward(model, lambda: token_outputs(model, micro, _TEMPERATURE))


@torch.no_grad()
def everyones_log_probs(model: PreTrainedModel, batch: Batch, ranks: Ranks) -> Tensor:
    return fsdp.run_forward(model, lambda: response_log_probs(model, batch, _TEMPERATURE))


def _micro_batches(batch: Batch, ranks: Ranks) -> Iterator[Batch]:
    index, count = ranks.index(*_TOKEN_AXES), ranks.size(*_TOKEN_AXES)
    rows = torch.arange(index, len(batch), count)
    for part in rows.chunk(1 if index else 2):  # the first rank has more passes than the others
        yield batch.rows(part)


def assert_alike(got: Trace, wanted: Trace, tolerance: float = 2e-6) -> None:
    """Equal up to `tolerance`, about a tenth of which is float32's rounding in so small a model.

    It is relative for norms and, by the largest element, weights; absolute for log-probs and
    losses (which are sums of terms of both signs, of size 1).
    """
    for mine, theirs in zip(got.losses, wanted.losses, strict=True):
        assert math.isclose(mine, theirs, rel_tol=0, abs_tol=tolerance), (mine, theirs)
    for mine, theirs in zip(got.norms, wanted.norms, strict=True):
        assert math.isclose(mine, theirs, rel_tol=tolerance), (mine, theirs)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=10 * tolerance)
    assert got.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        if "k_proj.bias" in name:
            continue  # softmax is blind to it: AdamW blows its gradient, all rounding, up to steps
        off, size = (got.weights[name] - weight).abs().max(), weight.abs().max()
        assert off <= 10 * tolerance * size, (name, float(off), float(size))


def assert_same_everywhere(trace: Trace) -> None:
    """Ranks agree bit for bit on losses, norms and every whole weight."""
    values = torch.tensor([*trace.losses, *trace.norms]).double()
    mine = torch.cat([values, *(w.double().flatten() for w in trace.weights.values())])
    of_first = mine.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(of_first, mine)
