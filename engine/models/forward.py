"""The trainer's forward pass over completions, and its outputs for each response token.

Rows are aligned to the left, or packed where `packing.apply_packing` was called, and only response
positions meet the vocabulary head. The pass has parts, for models that several ranks share:
`response_states` (the body, where the head reads it; `hidden_states` is all of it), the head, and
`read_tokens` (log-probs and entropy, by a `TokenStatistics`).

An `OutputReader` runs a full model (`from_model`), or computes the outputs from the hidden states
of a body that ran elsewhere (`from_hidden`): on another pipeline stage, or on a part of each
sequence. All outputs are float32 `[b, R]` by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from engine.algorithms.divergences import Divergence, full_divergence, top_k_divergence, with_rest
from engine.batch import Batch
from engine.kernels.training_ops import RowsRead
from engine.models.fused import takes_rows_read
from engine.models.lora import BaseModelView
from engine.models.packing import PackedRows, Sequences, body_of, left_align, pack, packed_forward
from engine.models.routing import open_routing, routing
from engine.models.value_head import CriticModel, head_values
from engine.models.vocabulary_head import (
    Head,
    StatisticsOptions,
    TokenStatistics,
    chunked_statistics,
    require_vocabulary_head,
    takes_chunks,
    token_statistics,
    vocabulary_head,
)

Model = nn.Module | BaseModelView  # a transformers causal language model, or a policy's base


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Outputs of a forward pass for response tokens: float32 `[B, R]`, 0 where there is none."""

    log_probs: Tensor
    entropy: Tensor | None = None  # in nats
    sum_pi_squared: Tensor | None = None  # Σ_v π(v)²
    full_kl: Tensor | None = None  # KL(π ‖ π_ref), exact over the vocabulary, in nats
    router_balance: Tensor | None = None  # see `Routing.load_balancing_loss`

    def named(self) -> dict[str, Tensor]:
        """Return those that were computed, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def token_outputs(
    model: Model,
    batch: Batch,
    temperature: float,
    *,
    statistics: TokenStatistics = token_statistics,
    **options: Unpack[StatisticsOptions],
) -> TokenOutputs:
    """Run `model` over a batch, on its device; distributions are softmax(logits / temperature)."""
    seqs = left_align(batch)
    if (head := _head(model)) is not None:
        states = response_states(model, seqs)  # type: ignore[arg-type]
        return read_states(head, states, seqs, batch, temperature, statistics, **options)
    return read_tokens(model_logits(model, seqs), seqs, batch, temperature, statistics, **options)


def response_values(critic: CriticModel, batch: Batch) -> Tensor:
    """Compute values `[B, R]` of the states before each response token; 0 where there is none."""
    seqs = left_align(batch)
    flat = critic.values(response_states(critic, seqs))
    return scatter_tokens(flat, seqs.to(flat.device), batch["responses"])


def response_states(model: nn.Module, seqs: Sequences) -> Tensor:
    """Compute what the head of a model or critic reads: the outputs `[N, H]` before each token."""
    if (rows := _packed(model, seqs)) is not None:
        return _packed_states(model, rows, seqs)
    return seqs.states(hidden_states(model, seqs))


def hidden_states(model: nn.Module, seqs: Sequences, position_ids: Tensor | None = None) -> Tensor:
    """Compute the outputs of a body's last norm `[B, L, H]` for padded rows; at padding, anything.

    `position_ids [B, L]`: of columns that are a share of longer rows.
    """
    ids = seqs.input_ids.to(_device(model))
    options = {} if position_ids is None else {"position_ids": position_ids.to(ids.device)}
    return body_of(model)(input_ids=ids, use_cache=False, **options).last_hidden_state


@torch.no_grad()
def packing_error(model: nn.Module, batch: Batch) -> float:
    """Measure ‖packed − padded‖/‖padded‖ of a packed model's hidden states, a mean over tokens."""
    seqs = left_align(batch)
    rows = pack(model, seqs, True)
    assert rows is not None
    return distance(_packed_states(model, rows, seqs), seqs.states(hidden_states(model, seqs)))


