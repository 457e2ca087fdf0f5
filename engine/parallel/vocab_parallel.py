"""Softmax over a vocabulary that is split over ranks: log-probs, entropy, Σπ², and exact KL.

Each rank has the logits of consecutive vocabulary entries: ranks exchange a few numbers a token in
the forward pass and nothing in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_CHUNK_TOKENS = 512  # float32 copies of logits exist for so many tokens at a time


def vocabulary_bounds(vocabulary: int, shards: int, index: int) -> tuple[int, int]:
    """Return the first entry of shard `index` and the one after its last: DTensor's chunks.

    >>> [vocabulary_bounds(97, 4, index) for index in range(4)]
    [(0, 25), (25, 50), (50, 75), (75, 97)]
    """
    width = -(-vocabulary // shards)
    return min(index * width, vocabulary), min((index + 1) * width, vocabulary)


@dataclass(frozen=True, slots=True)
class VocabParallelStatistics:
    """Statistics of softmax over a vocabulary of which this rank has a shard.

    A `models.vocabulary_head.TokenStatistics`, of local logits `[N, V_local]` and targets `[N]`
    that are numbers in the full vocabulary. Columns past `stop − start` are padding. Every rank
    gets the same results, and must run the same loss on them: the gradient is then exact, unsent.
    """

    start: int  # number of the first local entry, e.g. 75968
    stop: int  # one past the last, e.g. 151936
    group: dist.ProcessGroup | None  # the shards' ranks; None where this rank is the only one

    @classmethod
    def of(cls, vocabulary: int, mesh: DeviceMesh) -> Self:
        """Take this rank's shard in a one-dimensional `mesh`, as the parallel head is split."""
        start, stop = vocabulary_bounds(vocabulary, mesh.size(), mesh.get_local_rank())
        return cls(start, stop, mesh.get_group() if mesh.size() > 1 else None)

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        reference_logits: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute `log_probs`, and `entropy`, `sum_pi_squared`, `full_kl` if requested: `[N]`.

        In float32 whatever the logits are (float64 for float64). No gradient flows to Σπ², to the
        reference, or, without `entropy_gradient`, to entropy.
        """
        width = self.stop - self.start
        log_probs, entropies, squared, kl = _Statistics.apply(
            logits[:, :width],
            None if reference_logits is None else reference_logits[:, :width].detach(),
            targets - self.start,
            _Options(temperature, self.group, entropy, entropy_gradient, sum_pi_squared),
        )
        out = {
            "log_probs": log_probs,
            "entropy": entropies if entropy else None,
            "sum_pi_squared": squared if sum_pi_squared else None,
            "full_kl": None if reference_logits is None else kl,
        }
        return {name: value for name, value in out.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Options:
    temperature: float
    group: dist.ProcessGroup | None
    entropy: bool
    entropy_gradient: bool
    sum_pi_squared: bool


class _Statistics(torch.autograd.Function):
    """Computes all statistics in one pass over the logits, and their gradient in another.

    With z = logits / T, p = softmax(z) over all shards, q the reference's softmax, H the entropy
    and K the KL:

        ∂ log p_t / ∂z_v = 1[v = t] − p_v
        ∂ H / ∂z_v       = −p_v (log p_v + H)
        ∂ K / ∂z_v       = p_v (log p_v − log q_v − K)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, W]
        reference: Tensor | None,  # [N, W]
        targets: Tensor,  # [N]; column of `logits`, or outside of it where another shard has it
        options: _Options,
    ) -> tuple[Tensor, ...]:
        tops = _tops(logits, reference, options.temperature)
        _over_shards(tops, options.group, dist.ReduceOp.MAX)
        sums = _sums(logits, reference, targets, tops, options)
        _over_shards(sums, options.group, dist.ReduceOp.SUM)
        total, picked, weighted, squares, ref_total, gap = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        squares = squares / total.square()
        kl = gap / total - log_total + ref_total.log()
        normalisers = torch.stack([tops[0] + log_total, tops[1] + ref_total.log()])
        ctx.save_for_backward(logits, reference, targets, normalisers, entropy, kl)
        ctx.options = options
        ctx.mark_non_differentiable(squares, *([] if options.entropy_gradient else [entropy]))
        return picked - log_total, entropy, squares, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, reference, targets, normalisers, entropy, kl = ctx.saved_tensors
        grad_log_probs, grad_entropy, _, grad_kl = gradients
        temperature = ctx.options.temperature
        grad_logits = torch.empty_like(logits)
        for at in _chunks(logits):
            log_p = _wide(logits[at]) / temperature - normalisers[0, at, None]
            p = log_p.exp()
            grad_z = -grad_log_probs[at, None] * p
            if ctx.options.entropy_gradient:
                terms = torch.where(log_p > -torch.inf, log_p, 0.0) + entropy[at, None]
                grad_z -= grad_entropy[at, None] * p * terms
            if reference is not None:
                log_q = _wide(reference[at]) / temperature - normalisers[1, at, None]
                terms = torch.where(log_p > -torch.inf, log_p - log_q, 0.0) - kl[at, None]
                grad_z += grad_kl[at, None] * p * terms
            columns, is_local = _local_columns(targets[at], logits)
            if logits.shape[1]:
                grad_z.scatter_add_(1, columns[:, None], (grad_log_probs[at] * is_local)[:, None])
            grad_logits[at] = grad_z / temperature
        return grad_logits, None, None, None


