"""Rows as a tree of common beginnings: a group's prompt, and the turns that branches share.

    P ─┬─ a ─┬─ r1          rows  P a r1,  P a b r2,  P c r3
       │     └─ b ── r2
       └─ c ── r3           each piece is computed once

Integers alone; `packing` lays the tree out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

LEAST = 16  # tokens of a common beginning that is worth a piece of its own


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """B rows in an order in which those that begin alike are neighbours.

    `shared[i]` are the tokens that row `order[i]` has in common with the one before it, and that
    are computed with that one.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens of the tree, of rows of those lengths."""
        return sum(lengths) - sum(self.shared)

    def pieces(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Each row in order, and its pieces after what it shares: (first, last token + 1) each."""
        for place, row in enumerate(self.order):
            cuts = {self.shared[place], lengths[row]}
            lowest = lengths[row]
            for later in range(place + 1, len(self.order)):
                depth = self.shared[later]  # where that row leaves this one's tokens
                if depth <= self.shared[place]:
                    break
                if depth < lowest:
                    lowest = depth
                    cuts.add(depth)
            yield row, list(itertools.pairwise(sorted(cuts)))


def prompt_tree(groups: Sequence[Sequence[int]], prompts: Sequence[int]) -> PrefixTree:
    """Groups of rows that have their prompts, of `prompts` [B] tokens, in common and no more."""
    shared = [prompts[row] if place else 0 for group in groups for place, row in enumerate(group)]
    return PrefixTree(tuple(itertools.chain(*groups)), tuple(shared))


def prefix_tree(
    ids: Tensor, lengths: Sequence[int], prompts: Sequence[int], least: int = LEAST
) -> PrefixTree:
    """The tree of left-aligned rows `ids` [B, L] long of `lengths` [B] tokens each.

    Rows with one prompt (of `prompts` [B] tokens) share at least that; other common beginnings
    count from `least` tokens on.
    """
    rows = [row[:end] for row, end in zip(ids.cpu().numpy(), lengths, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    alike = _common(ids.cpu().numpy(), lengths, order)
    return PrefixTree(tuple(order), tuple(_shared(order, alike, prompts, least)))


def prefix_tree_batches(
    tree: PrefixTree,
    ids: Tensor,
    lengths: Sequence[int],
    prompts: Sequence[int],
    max_tokens: int,
    least: int = LEAST,
) -> list[list[int]]:
    """Cut the rows of `prefix_tree(ids, lengths, prompts, least)` in batches, in the tree's order.

    `ids` [B, L], `lengths` [B] and `prompts` [B] are those of the tree. Returns row numbers by
    batch. Each batch has at most `max_tokens` tokens in the tree of its rows alone: what two rows
    have in common may be a piece only because of a third one. A single row above the budget is a
    batch of its own.
    """
    alike = _common(ids.cpu().numpy(), lengths, tree.order)
    batches: list[list[int]] = []
    start = 0
    while start < len(tree.order):
        batches.append([])
        room, order = max_tokens, tree.order[start:]
        for row, shared in zip(order, _shared(order, alike[start:], prompts, least), strict=False):
            room -= lengths[row] - shared
            if batches[-1] and room < 0:
                break
            batches[-1].append(row)
        start += len(batches[-1])
    return batches


def _shared(
    order: Sequence[int], alike: Sequence[int], prompts: Sequence[int], least: int
) -> Iterator[int]:
    """What each row shares with the one before it, with which `alike` [B-1] tokens are the same."""
    if order:
        yield 0
    depths = [0]  # where the pieces of the row before end
    for (before, row), common in zip(itertools.pairwise(order), alike, strict=True):
        same = prompts[before] == prompts[row] <= common
        while depths[-1] > common:
            depths.pop()
        if common - depths[-1] >= least or (same and depths[-1] < prompts[row]):
            depths.append(common)
        yield depths[-1]


def _common(ids: np.ndarray, lengths: Sequence[int], order: Sequence[int]) -> list[int]:
    """How many tokens each row begins with in common with the one before it in the order."""
    ordered, ends = ids[list(order)], np.array(lengths)[list(order)]
    differ = ordered[1:] != ordered[:-1]
    first = np.where(differ.any(1), differ.argmax(1), ids.shape[1])
    common: list[int] = np.minimum(first, np.minimum(ends[1:], ends[:-1])).tolist()
    return common
