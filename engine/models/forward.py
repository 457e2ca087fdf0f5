"""The trainer's forward pass over completions: log-probs, entropy and values of response tokens.

Rows are aligned to the left, and only response positions meet the vocabulary head. A model that
`packing.apply_packing` was called on runs its body on the rows without padding, and once on a
prompt that several of them share; results have the same shapes.

The pass has parts, for models that several ranks share: `response_states` (the body, where the head
reads it; `hidden_states` is all of it), the head, `read_tokens` (log-probs and entropy, by a
`TokenStatistics`). Callers choose which rows go together (micro-batching).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.models.alignment import Sequences, left_align, pack
from engine.models.chunked_head import chunked_statistics, takes_chunks
from engine.models.critic import CriticModel
from engine.models.fused import takes_rows_read
from engine.models.lora import BaseModelView
from engine.models.packing import PackedRows, packed_forward
from engine.models.routing import open_routing
from engine.models.rows_read import RowsRead
from engine.models.token_statistics import TokenStatistics, token_statistics
from engine.models.vocabulary_head import Head, vocabulary_head

Model = nn.Module | BaseModelView  # a transformers causal language model, or a policy's base


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What a forward pass says about response tokens: float32 `[B, R]`, 0 where there is none."""

    log_probs: Tensor
    entropy: Tensor | None = None
    """In nats."""
    sum_pi_squared: Tensor | None = None
    """Σ_v π(v)²."""
    full_kl: Tensor | None = None
    """KL(π ‖ π_ref), exact over the vocabulary, in nats."""
    router_balance: Tensor | None = None
    """Of a mixture's routers: see `Routing.balance`."""


def token_outputs(
    model: Model,
    batch: Batch,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference: Model | None = None,
    statistics: TokenStatistics = token_statistics,
) -> TokenOutputs:
    """Run `model` over a batch, its distributions being softmax(logits / temperature).

    The optional outputs are computed on request; the KL to `reference` if one is given. Entropy
    has a gradient only where asked for: without, its graph is not kept. The batch may be on
    another device than the model; results are on the model's.
    """
    seqs = left_align(batch)
    asked: dict[str, bool] = {
        "entropy": entropy,
        "entropy_gradient": entropy_gradient,
        "sum_pi_squared": sum_pi_squared,
    }
    if reference is None and (head := _head(model)) is not None:
        states = response_states(model, seqs)  # type: ignore[arg-type]
        return read_states(head, states, seqs, batch, temperature, statistics=statistics, **asked)
    logits = model_logits(model, seqs)
    theirs = None
    if reference is not None:
        with torch.no_grad():
            theirs = model_logits(reference, seqs)
    return read_tokens(
        logits, seqs, batch, temperature, statistics=statistics, reference_logits=theirs, **asked
    )


def response_log_probs(
    model: Model,
    batch: Batch,
    temperature: float,
    *,
    statistics: TokenStatistics = token_statistics,
) -> Tensor:
    """Log-probs `[B, R]` (float32) of the response tokens; 0 where there is no token."""
    return token_outputs(model, batch, temperature, statistics=statistics).log_probs


def response_values(critic: CriticModel | nn.Module, batch: Batch) -> Tensor:
    """Values `[B, R]` of the states before each response token; 0 where there is no token."""
    seqs = left_align(batch)
    if isinstance(critic, CriticModel) and (rows := pack(critic, seqs)) is not None:
        flat = critic.values(_packed_states(critic, rows, seqs))
        return scatter_tokens(flat, seqs.to(flat.device), batch["responses"])
    values: Tensor = critic(seqs.input_ids.to(next(critic.parameters()).device), None)
    return read_values(values, seqs, batch)


def response_states(model: nn.Module, seqs: Sequences) -> Tensor:
    """Outputs of the body's last norm `[N, H]` that predict response tokens: what the head reads.

    `model` is a language model or a critic.
    """
    if (rows := _packed(model, seqs)) is not None:
        return _packed_states(model, rows, seqs)
    return seqs.states(hidden_states(model, seqs))


def hidden_states(model: nn.Module, seqs: Sequences, position_ids: Tensor | None = None) -> Tensor:
    """Outputs of the body's last norm `[B, L, H]` for padded rows; padding's are anything.

    `model` is a language model or a critic. `position_ids [B, L]` are those of columns that are a
    share of longer rows.
    """
    whole: Any = model
    ids = seqs.input_ids.to(_device(model))
    where = {} if position_ids is None else {"position_ids": position_ids.to(ids.device)}
    hidden: Tensor = whole.base_model(input_ids=ids, use_cache=False, **where).last_hidden_state
    return hidden


