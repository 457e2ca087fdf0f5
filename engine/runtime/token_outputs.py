"""Outputs of a forward pass for each response token: log-probs and related values, or values.

A reader runs a full model (`from_model`), or computes the outputs from the hidden states of a body
that ran elsewhere (`from_hidden`): on another pipeline stage, or on a part of each sequence. All
outputs are float32 `[b, R]` by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from engine.batch import Batch
from engine.models.alignment import Sequences, left_align
from engine.models.critic import head_values
from engine.models.forward import (
    TokenOutputs,
    model_logits,
    read_states,
    read_tokens,
    read_values,
    response_logits,
    response_values,
    token_outputs,
)
from engine.models.routing import open_routing, routing
from engine.models.token_statistics import TokenStatistics, token_statistics
from engine.models.vocabulary_head import require_vocabulary_head

Outputs = dict[str, Tensor]
ReferenceLogits = Callable[[Batch], Tensor]  # at a micro-batch's response tokens


class OutputReader(Protocol):
    """Computes named outputs from a model."""

    def names(self) -> tuple[str, ...]:
        """Names of the outputs, in a fixed order."""
        ...

    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        """Run a model whose body this rank has in full."""
        ...

    def from_hidden(
        self, module: nn.Module, hidden: Tensor, seqs: Sequences, micro: Batch
    ) -> Outputs:
        """Outputs `[b, R]` of the tokens of `seqs` from hidden states `[b, L, H]`; 0 elsewhere."""
        ...

    def around(self, module: nn.Module, micro: Batch) -> AbstractContextManager[object]:
        """The context of a pass with `from_model` and of its backward pass."""
        ...


@dataclass(frozen=True, slots=True)
class LogProbReader:
    """Log-probs of a policy, whose distributions are softmax(logits / temperature)."""

    temperature: float
    entropy: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False
    statistics: TokenStatistics = token_statistics
    reference: ReferenceLogits | None = None  # for the exact KL to its model
    router_balance: bool = False  # of a mixture of experts
    replay: bool = False  # have routers choose the batch's `routed_experts`
    record: Callable[[Tensor], None] | None = None  # gets each pass's `routed_experts`

    def names(self) -> tuple[str, ...]:
        """`log_probs`, then the requested ones."""
        requested = {
            "entropy": self.entropy,
            "sum_pi_squared": self.sum_pi_squared,
            "full_kl": self.reference is not None,
            "router_balance": self.router_balance,
        }
        return ("log_probs", *(name for name, wanted in requested.items() if wanted))

    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        """One forward pass of a causal language model of any family."""
        if self.reference is not None:
            seqs = left_align(micro)
            read = self._with_reference(model_logits(module, seqs), seqs, micro)
        else:
            read = token_outputs(
                module, micro, self.temperature, statistics=self.statistics, **self._options()
            )
        found = {name: getattr(read, name) for name in self.names()}
        if (routers := open_routing(module)) is not None:
            if self.record is not None:
                self.record(routers.routed_experts())
            if self.router_balance:
                found["router_balance"] = routers.load_balancing_loss(micro["responses"])
        return found

    def around(self, module: nn.Module, micro: Batch) -> AbstractContextManager[object]:
        """Routers' choices are looked at, or made."""
        if not (self.router_balance or self.replay or self.record is not None):
            return nullcontext()
        return routing(module, micro, replay=self.replay)

    def from_hidden(
        self, module: nn.Module, hidden: Tensor, seqs: Sequences, micro: Batch
    ) -> Outputs:
        """Apply the head and the softmax."""
        head = require_vocabulary_head(module)
        if self.reference is not None:
            read = self._with_reference(response_logits(head, hidden, seqs), seqs, micro)
            return {name: getattr(read, name) for name in self.names()}
        read = read_states(
            head,
            seqs.states(hidden),
            seqs.to(hidden.device),
            micro,
            self.temperature,
            statistics=self.statistics,
            **self._options(),
        )
        return {name: getattr(read, name) for name in self.names()}

    def _with_reference(self, logits: Tensor, seqs: Sequences, micro: Batch) -> TokenOutputs:
        assert self.reference is not None
        return read_tokens(
            logits,
            seqs,
            micro,
            self.temperature,
            statistics=self.statistics,
            reference_logits=self.reference(micro),
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {
            "entropy": self.entropy,
            "entropy_gradient": self.entropy_gradient,
            "sum_pi_squared": self.sum_pi_squared,
        }


class ValueReader:
    """Values of a critic, by name `values`."""

    def around(self, module: nn.Module, micro: Batch) -> AbstractContextManager[object]:
        """Nothing more."""
        return nullcontext()

    def names(self) -> tuple[str, ...]:
        """`values` alone."""
        return ("values",)

    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        """One forward pass of a model that returns values `[b, L]` for tokens `[b, L]`."""
        return {"values": response_values(module, micro)}

    def from_hidden(self, module: Any, hidden: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        """Apply the value head."""
        values = head_values(module.get_output_embeddings(), hidden)
        return {"values": read_values(values, seqs, micro)}
