"""Groups of completions that are not finished, in a form that outlives the process decoding them.

`PartialGroup` goes into checkpoints and back, and travels in a column of prompts. Decoding is
continued from it by `engine.workers.group_stream`; `engine.controller.staleness` decides whether
that is still allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypedDict

import torch

from engine.batch import Batch
from engine.rollout.stream import PartialCompletion

PARTIAL_GROUP = "partial_group"  # a column of prompts: what was begun of each, or None


class Begun(Protocol):
    """What was begun of a prompt: a `PartialGroup`, or `engine.agents.PartialEpisodes`."""

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without any token."""
        ...

    def tree(self) -> object:
        """Tensors and plain values, for a checkpoint."""
        ...


class PartialGroupTree(TypedDict):
    """A `PartialGroup` in a checkpoint; its tensors concatenate the T tokens of all completions."""

    ends: list[str]  # finish reasons
    lengths: list[int]  # tokens of each completion
    token_ids: torch.Tensor  # [T], int32
    log_probs: torch.Tensor  # [T], float32
    token_versions: torch.Tensor  # [T], int32


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """One prompt's completions so far: tokens with their log-probs and policy versions."""

    completions: tuple[PartialCompletion, ...]  # all `n`, by completion_index; may have no token
    finish_reasons: tuple[str, ...]  # of each: "stop", "length", or "" for an unfinished one

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without any token."""
        return min((v for part in self.completions for v in part.token_versions), default=None)

    @staticmethod
    def from_finished(group: Batch) -> PartialGroup:
        """A finished group, as rollout returns it."""
        completions = []
        for row, length in enumerate(group["response_mask"].sum(1).long().tolist()):
            fields = ("responses", "rollout_log_probs", "token_versions")
            values = (group[field][row, :length].tolist() for field in fields)
            completions.append(PartialCompletion(row, *values))
        reasons = ("length" if cut else "stop" for cut in group["truncated"].tolist())
        return PartialGroup(tuple(completions), tuple(reasons))

    def tree(self) -> PartialGroupTree:
        """Tensors and plain values, for a checkpoint."""
        parts = self.completions
        return {
            "ends": list(self.finish_reasons),
            "lengths": [len(part.token_ids) for part in parts],
            "token_ids": _concatenated([part.token_ids for part in parts], torch.int32),
            "log_probs": _concatenated([part.log_probs for part in parts], torch.float32),
            "token_versions": _concatenated([part.token_versions for part in parts], torch.int32),
        }

    @staticmethod
    def from_tree(tree: PartialGroupTree) -> PartialGroup:
        """The inverse of `tree`."""
        edges = list(pairwise(accumulate(tree["lengths"], initial=0)))
        tensors = (tree["token_ids"], tree["log_probs"], tree["token_versions"])
        lists = [tensor.tolist() for tensor in tensors]
        completions = [
            PartialCompletion(index, *(values[start:end] for values in lists))
            for index, (start, end) in enumerate(edges)
        ]
        return PartialGroup(tuple(completions), tuple(tree["ends"]))


def with_partial_groups(prompts: Batch, groups: Iterable[Begun | None]) -> Batch:
    """`prompts` with a column of their partial groups."""
    return Batch(prompts.as_dict(), {**prompts.columns, PARTIAL_GROUP: list(groups)})


def take_partial_groups(prompts: Batch) -> tuple[Batch, list[Begun | None]]:
    """Split `prompts` into the batch without the column, and the column (all None if absent)."""
    columns = dict(prompts.columns)
    groups = columns.pop(PARTIAL_GROUP, None)
    if groups is None:
        return prompts, [None] * len(prompts)
    return Batch(prompts.as_dict(), columns), list(groups)


def _concatenated(
    lists: Sequence[list[int]] | Sequence[list[float]], dtype: torch.dtype
) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)
