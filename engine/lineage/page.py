"""Lineage as one HTML page that needs nothing else: graph, details, differences, findings."""

from __future__ import annotations

import functools
import os
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from jinja2 import Environment

from engine import html_templates
from engine.errors import StorageError
from engine.lineage.audit import Audit
from engine.lineage.compare import ArtifactComparison, as_text, data_line, metric, row_lines, signed
from engine.lineage.graph import MODEL_VERSION, ArtifactNode, Edge, Graph
from engine.lineage.lookup import Review
from engine.tracking.connection import flatten

# Where the boxes and lines of a graph go: layers from left to right, few crossings.
#
# A pure function of keys and edges (Sugiyama's method: layers by longest path, invisible boxes
# where an edge passes a layer, order by the mean place of neighbours, then heights). Cycles are
# drawn, with the edge that closes one running backwards.

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


# The picture of a graph: texts of its boxes and SVG paths of its lines, for `graph.svg.j2`.

LONGEST = 24  # characters of a label in its box


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A node; the point is its upper left corner, in pixels as SVG attributes have them."""

    node: ArtifactNode
    x: str  # e.g. "282"
    y: str  # e.g. "16.5"
    title: str
    subtitle: str


@dataclass(frozen=True, slots=True)
class EdgePath:
    """A line from a parent to a child, which may stand for several edges."""

    parent: str  # key
    child: str  # key
    path: str  # SVG path data, e.g. "M222 42C252 42 252 42 282 42"
    name: str  # of the edges, e.g. "warm_start, reference"


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn graph, in pixels."""

    width: str
    height: str
    boxes: tuple[NodeBox, ...]  # from left to right, and down within a layer: the order of Tab
    edges: tuple[EdgePath, ...]


def draw(graph: Graph) -> Picture:
    """Arrange a graph's nodes and edges."""
    names: dict[Line, list[str]] = {}
    for edge in graph.edges.values():
        names.setdefault((edge.parent, edge.child), []).append(edge.name)
    drawing = arrange(list(graph.nodes), names)
    edges = [
        EdgePath(*line, _path(points), ", ".join(names[line]))
        for line, points in drawing.lines.items()
    ]
    order = sorted(graph.nodes, key=lambda key: drawing.boxes[key])
    boxes = [_box(graph.nodes[key], drawing.boxes[key]) for key in order]
    return Picture(_number(drawing.width), _number(drawing.height), tuple(boxes), tuple(edges))


def _box(node: ArtifactNode, at: Point) -> NodeBox:
    title, subtitle = box_texts(node)
    shown = shorten(title, LONGEST), shorten(subtitle, LONGEST + 4)
    return NodeBox(node, _number(at[0]), _number(at[1]), *shown)


def _path(points: tuple[Point, ...]) -> str:
    """Curves between layers, straight where the line passes one."""
    path = f"M{_number(points[0][0])} {_number(points[0][1])}"
    for index in range(1, len(points)):
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        if y0 == y1:
            path += f"L{_number(x1)} {_number(y1)}"
        else:
            bend = max(abs(x1 - x0) / 2, 24)
            path += (
                f"C{_number(x0 + bend)} {_number(y0)} {_number(x1 - bend)} {_number(y1)} "
                f"{_number(x1)} {_number(y1)}"
            )
    return path


def box_texts(node: ArtifactNode) -> tuple[str, str]:
    """Return the two lines of a box."""
    if node.kind == MODEL_VERSION:
        name, _, number = node.label.rpartition(" version ")
        aliases = node.facts.get("aliases", "")
        return name, f"version {number}" + (f" @{aliases}" if aliases else "")
    if node.label:
        return node.label, f"{node.kind} {node.digest[:12]}".strip()
    when = f" · {node.created_at:%m-%d %H:%M}" if node.created_at else ""
    return node.kind, f"{node.digest[:12]}{when}"


def shorten(text: str, length: int) -> str:
    """Cut a text to `length` characters, the last of which then is an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


# Lineage as one HTML page that needs nothing else: graph, details, differences, findings.
#
# The page makes no request: a content security policy permits its own style and script, by their
# digests, and nothing more. Without JavaScript all details are shown one below the other. Markup,
# style and script are in `templates/`.

MOST_FILES = 200  # files of one artifact that the page lists
# Kinds with a colour of their own in page.css; the others share one.
KINDS = (
    "source",
    "dataset",
    "sft",
    "rl",
    "preference",
    "reward_model",
    "evaluation",
    "promotion",
    "checkpoint",
    "model_version",
)


@dataclass(frozen=True, slots=True)
class PageRow:
    """A line of the table of all nodes."""

    node: ArtifactNode
    made: str  # e.g. "2026-11-20 02:14"
    run: str  # Flyte execution, or MLflow run of a model version
    mark: str  # "fault", "missing" or empty

    @property
    def words(self) -> str:
        """What the page's filter searches."""
        node = self.node
        words = (node.kind, node.name, node.digest, node.uri, self.run, self.made, self.mark)
        return " ".join(words).lower()