def distance(states: Tensor, expected: Tensor) -> float:
    """Measure ‖states − expected‖/‖expected‖ of rows [N, H]; return the mean, 0 of none."""
    expected = expected.float()
    distances = (states.float() - expected).norm(dim=1) / expected.norm(dim=1)
    return float(distances.mean()) if len(distances) else 0.0


def _packed(model: nn.Module, seqs: Sequences) -> PackedRows | None:
    """Pack rows that are run next; an open Routing is told how they lie."""
    rows = pack(model, seqs)
    if (open_now := open_routing(model)) is not None:
        open_now.lay_out(seqs, rows, _device(model))
    return rows


def _packed_states(model: nn.Module, rows: PackedRows, seqs: Sequences) -> Tensor:
    body, seqs = body_of(model), seqs.to(rows.places.device)
    index = rows.index(seqs.rows, seqs.positions)
    if takes_rows_read(model):
        different, inverse = index.unique(return_inverse=True)  # several read a prompt's end
        shared = len(different) < len(index)
        read = RowsRead.at(different if shared else index)
        states = packed_forward(body, rows, read=read).last_hidden_state[0]
        return states.index_select(0, inverse) if shared else states[: len(index)]
    return packed_forward(body, rows).last_hidden_state[0].index_select(0, index)


def read_states(
    head: Head,
    states: Tensor,
    seqs: Sequences,
    batch: Batch,
    temperature: float,
    statistics: TokenStatistics,
    **options: Unpack[StatisticsOptions],
) -> TokenOutputs:
    """Read what `read_tokens` does off hidden states `[N, H]`, in chunks where `head` is plain."""
    if statistics is not token_statistics or not takes_chunks(head):
        return read_tokens(head(states), seqs, batch, temperature, statistics, **options)
    seqs = seqs.to(states.device)
    flat = chunked_statistics(head, states, seqs.targets, temperature, **options)
    return _in_columns(flat, seqs, batch)


def read_tokens(
    logits: Tensor,
    seqs: Sequences,
    batch: Batch,
    temperature: float,
    statistics: TokenStatistics,
    reference_logits: Tensor | None = None,
    **options: Unpack[StatisticsOptions],
) -> TokenOutputs:
    """Read statistics of the N response tokens off their logits `[N, V]` into the batch's columns.

    V is whatever `statistics` can read: a share of the vocabulary, where it knows other ranks'.
    """
    seqs = seqs.to(logits.device)
    flat = statistics(
        logits, seqs.targets, temperature, reference_logits=reference_logits, **options
    )
    return _in_columns(flat, seqs, batch)


def model_logits(model: Model, seqs: Sequences) -> Tensor:
    """Compute logits [N, V] at the positions that predict response tokens."""
    if isinstance(model, BaseModelView):
        with model.weights() as base:
            return model_logits(base, seqs)
    if (head := _head(model)) is not None:
        return head(response_states(model, seqs))
    if (rows := _packed(model, seqs)) is not None:
        logits = packed_forward(model, rows).logits
        seqs = seqs.to(logits.device)
        return logits[0, rows.index(seqs.rows, seqs.positions)]
    logits = model(input_ids=seqs.input_ids.to(_device(model)), use_cache=False).logits
    seqs = seqs.to(logits.device)
    return logits[seqs.rows, seqs.positions]


def _head(model: Model) -> Head | None:
    """Return what makes logits of hidden states, where it is known."""
    return None if isinstance(model, BaseModelView) else vocabulary_head(model)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _in_columns(flat: dict[str, Tensor], seqs: Sequences, batch: Batch) -> TokenOutputs:
    like = batch["responses"]
    return TokenOutputs(**{name: scatter_tokens(value, seqs, like) for name, value in flat.items()})


