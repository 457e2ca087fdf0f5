"""Seconds of one RL step under a layout: a simple model, good enough to rank layouts.

Arithmetic is 2 FLOPs an element and token in a forward pass, 4 in a backward (Kaplan et al.,
arXiv:2001.08361, section 2.1) plus attention; decoding reads all weights and the cache once a token
(HybridFlow, arXiv:2409.19256, section 6, prices its stages likewise). Collectives over n ranks move
(n − 1)/n of their data, an all-reduce twice that, at the slowest link between the ranks; each
costs a latency. Pipelines lose (pp − 1)/(micro-batches + pp − 1) (Narayanan et al.,
arXiv:2104.04473, section 2.2) and wait for their heaviest stage. On a GPU, FSDP's traffic is hidden
behind arithmetic (Zhao et al., arXiv:2304.11277, section 3.3); nothing else overlaps.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

from engine.parallel.layout import ModelShape
from engine.parallel.pipeline_parallel import layers_by_stage
from engine.planner import resources
from engine.planner.memory import layer_inputs, micro_tokens, rank_elements, stage_elements
from engine.planner.resources import EFFICIENCY, FLOAT32_SHARE, STREAMED, Allocation
from engine.planner.sizes import Candidate, Workload, recomputed, sizes

HIDDEN = 0.8  # of the arithmetic's time, that FSDP's traffic may hide behind


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one step by where they go."""

    compute: float  # training's arithmetic, idle stages and recomputation included
    traffic: float  # between ranks in training, and to CPU memory
    switch: float  # bringing the new weights to rollout
    rollout: float
    ahead: float = 0.0  # of processes that only decode, meanwhile

    @property
    def trainer(self) -> float:  # of the trainer's ranks
        return self.compute + self.traffic + self.switch + self.rollout

    @property
    def total(self) -> float:
        return max(self.trainer, self.ahead)


def price(work: Workload, candidate: Candidate, allocation: Allocation) -> Price:
    """Return what one step of `work` costs under `candidate` on the ranks of `allocation`."""
    run, ahead = (work, candidate, allocation), work.ahead.seconds if work.ahead else 0.0
    return Price(_compute(*run), _traffic(*run), _switch(*run), rollout_seconds(*run), ahead)


def _flops(work: Workload) -> float:
    """Return the FLOPs of a token's forward pass, by the parameters that it meets."""
    shape, parts = work.shape, sizes(work.shape)
    matrices = parts.active * parts.layers + shape.vocab * shape.hidden
    attention = shape.layers * shape.heads * shape.head_dim * work.length  # half of it is masked
    return 2.0 * (matrices + attention)


def _rate(work: Workload, allocation: Allocation) -> float:
    """Return the FLOPs a second that a rank's matrices get."""
    return allocation.device.flops * EFFICIENCY * (1.0 if work.compute_bytes < 4 else FLOAT32_SHARE)


