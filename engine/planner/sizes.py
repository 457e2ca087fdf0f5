"""The sizes of what is planned: one RL step, a way to lay it out, and a decoder's elements.

Pure arithmetic. Bytes are in `memory`, seconds in `cost`.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from engine.errors import counted
from engine.parallel.fsdp import THIN
from engine.parallel.layout import Layout, ModelShape

Checkpointing = bool | Literal["selective"]


@dataclass(frozen=True, slots=True)
class Samplers:
    """Processes that only decode, on GPUs of their own, while the trainer's ranks compute."""

    count: int  # each with a whole policy
    tp: int  # GPUs of each
    seconds: float  # to take new weights and decode a step's completions
    sending: float  # seconds of the trainer's ranks to hand their weights out

    @property
    def gpus(self) -> int:
        return self.count * self.tp

    def __str__(self) -> str:  # e.g. "2 samplers of 4 GPUs"
        return f"{counted(self.count, 'sampler')} of {counted(self.tp, 'GPU')}"


@dataclass(frozen=True, slots=True)
class Workload:
    """One RL step, as far as memory and time go."""

    shape: ModelShape  # the policy's; the reference has the same
    prompts: int  # a step
    completions: int  # a prompt
    prompt_length: int  # longest, in tokens
    response_length: int
    weight_bytes: float = 4.0  # an element of the weights; below 4, they have float32 masters
    base_bytes: float = 0.0  # an element of a frozen base under adapters; 0: weight_bytes
    compute_bytes: float = 4.0  # an element in forward and backward
    adapters: int = 0  # trained elements of adapters; 0: the whole model is trained
    quantized: bool = False  # the base stays whole on every rank
    reference: bool = False  # a frozen copy beside the policy
    moves_reference: bool = False  # to the machine's memory between uses
    teachers: tuple[ModelShape, ...] = ()
    critic: Layout | str = ""  # its own layout; "as actor"; empty: none
    critic_shape: ModelShape | None = None  # None: the policy's
    actor_epochs: int = 1
    critic_adapters: int = 0  # elements of its adapters; 0: all of it is trained
    critic_epochs: int = 1
    updates: int = 1  # optimizer steps an epoch
    passes: int = 0  # over the batch without gradients: old log-probs, reference
    full_kl: bool = False  # logits of two models meet
    decodes: bool = True  # here, not on a server
    decode_rows: int = 512  # at once, on a replica
    kv_cache: int = 0  # bytes of a replica's fixed cache; 0: as many as rows need
    memory_share: float = 0.0  # of a GPU that the engine takes, a copy included; 0: as rows need
    stays_awake: bool = False  # and keeps between rollouts
    samplers: int = 0  # processes beside the policy's that only decode
    sampler_bytes: float = 4.0  # an element of their weights
    sleeps: bool = False  # the engine frees its copy of the weights between rollouts
    shares_base: bool | None = False  # decodes adapters beside the base; None: where that pays
    fused: bool = False  # layers store what Liger-Kernel's functions do
    families: bool = True  # the model can be cut by tp and pp
    decodes_shards: bool = True  # ranks can decode with shards of it
    cuts_sequences: bool = True  # and by sp
    runs_ahead: bool = False  # one_step_off, async: the trainer's own rollout validates only
    ahead: Samplers | None = None  # on GPUs that are not among the trainer's

    @property
    def rows(self) -> int:  # a step
        return self.prompts * self.completions

    @property
    def length(self) -> int:  # of the longest row, in tokens
        return self.prompt_length + self.response_length

    @property
    def trained_passes(self) -> int:  # over the batch, with gradients
        return self.actor_epochs + (self.critic_epochs if self.critic else 0)

    @property
    def plain_passes(self) -> int:  # without
        return self.passes + (1 if self.critic else 0)

    def rows_of(self, layout: Layout) -> int:
        """Return the completions of a data-parallel rank."""
        return -(-self.rows // layout.data_ranks)

    @property
    def optimizer_bytes(self) -> float:
        """Return bytes of an element's two moments and, beside reduced weights, its master."""
        return 12.0 if self.weight_bytes < 4 else 8.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to lay a step out."""

    layout: Layout
    rollout_tp: int = 1
    tokens: int = 16384  # of a micro-batch
    offload_policy: bool = False
    offload_optimizer: bool = False
    activation_checkpointing: Checkpointing = False
    sequence_parallel: bool = True
    offload_params: bool = False
    activation_offload: bool = False

    @property
    def offload(self) -> tuple[bool, bool]:  # what a plan may add
        return self.offload_policy, self.offload_optimizer

    @property
    def checkpoints(self) -> Checkpointing:  # as `runtime.apply_layout` does
        return self.activation_checkpointing or self.activation_offload

    @property
    def moves_weights(self) -> bool:  # to the machine's memory between phases
        return self.offload_params and not self.offload_policy and self.shards > 1

    @property
    def shards(self) -> int:  # ranks that share weights by FSDP
        return self.layout.fsdp * self.layout.sp

    @property
    def shares_storage(self) -> bool:
        """Tell whether rollout decodes with the trainer's storage (`runtime.rollout_weights`)."""
        one_piece = self.shards * self.layout.pp == 1
        return one_piece and self.rollout_tp == self.layout.tp

    @property
    def memory_options(self) -> str:
        """Return what is offloaded to CPU memory, and what is recomputed; "" for nothing."""
        names = {
            "offload weights": self.offload_policy,
            "offload weights between phases": self.moves_weights,
            "offload moments": self.offload_optimizer,
            "offload layers' inputs": self.activation_offload,
            "recompute selectively": self.checkpoints == "selective",
            "recompute": self.checkpoints is True,
        }
        return ", ".join(name for name, used in names.items() if used)

    def __str__(self) -> str:  # e.g. "fsdp=4, rollout tp 4, 16384 tokens a micro-batch, recompute"
        text = f"{self.layout}, rollout tp {self.rollout_tp}, {self.tokens} tokens a micro-batch"
        return f"{text}, {self.memory_options}" if self.memory_options else text


@dataclass(frozen=True, slots=True)
class FixedSettings:
    """Settings of the user, which the planner keeps."""

    axes: dict[str, int] = field(default_factory=dict)  # e.g. {"tp": 2}
    rollout_tp: int | None = None
    tokens: int | None = None
    options: Candidate = Candidate(Layout())  # what it offloads stays; the planner may add to that
    activation_checkpointing: Checkpointing | None = None  # None: open
    rollout_memory: bool = False  # rows at once, or the engine's share of a GPU

    def __str__(self) -> str:  # those that are set
        parts = [f"{axis}={size}" for axis, size in self.axes.items()]
        parts += [f"rollout tp {self.rollout_tp}"] if self.rollout_tp else []
        parts += [f"{self.tokens} tokens"] if self.tokens else []
        return ", ".join(filter(None, [*parts, self.options.memory_options]))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of a model by part."""

    layer: int  # the mean layer's, where some have experts and some have none
    layers: int
    embedding: int
    head: int  # 0 where it is the embedding
    experts: int = 0  # of `layer`; a token meets `chosen` of them
    chosen: int = 0

    @property
    def total(self) -> int:
        return self.layer * self.layers + self.embedding + self.head

    @property
    def active(self) -> int:  # of a layer, what a token meets
        return self.layer - self.experts + self.chosen

    def read(self, tokens: float) -> float:
        """Return elements of the whole model that so many tokens meet together.

        If experts are chosen evenly, a token misses one with probability 1 − chosen/experts.
        """
        missed = (1 - self.chosen / self.experts) ** tokens if self.experts else 0.0
        return self.total - self.layers * self.experts * missed


def decodes_by(shape: ModelShape, tp: int) -> bool:
    """Tell whether `tp` ranks can decode together; each key head is on one, or on equally many."""
    widths = [shape.heads, shape.intermediate, shape.experts.width if shape.experts else 0]
    return not any(width % tp for width in widths) and (
        shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    )


@lru_cache(maxsize=64)
def sizes(shape: ModelShape) -> Sizes:
    """Return elements of a decoder; biases, which few families have, are left out."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * shape.hidden * (queries + keys) + 2 * shape.hidden
    table = shape.vocab * shape.hidden
    head, dense = 0 if shape.tied else table, 3 * shape.hidden * shape.intermediate
    moe = shape.experts
    if moe is None:
        return Sizes(layer + dense, shape.layers, table, head)
    expert = 3 * shape.hidden * moe.width
    rest = moe.layers * (moe.count * shape.hidden + 3 * shape.hidden * moe.shared)
    rest += (shape.layers - moe.layers) * dense
    experts = -(-moe.layers * moe.count * expert // shape.layers)
    chosen = -(-moe.layers * moe.chosen * expert // shape.layers)
    layer += experts + -(-rest // shape.layers)
    return Sizes(layer, shape.layers, table, head, experts, chosen)


def mlp_activations(shape: ModelShape, fused: bool = False) -> float:
    """Return what a token's MLP keeps for the backward pass, in elements, in a mean layer.

    Four products of its width (`fused`: three), and of experts their tokens, what they make of
    them, and that weighted.
    """
    moe, dense = shape.experts, (3.0 if fused else 4.0) * shape.intermediate
    if moe is None:
        return dense
    chosen = moe.chosen * (4.0 * moe.width + 3 * shape.hidden) + 4.0 * moe.shared
    return (moe.layers * chosen + (shape.layers - moe.layers) * dense) / shape.layers


@lru_cache(maxsize=64)
def recomputed(shape: ModelShape, checkpoints: Checkpointing, tp: int = 1) -> tuple[float, float]:
    """Return what a token keeps of a layer beside its input, and which share of it is repeated.

    In elements on one of `tp` ranks, and by the work of matrix products; of a mixture's layers,
    those with experts. The last product of a dense layer isn't repeated.
    """
    hidden, wide, moe = shape.hidden, shape.intermediate, shape.experts
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = [(hidden, queries, 1), *[(hidden, keys, 1)] * 2, (queries, hidden, 1)]
    if moe is None:
        products += [(hidden, wide, 1), (hidden, wide, 1), (wide, hidden, 1)]
    else:
        products += [(hidden, 2 * moe.width, moe.chosen), (moe.width, hidden, moe.chosen)]
    thick = [i for i, (*sides, _) in enumerate(products) if THIN * min(sides) >= max(sides)]
    kept = thick[1::2] if checkpoints == "selective" else []
    # Of a product that sums over ranks each has the whole output.
    outputs = (products[i][2] * products[i][1] / (products[i][1] == hidden or tp) for i in kept)
    work = [math.prod(product) * (i not in kept) for i, product in enumerate(products)]
    repeated = sum(work if moe else work[:-1]) / sum(map(math.prod, products))
    return sum(outputs, queries / tp if kept else 0.0), repeated if checkpoints else 0.0
