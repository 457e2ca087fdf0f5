"""Where the boxes and lines of a graph go: layers from left to right, few crossings.

A pure function of keys and edges (Sugiyama's method: layers by longest path, invisible boxes where
an edge passes a layer, order by the mean place of neighbours, then heights). Cycles are drawn, with
the edge that closes one running backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

BOX_WIDTH, BOX_HEIGHT = 196, 52  # pixels
LAYER_GAP, ROW_GAP, LINE_GAP = 72, 20, 12
MARGIN = 16
SWEEPS = 12

Line = tuple[str, str]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Sizes in pixels; a box's point is its upper left corner."""

    width: float
    height: float
    boxes: Mapping[str, Point]
    lines: Mapping[Line, tuple[Point, ...]]  # from the parent's right side to the child's left


@dataclass(frozen=True, slots=True)
class _Bend:
    """An invisible box where a line passes a layer."""

    line: Line
    layer: int


_Item = str | _Bend


def arrange(keys: Sequence[str], lines: Iterable[Line]) -> Drawing:
    """Return a drawing of `keys` with `lines` (parent, child) among them; equal ones count once."""
    known = set(keys)
    asked = [
        line
        for line in dict.fromkeys(lines)
        if line[0] in known and line[1] in known and line[0] != line[1]
    ]
    forward = _without_cycles(keys, asked)
    layer_of = _layers(keys, forward)
    layers, above, below = _with_bends(keys, forward, layer_of)
    for sweep in range(SWEEPS):
        _order(layers, above if sweep % 2 == 0 else below, reverse=sweep % 2 == 1)
    heights = _heights(layers, above, below)
    boxes = {
        key: (MARGIN + layer_of[key] * (BOX_WIDTH + LAYER_GAP), heights[key]) for key in keys
    }
    drawn = {line: _points(line, boxes, layer_of, heights) for line in asked}
    right = max((x for x, _ in boxes.values()), default=0.0) + BOX_WIDTH + MARGIN
    bottom = max((y for y in heights.values()), default=0.0) + BOX_HEIGHT + MARGIN
    return Drawing(right, bottom, boxes, drawn)


def _without_cycles(keys: Sequence[str], lines: Sequence[Line]) -> list[Line]:
    """Leave out each line that leads back to a key still being walked from."""
    children: dict[str, list[str]] = {key: [] for key in keys}
    for parent, child in lines:
        children[parent].append(child)
    state: dict[str, int] = {}  # 1: being walked from, 2: done
    kept: list[Line] = []
    for start in keys:
        stack = [(start, iter(children[start]))] if start not in state else []
        state.setdefault(start, 1)
        while stack:
            key, rest = stack[-1]
            child = next(rest, None)
            if child is None:
                state[key] = 2
                stack.pop()
            elif state.get(child) != 1:
                kept.append((key, child))
                if child not in state:
                    state[child] = 1
                    stack.append((child, iter(children[child])))
    return kept


def _layers(keys: Sequence[str], lines: Sequence[Line]) -> dict[str, int]:
    """Layer 0 holds what has no parent; parents without parents move up to their children."""
    children: dict[str, list[str]] = {key: [] for key in keys}
    waiting = dict.fromkeys(keys, 0)
    for parent, child in lines:
        children[parent].append(child)
        waiting[child] += 1
    roots = [key for key in keys if waiting[key] == 0]
    layer = dict.fromkeys(keys, 0)
    ready = deque(roots)
    while ready:
        key = ready.popleft()
        for child in children[key]:
            layer[child] = max(layer[child], layer[key] + 1)
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)
    for key in roots:
        if children[key]:
            layer[key] = min(layer[child] for child in children[key]) - 1
    return layer


