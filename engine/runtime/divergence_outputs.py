"""Outputs of a forward pass for distillation: a teacher's likeliest tokens, and a student's
divergence from teachers.

Both read whole rows of logits, so the vocabulary is not split over ranks (tp), and a model has no
stages (pp). The losses are in `engine.algorithms.distillation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.algorithms.distillation import (
    Divergence,
    full_divergence,
    top_k_divergence,
    with_rest,
)
from engine.batch import Batch
from engine.models.alignment import Sequences, left_align
from engine.models.forward import model_logits, response_logits, scatter_tokens
from engine.models.token_statistics import token_statistics
from engine.models.vocabulary_head import require_vocabulary_head
from engine.runtime.token_outputs import Outputs, ReferenceLogits


class _LogitsReader(ABC):
    """Outputs that are read off logits."""

    def around(self, module: nn.Module, micro: Batch) -> AbstractContextManager[object]:
        """Nothing more."""
        return nullcontext()

    def from_model(self, module: nn.Module, micro: Batch) -> Outputs:
        """One forward pass of a causal language model."""
        seqs = left_align(micro)
        return self._read(model_logits(module, seqs), seqs, micro)

    def from_hidden(
        self, module: nn.Module, hidden: Tensor, seqs: Sequences, micro: Batch
    ) -> Outputs:
        """Apply the head."""
        return self._read(
            response_logits(require_vocabulary_head(module), hidden, seqs), seqs, micro
        )

    def _read(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        seqs = seqs.to(logits.device)
        flat = self._outputs(logits, seqs, micro)
        return {name: scatter_tokens(x, seqs, micro["responses"]) for name, x in flat.items()}

    @abstractmethod
    def _outputs(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        """By name `[N, …]` of the N response tokens of `seqs`."""


@dataclass(frozen=True, slots=True)
class TopKReader(_LogitsReader):
    """`teacher_ids [b, R, K]` int32 and `teacher_log_probs [b, R, K+1]`: the likeliest tokens of
    softmax(logits / temperature), and all others together."""

    temperature: float
    k: int
    vocabulary: int  # of the student; what the teacher's logits have beyond it is left out

    def names(self) -> tuple[str, ...]:
        """The two."""
        return ("teacher_ids", "teacher_log_probs")

    def _outputs(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        own = logits[:, : self.vocabulary].float() / self.temperature
        ids = own.topk(min(self.k, own.shape[1])).indices
        log_probs = with_rest(own.log_softmax(-1), ids)
        return {"teacher_ids": ids.int(), "teacher_log_probs": log_probs}


@dataclass(frozen=True, slots=True)
class DivergenceReader(_LogitsReader):
    """`log_probs`, `entropy` and `divergence` `[b, R]` of a student.

    The divergence is the mean by `teacher_weights [b, T]` of those from `teachers`, whose logits
    are computed here, or without any from the batch's `teacher_ids` and `teacher_log_probs`.
    """

    temperature: float
    kind: Divergence
    beta: float
    teachers: Sequence[ReferenceLogits] = ()
    skip: bool = False  # teachers that no row of a micro-batch has; not where ranks go together

    def names(self) -> tuple[str, ...]:
        """The three."""
        return ("log_probs", "entropy", "divergence")

    def _outputs(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Outputs:
        out = token_statistics(logits, seqs.targets, self.temperature, entropy=True)
        each = self._from_logits if self.teachers else self._from_top_k
        return out | {"divergence": each(logits, seqs, micro)}

    def _from_logits(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Tensor:
        weights = micro["teacher_weights"]
        total = logits.new_zeros(len(logits), dtype=torch.float32)
        for i, teacher in enumerate(self.teachers):
            if self.skip and not bool(weights[:, i].any()):
                continue
            found = full_divergence(
                logits, teacher(micro), self.kind, beta=self.beta, temperature=self.temperature
            )
            total = total + weights[seqs.rows, i].to(found) * found
        return total

    def _from_top_k(self, logits: Tensor, seqs: Sequences, micro: Batch) -> Tensor:
        weights = micro["teacher_weights"].to(logits.device)
        count = weights.shape[1]
        ids, log_probs = (
            micro[name].to(logits.device)[seqs.rows, seqs.columns].unflatten(1, (count, -1))
            for name in ("teacher_ids", "teacher_log_probs")
        )
        total = logits.new_zeros(len(logits), dtype=torch.float32)
        for i in range(count):
            found = top_k_divergence(
                logits,
                ids[:, i],
                log_probs[:, i],
                self.kind,
                beta=self.beta,
                temperature=self.temperature,
            )
            total = total + weights[seqs.rows, i] * found
        return total