def _tops(logits: Tensor, reference: Tensor | None, temperature: float) -> Tensor:
    """Return the largest z of each token in this shard `[2, N]`: the policy's, the reference's."""
    tops = torch.zeros((2, logits.shape[0]), dtype=_wide(logits).dtype, device=logits.device)
    for row, tensor in enumerate((logits, reference)):
        if tensor is not None:
            tops[row] = _wide(tensor.amax(-1)) / temperature if tensor.shape[1] else -torch.inf
    return tops


def _sums(
    logits: Tensor, reference: Tensor | None, targets: Tensor, tops: Tensor, options: _Options
) -> Tensor:
    """Return this shard's sums `[6, N]` over v; those that were not requested are 0.

    With u = exp(z − top) and ' for the reference: Σu, (z − top) of the target, Σu(z − top), Σu²,
    Σu', Σu((z − top) − (z − top)').
    """
    sums = tops.new_zeros((6, logits.shape[0]))
    for at in _chunks(logits):
        z = _wide(logits[at]) / options.temperature - tops[0, at, None]
        u = z.exp()
        sums[0, at] = u.sum(-1)
        columns, is_local = _local_columns(targets[at], logits)
        if logits.shape[1]:
            sums[1, at] = torch.where(is_local, z.gather(1, columns[:, None])[:, 0], 0.0)
        # Entries that can't be sampled (logit −inf) add 0, not NaN.
        if options.entropy:
            sums[2, at] = (u * torch.where(z > -torch.inf, z, 0.0)).sum(-1)
        if options.sum_pi_squared:
            sums[3, at] = u.square().sum(-1)
        if reference is not None:
            reference_z = _wide(reference[at]) / options.temperature - tops[1, at, None]
            sums[4, at] = reference_z.exp().sum(-1)
            sums[5, at] = (u * torch.where(z > -torch.inf, z - reference_z, 0.0)).sum(-1)
    return sums


def _local_columns(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns that are safe to index, and whether the target is truly there; both `[n]`."""
    width = logits.shape[1]
    return targets.clamp(0, max(0, width - 1)), (targets >= 0) & (targets < width)


def _over_shards(values: Tensor, group: dist.ProcessGroup | None, how: object) -> None:
    if group is not None:
        dist.all_reduce(values, op=how, group=group)


def _chunks(logits: Tensor) -> Iterator[slice]:
    for start in range(0, logits.shape[0], _CHUNK_TOKENS):
        yield slice(start, start + _CHUNK_TOKENS)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
