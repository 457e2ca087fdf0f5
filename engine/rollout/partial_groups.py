"""Groups of completions that were begun and are not whole, kept beyond the process that began them.

What lives here: `Begun`, its way into checkpoints and back, and the column of prompts that carries
it. What does not: decoding on from it (`engine.workers.group_stream`), and whether that is still
worth it (`engine.controller.staleness`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from engine.batch import Batch
from engine.rollout.stream import PartialCompletion

BEGUN = "begun"  # a column of prompts: the Begun of each, or None


@dataclass(frozen=True, slots=True)
class Begun:
    """What is there of one prompt's completions, tokens with their log-probs and versions."""

    parts: tuple[PartialCompletion, ...]  # all `n`, by completion_index; some may have no token
    ends: tuple[str, ...]  # how each has ended: "stop", "length", or "" where it goes on

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token; None where there is none."""
        return min((v for part in self.parts for v in part.token_versions), default=None)

    @staticmethod
    def whole(group: Batch) -> Begun:
        """A finished group, as rollout gives it."""
        parts = []
        for row, length in enumerate(group["response_mask"].sum(1).long().tolist()):
            fields = ("responses", "rollout_log_probs", "token_versions")
            parts.append(PartialCompletion(row, *(group[f][row, :length].tolist() for f in fields)))
        ends = ("length" if cut else "stop" for cut in group["truncated"].tolist())
        return Begun(tuple(parts), tuple(ends))

    def tree(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""

        def joined(lists: Iterable[list[Any]], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([value for values in lists for value in values], dtype=dtype)

        return {
            "ends": list(self.ends),
            "lengths": [len(part.token_ids) for part in self.parts],
            "token_ids": joined((part.token_ids for part in self.parts), torch.int32),
            "log_probs": joined((part.log_probs for part in self.parts), torch.float32),
            "token_versions": joined((part.token_versions for part in self.parts), torch.int32),
        }

    @staticmethod
    def of(tree: dict[str, Any]) -> Begun:
        """What `tree` gave."""
        edges = list(pairwise(accumulate(tree["lengths"], initial=0)))
        lists = [tree[name].tolist() for name in ("token_ids", "log_probs", "token_versions")]
        parts = [
            PartialCompletion(index, *(values[start:end] for values in lists))
            for index, (start, end) in enumerate(edges)
        ]
        return Begun(tuple(parts), tuple(tree["ends"]))


def with_begun(prompts: Batch, begun: Iterable[Begun | None]) -> Batch:
    """Prompts with what is there of their completions."""
    return Batch(prompts.as_dict(), {**prompts.columns, BEGUN: list(begun)})


def take_begun(prompts: Batch) -> tuple[Batch, list[Begun | None]]:
    """Prompts as they were drawn, and what is there of their completions."""
    columns = dict(prompts.columns)
    begun = columns.pop(BEGUN, None)
    if begun is None:
        return prompts, [None] * len(prompts)
    return Batch(prompts.as_dict(), columns), list(begun)
