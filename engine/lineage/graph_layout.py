"""Where the boxes and lines of a graph go: layers from left to right, few crossings.

A pure function of keys and edges (Sugiyama's method: layers by longest path, invisible boxes where
an edge passes a layer, order by the mean place of neighbours, then heights). Cycles are drawn, with
the edge that closes one running backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

BOX_WIDTH, BOX_HEIGHT = 206, 52  # pixels
LAYER_GAP, ROW_GAP, LINE_GAP = 60, 20, 12
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
    """An invisible box where a parent's lines pass a layer; they share one."""

    parent: str
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
    boxes = {key: (MARGIN + layer_of[key] * (BOX_WIDTH + LAYER_GAP), heights[key]) for key in keys}
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
            child = next(rest, "")
            if not child:
                state[key] = 2
                stack.pop()
            elif state.get(child) != 1:
                kept.append((key, child))
                if child not in state:
                    state[child] = 1
                    stack.append((child, iter(children[child])))
    return kept


def _layers(keys: Sequence[str], lines: Sequence[Line]) -> dict[str, int]:
    """Put children behind their parents, and what has more children than parents near those."""
    children: dict[str, list[str]] = {key: [] for key in keys}
    parents = dict.fromkeys(keys, 0)
    for parent, child in lines:
        children[parent].append(child)
        parents[child] += 1
    waiting = dict(parents)
    layer = dict.fromkeys(keys, 0)
    ready = deque(key for key in keys if waiting[key] == 0)
    order = []
    while ready:
        key = ready.popleft()
        order.append(key)
        for child in children[key]:
            layer[child] = max(layer[child], layer[key] + 1)
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)
    for key in reversed(order):
        if children[key] and parents[key] <= len(children[key]):
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
    known: set[tuple[_Item, _Item]] = set()
    for parent, child in lines:
        bends = [_Bend(parent, n) for n in range(layer_of[parent] + 1, layer_of[child])]
        for bend in bends:
            if bend not in above:
                layers[bend.layer].append(bend)
                above[bend], below[bend] = [], []
        stops: list[_Item] = [parent, *bends, child]
        for left, right in pairwise(stops):
            if (left, right) not in known:
                known.add((left, right))
                below[left].append(right)
                above[right].append(left)
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
    # Of each block: how many members, the sum of the tops they want for it, and its height.
    blocks: list[tuple[int, float, float]] = []
    for item in layer:
        count, total, height = 1, wanted[item], _size(item) + _gap(item)
        while blocks and blocks[-1][1] / blocks[-1][0] + blocks[-1][2] > total / count:
            others, others_total, others_height = blocks.pop()
            total += others_total - count * others_height
            count, height = count + others, height + others_height
        blocks.append((count, total, height))
    members = iter(layer)
    for count, total, _ in blocks:
        place = total / count
        for member in islice(members, count):
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
        bend = _Bend(parent, layer)
        if bend in heights:
            x = MARGIN + layer * (BOX_WIDTH + LAYER_GAP)
            points += [(x, heights[bend]), (x + BOX_WIDTH, heights[bend])]
    return (*points, end)