def _with_bends(
    keys: Sequence[str], lines: Sequence[Line], layer_of: Mapping[str, int]
) -> tuple[list[list[_Item]], dict[_Item, list[_Item]], dict[_Item, list[_Item]]]:
    """Return the layers with their bends, and each item's neighbours to the left and right."""
    layers: list[list[_Item]] = [[] for _ in range(1 + max(layer_of.values(), default=-1))]
    for key in keys:
        layers[layer_of[key]].append(key)
    above: dict[_Item, list[_Item]] = {key: [] for key in keys}
    below: dict[_Item, list[_Item]] = {key: [] for key in keys}
    for line in lines:
        bends = [_Bend(line, n) for n in range(layer_of[line[0]] + 1, layer_of[line[1]])]
        for bend in bends:
            layers[bend.layer].append(bend)
        for left, right in pairwise([line[0], *bends, line[1]]):
            below.setdefault(left, []).append(right)
            above.setdefault(right, []).append(left)
    return layers, above, below


def _order(
    layers: list[list[_Item]], neighbours: Mapping[_Item, list[_Item]], reverse: bool
) -> None:
    """Sort each layer by the mean place of its items' neighbours in the layer before."""
    steps = range(len(layers) - 2, -1, -1) if reverse else range(1, len(layers))
    for number in steps:
        before = layers[number + 1 if reverse else number - 1]
        place = {item: index for index, item in enumerate(before)}
        own = {item: index for index, item in enumerate(layers[number])}
        weights = {}
        for item in layers[number]:
            places = [place[other] for other in neighbours.get(item, ()) if other in place]
            weights[item] = sum(places) / len(places) if places else float(own[item])
        layers[number].sort(key=lambda item: (weights[item], own[item]))


def _heights(
    layers: list[list[_Item]],
    above: Mapping[_Item, list[_Item]],
    below: Mapping[_Item, list[_Item]],
) -> dict[_Item, float]:
    """Give each item its height: near its neighbours', in its layer's order, without overlap."""
    top: dict[_Item, float] = {}
    for layer in layers:
        _settle(layer, dict.fromkeys(layer, 0.0), top)
    for _ in range(SWEEPS):
        for layer in (*layers, *reversed(layers)):
            wanted = {}
            for item in layer:
                others = [*above.get(item, ()), *below.get(item, ())]
                middles = [top[other] + _size(other) / 2 for other in others]
                middle = sum(middles) / len(middles) if middles else top[item] + _size(item) / 2
                wanted[item] = middle - _size(item) / 2
            _settle(layer, wanted, top)
    lowest = min(top.values(), default=0.0)
    return {item: MARGIN + round(y - lowest, 1) for item, y in top.items()}


def _settle(layer: list[_Item], wanted: Mapping[_Item, float], top: dict[_Item, float]) -> None:
    """Place a layer's items as near to where they want to be as their sizes allow.

    Items that would overlap form a block, which goes where its members on average want it.
    """
    blocks: list[tuple[list[_Item], float, float]] = []  # members, place, height
    for item in layer:
        members, height = [item], _size(item) + _gap(item)
        place = wanted[item]
        while blocks and blocks[-1][1] + blocks[-1][2] > place:
            left, _, left_height = blocks.pop()
            members, height = left + members, left_height + height
            offset = total = 0.0
            for member in members:
                total += wanted[member] - offset
                offset += _size(member) + _gap(member)
            place = total / len(members)
        blocks.append((members, place, height))
    for members, place, _ in blocks:
        for member in members:
            top[member] = place
            place += _size(member) + _gap(member)


def _size(item: _Item) -> float:
    return BOX_HEIGHT if isinstance(item, str) else 0.0


def _gap(item: _Item) -> float:
    return ROW_GAP if isinstance(item, str) else LINE_GAP


def _points(
    line: Line,
    boxes: Mapping[str, Point],
    layer_of: Mapping[str, int],
    heights: Mapping[_Item, float],
) -> tuple[Point, ...]:
    parent, child = line
    start = (boxes[parent][0] + BOX_WIDTH, boxes[parent][1] + BOX_HEIGHT / 2)
    end = (boxes[child][0], boxes[child][1] + BOX_HEIGHT / 2)
    points = [start]
    for layer in range(layer_of[parent] + 1, layer_of[child]):
        bend = _Bend(line, layer)
        if bend in heights:
            x = MARGIN + layer * (BOX_WIDTH + LAYER_GAP)
            points += [(x, heights[bend]), (x + BOX_WIDTH, heights[bend])]
    return (*points, end)