def _micros(work: Workload, candidate: Candidate) -> int:
    """Return micro-batches of a data-parallel rank in one pass over the batch."""
    fit = max(1, micro_tokens(work, candidate) // work.length)
    return max(-(-work.rows_of(candidate.layout) // fit), work.updates)


def _compute(work: Workload, candidate: Candidate, allocation: Allocation) -> float:
    layout = candidate.layout
    factor = 3.0 + recomputed(work.shape, candidate.checkpoints)[1]
    passes = work.trained_passes * factor + work.plain_passes
    tokens = work.rows_of(candidate.layout) * work.length
    operations = tokens * _flops(work) * passes / (layout.sp * layout.tp * layout.pp)
    micros = _micros(work, candidate)
    idle = (micros + layout.pp - 1) / micros * _imbalance(work.shape, layout.pp)
    overhead = passes * micros * work.shape.layers / layout.pp * allocation.device.kernel_s
    return operations / _rate(work, allocation) * idle + overhead * idle


@lru_cache(maxsize=1024)
def _imbalance(shape: ModelShape, pp: int) -> float:
    """Return the heaviest stage's work over the mean; the head is the last one's."""
    parts = sizes(shape)
    stages = [float(len(stage) * parts.layer) for stage in layers_by_stage(shape, pp)]
    stages[-1] += shape.vocab * shape.hidden
    return max(stages) * pp / sum(stages)


def _traffic(work: Workload, candidate: Candidate, allocation: Allocation) -> float:
    """Return seconds of what moves between ranks in training, and to a machine's memory."""
    shape, layout, size = work.shape, candidate.layout, work.compute_bytes
    micros, trained, plain = _micros(work, candidate), work.trained_passes, work.plain_passes
    seconds = partial(_collectives, candidate, allocation)
    layers, shards = shape.layers / layout.pp, candidate.shards

    # FSDP gathers all layers, or scatters their gradients.
    moved = stage_elements(shape, layout.pp) / layout.tp * (size * (shards - 1) / shards)
    sharded = seconds(("fsdp", "sp"), moved / (layers + 1), layers + 1)
    sharded = sharded * micros * (3 * trained + plain)
    if allocation.gpus:
        sharded = max(0.0, sharded - HIDDEN * _compute(work, candidate, allocation))

    # tp's two all-reduces a layer (Megatron-LM, arXiv:1909.08053, section 3), Ulysses' four
    # all-to-alls (arXiv:2309.14509, section 3), and the hand-over between stages.
    tokens = micro_tokens(work, candidate) / layout.sp
    states = tokens * shape.hidden * size
    heads = tokens * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * size / layout.tp
    forward = (
        seconds(("tp",), 2 * states * (layout.tp - 1) / layout.tp, 2 * layers)
        + seconds(("sp",), heads / 4 * (layout.sp - 1) / layout.sp, 4 * layers)
        + seconds(("pp",), states, 1)
    )

    # All-reduces of gradients over copies of the model.
    share = 1.0 if not work.adapters else work.adapters / sizes(shape).total
    moved = rank_elements(shape, layout) * (2 * (layout.dp - 1) / layout.dp * 4.0) * share
    times = micros if shards > 1 else work.updates
    gradients = seconds(("dp",), moved, times * trained)

    # Over a GPU's way to its machine's memory: weights every pass or phase, moments every update.
    copied, to_host = rank_elements(shape, layout) / resources.HOST_LINK, 0.0
    if candidate.offload_policy:
        to_host = micros * (3 * trained + plain) * copied * work.weight_bytes
    if candidate.offload_optimizer or candidate.offload_policy:
        to_host += 2 * work.optimizer_bytes * copied * work.updates * trained
    phases = plain + (3 if work.critic else 2) if candidate.moves_weights else work.moves_reference
    to_host += 2 * phases * copied * work.weight_bytes
    if candidate.activation_offload:
        to_host += 2 * trained * micros * layer_inputs(work, candidate) / resources.HOST_LINK
    return sharded + forward * micros * (2 * trained + plain) + gradients + to_host


def _collectives(
    candidate: Candidate, allocation: Allocation, axes: tuple[str, ...], moved: float, times: float
) -> float:
    """Return seconds of `times` collectives over the axes, each bringing a rank `moved` bytes."""
    axis_sizes = candidate.layout.sizes
    size = math.prod(axis_sizes[axis] for axis in axes)
    if size == 1:
        return 0.0
    names = list(axis_sizes)
    outermost = min(names.index(axis) for axis in axes if axis_sizes[axis] > 1)
    span = math.prod(axis_sizes[name] for name in names[outermost:])
    bandwidth, latency_s = allocation.link(span)
    return times * (moved / bandwidth + latency_s * math.log2(size))


def _switch(work: Workload, candidate: Candidate, allocation: Allocation) -> float:
    """Return seconds to bring a rank what it lacks for rollout (HybridFlow, table 2)."""
    if work.runs_ahead or candidate.shares_storage:
        return work.ahead.sending if work.ahead else 0.0
    layout = candidate.layout
    total = (work.adapters or sizes(work.shape).total) * work.weight_bytes
    has = 1 / (candidate.shards * layout.tp * layout.pp)
    moved = total * max(0.0, 1 / candidate.rollout_tp - has)
    return _collectives(candidate, allocation, ("pp", "fsdp", "sp", "tp"), moved, 1)


def rollout_seconds(work: Workload, candidate: Candidate, allocation: Allocation) -> float:
    """Return seconds of prefill, then of a token a row and step; further rows come in waves."""
    if not work.decodes or work.runs_ahead:
        return 0.0
    shape, device, tp = work.shape, allocation.device, candidate.rollout_tp
    replicas = max(1, candidate.layout.world_size // tp)
    rows = -(-work.rows // replicas)
    together = min(rows, work.decode_rows)
    waves = rows / together
    flops = _flops(work) / tp / _rate(work, allocation)
    prefill = rows / work.completions * work.prompt_length * flops
    cache = 2 * shape.layers * max(1.0, shape.kv_heads / tp) * shape.head_dim * work.weight_bytes
    read = sizes(shape).read(together) * work.weight_bytes / tp
    if work.shares_base and work.quantized:  # each matrix is unpacked before its product
        read += sizes(shape).total * (work.base_bytes + work.weight_bytes)
    read += together * (work.prompt_length + work.response_length / 2) * cache
    step = max(read / (device.bandwidth * STREAMED), together * flops)
    step += shape.layers * device.kernel_s
    if tp > 1:
        bandwidth, latency_s = allocation.link(tp)
        moved = 2 * together * shape.hidden * work.weight_bytes * (tp - 1) / tp
        step += 2 * shape.layers * (latency_s * math.log2(tp) + moved / bandwidth)
    return prefill + waves * work.response_length * step