def scatter_tokens(flat: Tensor, seqs: Sequences, like: Tensor) -> Tensor:
    """Put values `[N, …]` of the response tokens of `seqs` into columns `[B, R, …]`, 0 elsewhere.

    Integers keep their dtype, all else is float32. `like` is `[B, R]`.
    """
    dtype = torch.float32 if flat.is_floating_point() else flat.dtype
    out = torch.zeros((*like.shape, *flat.shape[1:]), dtype=dtype, device=flat.device)
    return out.index_put((seqs.rows, seqs.columns), flat)


Outputs = dict[str, Tensor]
ReferenceLogits = Callable[[Batch], Tensor]  # at a micro-batch's response tokens
Divergences = Iterator[tuple[int, Tensor]]  # [N] each, with the number of the teacher


class OutputReader(ABC):
    """Computes named outputs from a model."""

    __slots__ = ()

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of the outputs, in a fixed order."""

    @abstractmethod
    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        """Run a model whose body this rank has in full."""

    @abstractmethod
    def from_hidden(self, module: Any, hidden: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        """Compute outputs `[b, R]` of the tokens of `seqs` from hidden states `[b, L, H]`."""

    def around(self, module: nn.Module, micro: Batch) -> AbstractContextManager[object]:
        """Return the context of a pass with `from_model` and of its backward pass."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class LogProbReader(OutputReader):
    """Log-probs of a policy, whose distributions are softmax(logits / temperature)."""

    temperature: float
    entropy: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False
    statistics: TokenStatistics = token_statistics
    reference: ReferenceLogits | None = None  # for the exact KL to its model
    router_balance: bool = False  # the load-balancing loss of a mixture of experts
    replay: bool = False  # have routers choose the batch's `routed_experts`
    record: Callable[[Tensor], None] | None = None  # gets each pass's `routed_experts`

    def names(self) -> tuple[str, ...]:
        """Return `log_probs`, then the requested names."""
        requested = {
            "entropy": self.entropy,
            "sum_pi_squared": self.sum_pi_squared,
            "full_kl": self.reference is not None,
            "router_balance": self.router_balance,
        }
        return ("log_probs", *(name for name, included in requested.items() if included))

    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        if self.reference is not None:
            seqs = left_align(micro)
            read = self._with_reference(model_logits(module, seqs), seqs, micro)
        else:
            read = token_outputs(
                module, micro, self.temperature, statistics=self.statistics, **self._options()
            )
        outputs = read.named()
        if (routers := open_routing(module)) is not None:
            if self.record is not None:
                self.record(routers.routed_experts())
            if self.router_balance:
                outputs["router_balance"] = routers.load_balancing_loss(micro["responses"])
        return outputs

    def around(self, module: nn.Module, micro: Batch) -> AbstractContextManager[object]:
        """Record the routers' choices, or make them."""
        if not (self.router_balance or self.replay or self.record is not None):
            return nullcontext()
        return routing(module, micro, replay=self.replay)

    def from_hidden(self, module: Any, hidden: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        head, states = require_vocabulary_head(module), seqs.states(hidden)
        if self.reference is not None:
            return self._with_reference(head(states), seqs, micro).named()
        options = (seqs, micro, self.temperature, self.statistics)
        return read_states(head, states, *options, **self._options()).named()

    def _with_reference(self, logits: Tensor, seqs: Sequences, micro: Batch) -> TokenOutputs:
        assert self.reference is not None
        options = (self.temperature, self.statistics, self.reference(micro))
        return read_tokens(logits, seqs, micro, *options, **self._options())

    def _options(self) -> StatisticsOptions:
        return {
            "entropy": self.entropy,
            "entropy_gradient": self.entropy_gradient,
            "sum_pi_squared": self.sum_pi_squared,
        }


class ValueReader(OutputReader):
    """Values of a critic, by name `values`."""

    def names(self) -> tuple[str, ...]:
        return ("values",)

    def from_model(self, module: Any, micro: Batch) -> Outputs:
        return {"values": response_values(module, micro)}

    def from_hidden(self, module: Any, hidden: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        flat = head_values(module.get_output_embeddings(), seqs.states(hidden))
        return {"values": scatter_tokens(flat, seqs.to(flat.device), micro["responses"])}


class _LogitsReader(OutputReader):
    """Outputs read off whole rows of logits, in distillation: without tp and pp."""

    __slots__ = ()

    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        seqs = left_align(micro)
        return self._read(model_logits(module, seqs), seqs, micro)

    def from_hidden(self, module: Any, hidden: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        return self._read(require_vocabulary_head(module)(seqs.states(hidden)), seqs, micro)

    def _read(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        seqs = seqs.to(logits.device)
        flat = self._outputs(logits, seqs, micro)
        return {name: scatter_tokens(x, seqs, micro["responses"]) for name, x in flat.items()}

    @abstractmethod
    def _outputs(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        """Return outputs by name, `[N, …]` of the N response tokens of `seqs`."""


@dataclass(frozen=True, slots=True)
class TopKReader(_LogitsReader):
    """A teacher's likeliest tokens: `teacher_ids [b, R, K]`, `teacher_log_probs [b, R, K+1]`.

    Of softmax(logits / temperature); ids are int32, and the last log-prob is all other tokens'.
    """

    temperature: float
    k: int
    vocabulary: int  # of the student; what the teacher's logits have beyond it is left out

    def names(self) -> tuple[str, ...]:
        return ("teacher_ids", "teacher_log_probs")

    def _outputs(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        logits = logits[:, : self.vocabulary].float() / self.temperature
        ids = logits.topk(min(self.k, logits.shape[1])).indices
        log_probs = with_rest(logits.log_softmax(-1), ids)
        return {"teacher_ids": ids.int(), "teacher_log_probs": log_probs}


@dataclass(frozen=True, slots=True)
class DivergenceReader(_LogitsReader):
    """A student's `log_probs`, `entropy` and `divergence`, `[b, R]` each.

    The divergence is the mean by `teacher_weights [b, T]` of those from `teachers`' logits, or
    without any from the batch's `teacher_ids` and `teacher_log_probs`.
    """

    temperature: float
    kind: Divergence
    beta: float
    teachers: Sequence[ReferenceLogits] = ()
    skip: bool = False  # teachers that no row of a micro-batch has; not where ranks go together

    def names(self) -> tuple[str, ...]:
        return ("log_probs", "entropy", "divergence")

    def _outputs(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        out = token_statistics(logits, seqs.targets, self.temperature, entropy=True)
        weights = micro["teacher_weights"].to(logits.device)
        total = logits.new_zeros(len(logits), dtype=torch.float32)
        divergences = self._from_logits if self.teachers else self._from_top_k
        for i, divergence in divergences(logits, seqs, micro):
            total = total + weights[seqs.rows, i].to(divergence) * divergence
        return out | {"divergence": total}

    def _from_logits(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Divergences:
        options: dict[str, Any] = {"beta": self.beta, "temperature": self.temperature}
        for i, teacher in enumerate(self.teachers):
            if not self.skip or bool(micro["teacher_weights"][:, i].any()):
                yield i, full_divergence(logits, teacher(micro), self.kind, **options)

    def _from_top_k(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Divergences:
        options: dict[str, Any] = {"beta": self.beta, "temperature": self.temperature}
        count = micro["teacher_weights"].shape[1]
        teachers = (
            micro[name].to(logits.device)[seqs.rows, seqs.columns].unflatten(1, (count, -1))
            for name in ("teacher_ids", "teacher_log_probs")
        )
        for i, (ids, log_probs) in enumerate(zip(*(t.unbind(1) for t in teachers), strict=True)):
            yield i, top_k_divergence(logits, ids, log_probs, self.kind, **options)