@torch.no_grad()
def packing_error(model: nn.Module, batch: Batch) -> float:
    """How far packed rows are from padded ones: ‖difference‖/‖hidden states‖, a token's mean.

    Of a model that packing was applied to.
    """
    seqs = left_align(batch)
    rows = pack(model, seqs, True)
    assert rows is not None
    return distance(_packed_states(model, rows, seqs), seqs.states(hidden_states(model, seqs)))


def distance(states: Tensor, wanted: Tensor) -> float:
    """How far `states` [N, H] are from `wanted` ones, over their norms: a token's mean."""
    wanted = wanted.float()
    each = (states.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    return float(each.mean()) if len(each) else 0.0


def _packed(model: nn.Module, seqs: Sequences) -> PackedRows | None:
    """`pack`, of rows that are run next: an open Routing is told how they lie."""
    rows = pack(model, seqs)
    if (open_now := open_routing(model)) is not None:
        open_now.lay_out(seqs, rows, _device(model))
    return rows


def _packed_states(model: nn.Module, rows: PackedRows, seqs: Sequences) -> Tensor:
    body: Any = model.base_model
    seqs = seqs.to(rows.places.device)
    index = rows.index(seqs.rows, seqs.positions)
    if takes_rows_read(model):
        different, place = index.unique(return_inverse=True)  # a prompt's end has several readers
        shared = len(different) < len(index)
        read = RowsRead.at(different if shared else index)
        states: Tensor = packed_forward(body, rows, read=read).last_hidden_state[0]
        return states.index_select(0, place) if shared else states[: len(index)]
    hidden: Tensor = packed_forward(body, rows).last_hidden_state
    return hidden[0].index_select(0, index)


def response_logits(head: Head, hidden: Tensor, seqs: Sequences) -> Tensor:
    """What `head` makes `[N, V]` of the hidden states `[B, L, H]` that predict response tokens."""
    return head(seqs.states(hidden))


def read_states(
    head: Head,
    states: Tensor,
    seqs: Sequences,
    batch: Batch,
    temperature: float,
    *,
    statistics: TokenStatistics = token_statistics,
    **asked: Any,
) -> TokenOutputs:
    """As `read_tokens`, off the hidden states `[N, H]` that `head` reads.

    A plain head gives the statistics a chunk of tokens at a time, without their logits.
    """
    if statistics is not token_statistics or not takes_chunks(head):
        logits = head(states)
        return read_tokens(logits, seqs, batch, temperature, statistics=statistics, **asked)
    seqs = seqs.to(states.device)
    flat = chunked_statistics(head, states, seqs.targets, temperature, **asked)
    return _in_columns(flat, seqs, batch)


def read_tokens(
    logits: Tensor,
    seqs: Sequences,
    batch: Batch,
    temperature: float,
    *,
    statistics: TokenStatistics = token_statistics,
    entropy: bool = False,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference_logits: Tensor | None = None,
) -> TokenOutputs:
    """Read statistics of the N response tokens off their logits `[N, V]` into the batch's columns.

    `reference_logits` are of the same shape. V is whatever `statistics` can read: a share of the
    vocabulary, for one that knows the other shares' ranks.
    """
    seqs = seqs.to(logits.device)
    flat = statistics(
        logits,
        seqs.targets,
        temperature,
        entropy=entropy,
        entropy_gradient=entropy_gradient,
        sum_pi_squared=sum_pi_squared,
        reference_logits=reference_logits,
    )
    return _in_columns(flat, seqs, batch)


def read_values(values: Tensor, seqs: Sequences, batch: Batch) -> Tensor:
    """Put a critic's outputs `[B, L]` into the batch's response columns, `[B, R]` in float32."""
    flat = seqs.states(values).float()
    return scatter_tokens(flat, seqs.to(values.device), batch["responses"])


def model_logits(model: Model, seqs: Sequences) -> Tensor:
    """Logits [N, V] at the positions that predict response tokens."""
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
    """What makes logits of hidden states, where it is known."""
    return None if isinstance(model, BaseModelView) else vocabulary_head(model)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _in_columns(flat: dict[str, Tensor], seqs: Sequences, batch: Batch) -> TokenOutputs:
    like = batch["responses"]
    return TokenOutputs(**{name: scatter_tokens(value, seqs, like) for name, value in flat.items()})


def scatter_tokens(flat: Tensor, seqs: Sequences, like: Tensor) -> Tensor:
    """Values `[N, …]` of the response tokens of `seqs` in their columns `[B, R, …]`, 0 elsewhere.

    Integers keep their dtype, all else is float32. `like` is `[B, R]`.
    """
    dtype = torch.float32 if flat.is_floating_point() else flat.dtype
    out = torch.zeros((*like.shape, *flat.shape[1:]), dtype=dtype, device=flat.device)
    return out.index_put((seqs.rows, seqs.columns), flat)
