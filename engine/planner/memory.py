"""Bytes that a rank needs under a layout: pure arithmetic on the model's shape.

Weights, gradients and moments are counted as ZeRO does (Rajbhandari et al., arXiv:1910.02054,
section 3.1), in the dtypes that this engine keeps; activations in the manner of Korthikanti et al.
(arXiv:2205.05198, section 4), term by term for a decoder with RMSNorm, grouped-query attention
without stored scores (SDPA), and a gated MLP or experts. A rank loads its shards alone
(`runtime.apply_layout`); a quantised base is whole on every rank, packed a matrix at a time.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from engine.parallel.layout import Layout, ModelShape
from engine.parallel.pipeline_parallel import layers_by_stage
from engine.planner.resources import GIB
from engine.planner.sizes import Candidate, Workload, mlp_activations, recomputed, sizes

RUNTIME = int(0.75 * GIB)  # of a process: libraries, a CUDA context, communication buffers
USABLE = 0.9  # of what is left: the rest is lost to fragments
_FLOAT32 = 4.0  # bytes
_BUCKET = 64 << 20  # bytes of a file that are read at a time
_CHUNK, _FEWEST_TOKENS = 1 << 26, 256  # logits of a chunk, and its tokens at least
_PART = 64 << 20  # elements that the optimizer updates at a time where its state is offloaded
_PASSES = 1 << 30  # bytes of an engine's share of a GPU that its own passes take


def rank_elements(shape: ModelShape, layout: Layout) -> float:
    """Return elements of a model that the rank with most of them keeps under a layout."""
    return stage_elements(shape, layout.pp) / (layout.tp * layout.fsdp * layout.sp)


@lru_cache(maxsize=1024)
def stage_elements(shape: ModelShape, pp: int) -> int:
    """Return elements of the largest pipeline stage; a tied table is on the first and the last."""
    parts = sizes(shape)
    if pp == 1:
        return parts.total
    stages = [len(stage) * parts.layer for stage in layers_by_stage(shape, pp)]
    stages[0] += parts.embedding
    stages[-1] += parts.head or parts.embedding
    return max(stages)


def micro_tokens(work: Workload, candidate: Candidate) -> int:
    """Return tokens of the largest micro-batch of a data-parallel rank; no row is cut."""
    tokens = work.rows_of(candidate.layout) * work.length
    return min(max(candidate.tokens, work.length), tokens)


def activations(work: Workload, candidate: Candidate) -> float:
    """Return bytes kept between forward and backward, logits and what comes of them included."""
    shape, layout, size = work.shape, candidate.layout, work.compute_bytes
    tokens = micro_tokens(work, candidate) / layout.sp
    hidden = shape.hidden / (layout.tp if candidate.sequence_parallel else 1)
    wide = shape.heads * shape.head_dim / layout.tp
    narrow = shape.kv_heads * shape.head_dim / layout.tp
    # Two norms keep their input in float32, normed and scaled; attention q, k, v, keys and values
    # repeated for the query heads, its output twice; the MLP its four products. Fused, norms keep
    # input and output, nothing is repeated, and the MLP has three products.
    fused = work.fused and layout.tp == 1
    norms = 2 * hidden * (2 * size if fused else max(size, 4.0) + 2 * size)
    products = mlp_activations(shape, fused) / layout.tp
    layer = norms + size * ((3 if fused else 5) * wide + 2 * narrow + products)
    layers = -(-shape.layers // layout.pp)
    micros = -(-work.rows * work.length // (layout.data_ranks * micro_tokens(work, candidate)))
    flights = min(layout.pp, micros)  # 1F1B keeps as many micro-batches as there are stages
    head, checkpoints = logits(work, layout, tokens), candidate.checkpoints
    if not checkpoints:
        return tokens * layers * layer * flights + head
    kept = recomputed(shape, checkpoints, layout.tp)[0] * size
    inputs = 0.0 if candidate.activation_offload else layer_inputs(work, candidate)
    # A layer is computed again when the head's are gone.
    return (inputs + tokens * layers * kept) * flights + max(tokens * (layer - kept), head)


def layer_inputs(work: Workload, candidate: Candidate) -> float:
    """Return bytes of the inputs of a rank's layers in a micro-batch: what checkpointing keeps."""
    layout, layers = candidate.layout, -(-work.shape.layers // candidate.layout.pp)
    ranks = layout.sp * (layout.tp if candidate.sequence_parallel else 1)
    tokens = micro_tokens(work, candidate) / ranks
    return tokens * layers * work.shape.hidden * work.compute_bytes


def logits(work: Workload, layout: Layout, tokens: float) -> float:
    """Return bytes around the vocabulary: logits, log-softmax in float32, two temporaries.

    They are those of a chunk of tokens (`models.vocabulary_head`), with the head's gradient in
    float32, unless ranks share the vocabulary or logits of two models are compared.
    """
    shape, size = work.shape, work.compute_bytes
    each = size + 12.0 + (4.0 if size < 4 else 0.0)
    states = 3 * shape.hidden * size * tokens
    chunk = max(_FEWEST_TOKENS, _CHUNK // shape.vocab)
    if layout.tp > 1 or work.full_kl or tokens <= chunk:
        return states + tokens * shape.vocab / layout.tp * each * (2 if work.full_kl else 1)
    return states + shape.vocab * (chunk * each + shape.hidden * _FLOAT32)


def kv_cache(work: Workload, candidate: Candidate) -> float:
    """Return bytes of keys, values and logits of a rollout replica's rows on one of its ranks."""
    if not work.decodes or work.runs_ahead:
        return 0.0
    if work.kv_cache:
        return work.kv_cache / candidate.rollout_tp
    replicas = max(1, candidate.layout.world_size // candidate.rollout_tp)
    rows = min(work.decode_rows, -(-work.rows // replicas))
    return rows * _row_cache(work, candidate.rollout_tp)


def _row_cache(work: Workload, tp: int) -> float:
    """Return bytes of one row's keys and values on one of `tp` ranks, and of its logits."""
    shape = work.shape
    heads = max(1.0, shape.kv_heads / tp)
    cache = 2 * shape.layers * heads * shape.head_dim * work.length * work.weight_bytes
    return cache + 12.0 * shape.vocab


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes a rank needs at its peak, and of what."""

    weights: float  # of all models that are trained or compared with
    gradients: float
    moments: float  # and masters
    activations: float
    rollout: float  # a copy of the weights for rollout
    cache: float
    loading: float  # what loading needs at once
    host: float  # of the machine's memory, beside a device's
    awake: float = 0.0  # of copy and cache, what stays between rollouts
    short: float = 0.0  # what the engine's share of a GPU lacks for its weights and a row
    away: float = 0.0  # of the weights, what the machine has during rollout

    @property
    def training(self) -> float:
        return self.weights + self.gradients + self.moments + self.activations + self.awake

    @property
    def sampling(self) -> float:
        cache = max(self.cache, self.away)  # there is none while the new weights are brought
        return self.weights - self.away + self.moments + self.rollout + cache

    @property
    def peak(self) -> float:
        """The device's peak without what the process itself takes."""
        return max(self.training, self.sampling, self.loading)

    @property
    def when(self) -> str:
        """The phase of the peak."""
        names = {self.training: "training", self.sampling: "rollout", self.loading: "loading"}
        return names[self.peak]


def usable_bytes(there: int) -> float:
    """Return bytes of so much memory that a plan may use."""
    return (there - RUNTIME) * USABLE


def estimate(work: Workload, candidate: Candidate, *, gpu: bool, there: int = 0) -> Memory:
    """Return what a rank of `candidate` needs. Without a GPU all of it is the machine's memory.

    `there`: bytes of the GPU, of which an engine such as vLLM takes its share; 0: not known.
    """
    models = _models(work, candidate)
    weights, moments = sum(m.weights for m in models), sum(m.moments for m in models)
    gradients = max(m.gradients for m in models)
    # The policy in one piece, as it is loaded and as a rollout copy.
    policy = sizes(work.shape).total * (work.base_bytes or work.weight_bytes)
    policy += work.adapters * _FLOAT32
    dense = sizes(work.shape).total * work.weight_bytes / candidate.rollout_tp
    # What rollout makes, and under adapters a whole base that it decodes beside, or merges.
    copy = 0.0 if work.shares_base or (candidate.shares_storage and not work.adapters) else dense
    base = 0.0 if candidate.shares_storage or not work.adapters else policy / candidate.rollout_tp
    if work.runs_ahead:  # samplers decode
        copy = base = 0.0
    merged = work.adapters and candidate.rollout_tp == 1 and not work.stays_awake  # for a rollout
    stays = 0.0 if candidate.shares_storage else base + (0.0 if work.sleeps or merged else copy)
    copy += base
    visiting, host = 0.0, sum(m.saved for m in models)  # a checkpoint is copied there first
    away = max(m.weights for m in models) if candidate.moves_weights else 0.0
    if away:  # one model at a time is on the device
        host, weights = host + weights, away
    if candidate.activation_offload:
        host += layer_inputs(work, candidate) * candidate.layout.pp
    matrix = work.shape.hidden * work.shape.intermediate * work.weight_bytes
    if work.quantized:
        host += policy + matrix
    if candidate.offload_policy:
        host += weights + gradients + moments
        weights = gradients = moments = 0.0
    elif candidate.offload_optimizer:
        host += moments
        visiting, moments = min(moments, _PART * work.optimizer_bytes), 0.0
    cache, share, short = kv_cache(work, candidate), work.memory_share * there, 0.0
    if share and work.shares_base:  # where the base waits until the engine has started
        host += policy
    if share and work.decodes and not work.runs_ahead:
        row = _row_cache(work, candidate.rollout_tp)
        cache, short = max(row, share - dense), max(0.0, dense + row + _PASSES - share)
    loading = weights + (matrix if work.quantized else _BUCKET)
    if work.samplers and not gpu:  # processes that only decode share a machine with a rank
        more = work.samplers * (sampler_need(work) + RUNTIME)
        weights, loading = weights + more, loading + more
    return Memory(
        weights=weights,
        gradients=gradients,
        moments=moments + visiting,
        activations=_passing(work, candidate),
        rollout=copy,
        cache=cache,
        awake=stays + (cache if work.stays_awake else 0.0),
        short=short,
        away=away,
        loading=loading,
        host=host if gpu else 0.0,
    )


def sampler_need(work: Workload, count: int = 1, tp: int = 1) -> float:
    """Return bytes on a GPU of `count` processes of `tp` GPUs that only decode.

    One with a share of the memory has cache in what is left, and queues what it can't hold.
    """
    work = replace(work, weight_bytes=work.sampler_bytes, runs_ahead=False)
    candidate = Candidate(Layout(dp=count * tp), rollout_tp=tp)
    cache = _row_cache(work, tp) if work.memory_share else kv_cache(work, candidate)
    return sizes(work.shape).total * work.sampler_bytes / tp + cache


@dataclass(frozen=True, slots=True)
class _Model:
    """Bytes of one model on a rank."""

    weights: float
    gradients: float = 0.0
    moments: float = 0.0
    saved: float = 0.0  # in a checkpoint, or in the machine's memory while it isn't used


def _models(work: Workload, candidate: Candidate) -> list[_Model]:
    """Return the models of the policy's process, in the order in which they are loaded."""
    layout, size, shape = candidate.layout, work.weight_bytes, work.shape

    def model(elements: float, frozen: float, adapters: int, ranks: Layout) -> _Model:
        """Return a model with an optimizer, or a frozen one with float32 adapters, in bytes."""
        if adapters:
            trained = adapters / (ranks.world_size // ranks.dp) * _FLOAT32
            return _Model(frozen + trained, trained, 2 * trained, 3 * trained)
        weights, moments = elements * size, elements * work.optimizer_bytes
        return _Model(weights, elements * _FLOAT32, moments, weights + moments)

    policy = rank_elements(shape, layout)
    base = sizes(shape).total if work.quantized else policy
    models = [model(policy, base * (work.base_bytes or size), work.adapters, layout)]
    if work.reference:
        frozen = policy * size
        models.append(_Model(0.0, saved=frozen) if work.moves_reference else _Model(frozen))
    models += [_Model(rank_elements(teacher, layout) * size) for teacher in work.teachers]
    if work.critic:
        critic_layout = layout if isinstance(work.critic, str) else work.critic
        critic = rank_elements(work.critic_shape or shape, critic_layout)
        models.append(model(critic, critic * size, work.critic_adapters, critic_layout))
    return models


def _passing(work: Workload, candidate: Candidate) -> float:
    """Return the bytes that a pass adds: activations, and what FSDP gathers or has to reduce."""
    stored = activations(work, candidate)
    if candidate.shards == 1:
        return stored
    # FSDP gathers table and head until the end, and two layers at a time. It holds the unsharded
    # gradients of a layer, and of the head, which wait for the table's, and casts to reduce them.
    parts, size, tp = sizes(work.shape), work.compute_bytes, candidate.layout.tp
    outer = parts.embedding + parts.head
    if work.adapters:  # frozen
        return stored + (outer + 2 * parts.layer) / tp * size
    backward = (outer + parts.embedding) * size + parts.layer * (3 * size + _FLOAT32)
    last = outer * (2 * size + _FLOAT32)
    return max(stored + backward / tp, last / tp)