def render_page(
    review: Review, audit: Audit | None = None, comparison: ArtifactComparison | None = None
) -> str:
    """Return the page. audit: what checking found, None if nothing was checked."""
    graph = review.graph
    marks = _marks(graph, audit)
    parents: dict[str, list[Edge]] = defaultdict(list)
    children: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges.values():
        parents[edge.child].append(edge)
        children[edge.parent].append(edge)
    faults, notes = _findings(graph, audit)
    templates = _templates()
    css, script = (html_templates.asset(__package__, name) for name in ("page.css", "page.js"))
    return templates.get_template("page.html.j2").render(
        audit=audit,
        box_height=BOX_HEIGHT,
        box_width=BOX_WIDTH,
        children=children,
        comparison=comparison,
        css=css,
        drawing=draw(graph),
        faults=faults,
        graph=graph,
        ids={key: f"lineage-{number}" for number, key in enumerate(graph.nodes)},
        marks=marks,
        most_files=MOST_FILES,
        notes=notes,
        parents=parents,
        policy=html_templates.content_policy(css, script),
        review=review,
        rows=_rows(graph, marks),
        script=script,
        title=_title(review, comparison),
    )


def write_page(target: str | Path, page: str) -> None:
    """Write a page whole or not at all; StorageError when the file system does not permit it."""
    path = Path(target).expanduser()
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            draft.write_text(page, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't write {path}: {error.strerror or error}; choose another file"
        ) from error


@functools.cache
def _templates() -> Environment:
    environment = html_templates.environment(__package__)
    environment.filters |= {
        "as_text": as_text,
        "data_line": data_line,
        "kind_class": lambda kind: f"k-{kind}" if kind in KINDS else "k-other",
        "metric": metric,
        "row_lines": row_lines,
        "signed": signed,
    }
    environment.globals |= {"facts": _facts, "flatten": flatten}
    return environment


def _title(review: Review, comparison: ArtifactComparison | None) -> str:
    if comparison is not None:
        return f"{comparison.before.name} and {comparison.after.name}: what differs"
    names = [node.name for node in review.starts]
    return (
        f"Lineage of {', '.join(names)}" if names else f"Lineage: {', '.join(review.index.roots)}"
    )


def _marks(graph: Graph, audit: Audit | None) -> dict[str, str]:
    marks = {finding.key: "fault" for finding in audit.faults} if audit else {}
    return marks | {key: "missing" for key, node in graph.nodes.items() if node.missing}


def _findings(
    graph: Graph, audit: Audit | None
) -> tuple[defaultdict[str, list[str]], defaultdict[str, list[str]]]:
    """The faults and the notes of each node, by key."""
    faults: defaultdict[str, list[str]] = defaultdict(list)
    notes: defaultdict[str, list[str]] = defaultdict(list)
    for finding in audit.findings if audit else ():
        (faults if finding.is_fault else notes)[finding.key].append(finding.text)
    for key, node in graph.nodes.items():
        if node.missing and node.missing not in faults[key]:
            faults[key].append(node.missing)
    return faults, notes


def _facts(node: ArtifactNode) -> dict[str, str]:
    """What is known of a node, by label; empty values are not shown."""
    facts = {"kind": node.kind, "content": node.digest, "place": node.uri}
    manifest = node.manifest
    if manifest is not None:
        facts |= {
            "made": f"{manifest.created_at:%Y-%m-%d %H:%M:%S %Z}",
            "code version": manifest.code_version,
            "sources": manifest.sources_digest,
            "config": manifest.config_digest,
            "manifest": manifest.own_digest,
            "Flyte execution": manifest.flyte_execution,
            "MLflow run": manifest.mlflow_run,
        }
    return facts | {name.replace("_", " "): value for name, value in node.facts.items()}


def _rows(graph: Graph, marks: dict[str, str]) -> list[PageRow]:
    """All nodes in order of time."""
    order = sorted(graph.nodes.values(), key=lambda n: (str(n.created_at or ""), n.kind))
    return [
        PageRow(
            node,
            f"{node.created_at:%Y-%m-%d %H:%M}" if node.created_at else "",
            node.manifest.flyte_execution if node.manifest else node.facts.get("run_id", ""),
            marks.get(node.key, ""),
        )
        for node in order
    ]
