"""Outputs of a forward pass for each response token: log-probs and related values, or values.

A reader runs a full model (`from_model`), or computes the outputs from the hidden states of a body
that ran elsewhere (`from_hidden`): on another pipeline stage, or on a part of each sequence. All
outputs are float32 `[b, R]` by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from engine.batch import Batch
from engine.models.alignment import Sequences, left_align
from engine.models.critic import head_values
from engine.models.forward import (
    TokenStatistics,
    model_logits,
    read_tokens,
    read_values,
    response_logits,
    response_values,
    token_outputs,
    token_statistics,
)

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


@dataclass(frozen=True, slots=True)
class LogProbReader:
    """Log-probs of a policy, whose distributions are softmax(logits / temperature)."""

    temperature: float
    entropy: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False
    statistics: TokenStatistics = token_statistics
    reference: ReferenceLogits | None = None  # for the exact KL to its model

    def names(self) -> tuple[str, ...]:
        """`log_probs`, then the requested ones."""
        requested = {
            "entropy": self.entropy,
            "sum_pi_squared": self.sum_pi_squared,
            "full_kl": self.reference is not None,
        }
        return ("log_probs", *(name for name, wanted in requested.items() if wanted))

    def from_model(self, module: Any, micro: Batch) -> Outputs:
        """One forward pass of a causal language model of any family."""
        if self.reference is not None:
            seqs = left_align(micro)
            return self._read(model_logits(module, seqs), seqs, micro)
        out = token_outputs(
            module,
            micro,
            self.temperature,
            reference=None,
            statistics=self.statistics,
            **self._options(),
        )
        return {name: getattr(out, name) for name in self.names()}

    def from_hidden(self, module: Any, hidden: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        """Apply the head and the softmax."""
        logits = response_logits(module.get_output_embeddings(), hidden, seqs)
        return self._read(logits, seqs, micro)

    def _read(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        theirs = None if self.reference is None else self.reference(micro)
        out = read_tokens(
            logits,
            seqs,
            micro,
            self.temperature,
            statistics=self.statistics,
            reference_logits=theirs,
            **self._options(),
        )
        return {name: getattr(out, name) for name in self.names()}

    def _options(self) -> dict[str, bool]:
        return {
            "entropy": self.entropy,
            "entropy_gradient": self.entropy_gradient,
            "sum_pi_squared": self.sum_pi_squared,
        }


class ValueReader:
    """Values of a critic, by name `values`."""

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
