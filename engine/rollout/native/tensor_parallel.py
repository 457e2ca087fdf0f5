"""The collectives of tensor-parallel decoding: sums, embeddings, logits and samples.

Every rank of the group runs the same rollout in step, on its shards of the matrices
(`tp_shards.py`). The hidden state is whole on all ranks after each block, and so are the logits
`[sequences, V]`, which are gathered: every rank draws the same tokens by the same rule.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams


class TensorParallel:
    """This rank's place in a group, and the collectives of decoding.

    A rank that dies or falls out of step makes the others raise RolloutError within the group's
    timeout; from then on nothing is decoded with it.
    """

    def __init__(self, group: dist.ProcessGroup, index: int, device: torch.device) -> None:
        """`index`: which of the shards are this rank's; not always its rank in `group`.

        Collective: all ranks of the group must call it.
        """
        self._group, self.index, self._device = group, index, device
        self.size = group.size()
        self._lost: str | None = None
        indices = self._gather(torch.tensor([index]))[:, 0].tolist()
        if sorted(indices) != list(range(self.size)):
            raise RolloutError(
                f"the ranks of a tensor-parallel group say they hold shards {indices}; give each "
                f"of 0 to {self.size - 1} to one rank"
            )
        self._order = [indices.index(i) for i in range(self.size)]  # group rank of each shard
        self._widths = [0] * self.size  # rows of each shard of the vocabulary
        self._start = 0

    def partition_vocabulary(self, rows: int) -> int:
        """Exchange how many rows of the vocabulary each rank has, this one `rows`; return the sum.

        Collective. A rank without usable shards passes -1, and all ranks get -1.
        """
        found = self._gather(torch.tensor([rows]))[:, 0].tolist()
        if min(found) < 0:
            return -1
        self._widths = [found[rank] for rank in self._order]
        self._start = sum(self._widths[: self.index])
        return sum(self._widths)

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Rows of the vocabulary's embedding for `ids`, `[…, hidden]`, from its shards `[v, H]`."""
        local, rows = ids - self._start, embedding.shape[0]
        mine = (local >= 0) & (local < rows)
        if rows == 0:
            found = embedding.new_zeros(*ids.shape, embedding.shape[1])
        else:
            found = F.embedding(local.clamp(0, rows - 1), embedding)
            found.masked_fill_(~mine[..., None], 0.0)
        return self.all_reduce(found)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' `partial` tensors, in place."""
        with self._collective():
            dist.all_reduce(partial, group=self._group)
        return partial

    def gather_logits(self, local: Tensor) -> Tensor:
        """All ranks' logits side by side: `[R, v]` each → `[R, V]`."""
        widest = max(self._widths)
        padded = F.pad(local, (0, widest - local.shape[1])).contiguous()
        every = padded.new_empty(self.size, *padded.shape)
        with self._collective():
            dist.all_gather_into_tensor(every.flatten(0, 1), padded, group=self._group)
        parts = [
            every[rank, :, :width] for rank, width in zip(self._order, self._widths, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def sync_samples(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Broadcast the samples `[R]` of the group's first rank, in place.

        Equal logits give equal samples on CPUs; a GPU's parallel sums may round differently.
        """
        if tokens.device.type == "cpu":
            return
        with self._collective():
            dist.broadcast(tokens, group=self._group, group_src=0)
            dist.broadcast(log_probs, group=self._group, group_src=0)

    def check_same_request(
        self,
        version: int,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        problem: RolloutError | None,
    ) -> None:
        """Raise RolloutError on all ranks unless all are to decode the same with one policy.

        `problem` is why this rank can't; it is raised here, and the others name the rank.
        """
        digest = zlib.crc32(repr((params, [list(map(int, p)) for p in prompts])).encode())
        mine = torch.tensor([int(problem is not None), version, digest])
        every = self._gather(mine)
        if problem is not None:
            raise problem
        failed = every[:, 0].nonzero()[:, 0].tolist()
        if failed:
            raise RolloutError(
                f"rank {failed[0]} of the tensor-parallel group of {self.size} can't serve; see "
                "its own error"
            )
        if len(every[:, 1].unique()) > 1:
            raise RolloutError(
                f"the ranks of a tensor-parallel group hold policy versions {every[:, 1].tolist()};"
                " update the weights on all of them before the rollout"
            )
        if len(every[:, 2].unique()) > 1:
            raise RolloutError(
                "the ranks of a tensor-parallel group were given different prompts or sampling "
                "parameters; give every rank of the group the same request"
            )

    def _gather(self, mine: Tensor) -> Tensor:
        """All ranks' `mine` `[k]` (int64), `[size, k]` by group rank, on the CPU."""
        mine = mine.to(self._device)
        every = mine.new_empty(self.size * len(mine))
        with self._collective():
            dist.all_gather_into_tensor(every, mine, group=self._group)
        return every.view(self.size, -1).cpu()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        if self._lost is not None:
            raise RolloutError(self._lost)
        try:
            yield
        except RuntimeError as error:
            self._lost = (
                f"a rank of the tensor-parallel group of {self.size} was lost or fell out of step: "
                f"{error}; start the group's ranks again"
            )
            raise RolloutError(self._lost) from error
