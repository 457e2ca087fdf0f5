"""Lineage as one HTML page that needs nothing else: graph, details, differences, findings.

`arrange` places boxes and lines in layers from left to right with few crossings, by Sugiyama's
method: layers by longest path, invisible boxes where an edge passes a layer, order by the mean
position of neighbours, then heights. The edge that closes a cycle runs backwards.

A content security policy permits the page's own style and script, by their digests, and nothing
more. Markup, style and script are in `templates/`.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from jinja2 import Environment

from engine import html_templates
from engine.lineage.audit import Audit
from engine.lineage.compare import ArtifactComparison, as_text, data_line, metric, row_lines, signed
from engine.lineage.graph import MODEL_VERSION, ArtifactNode, Edge
from engine.lineage.lookup import Review
from engine.tracking.connection import flatten, shorten

BOX_WIDTH, BOX_HEIGHT = 206, 52  # pixels
LAYER_GAP, ROW_GAP, LINE_GAP = 60, 20, 12
MARGIN = 16
SWEEPS = 12
_svg_number = "{:.7g}".format

Line = tuple[str, str]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Sizes in pixels; a box's point is its upper left corner."""

    width: float
    height: float
    boxes: Mapping[str, Point]
    lines: Mapping[Line, tuple[Point, ...]]  # from the parent's right side to the child's left


_Bend = tuple[str, int]  # an invisible box where a parent's lines pass a layer; they share one
_Item = str | _Bend
_Neighbours = Mapping[_Item, Sequence[_Item]]


def arrange(keys: Sequence[str], lines: Iterable[Line]) -> Drawing:
    """Return a drawing of `keys` with `lines` (parent, child) among them; equal ones count once."""
    known = set(keys)
    drawn = [line for line in dict.fromkeys(lines) if set(line) <= known and line[0] != line[1]]
    forward, layer_of = _layers(keys, drawn)
    layers, left, right = _with_bends(keys, forward, layer_of)
    for sweep in range(SWEEPS):
        _order(layers, right if sweep % 2 else left, reverse=sweep % 2 == 1)
    heights = _heights(layers, left, right)
    columns = [MARGIN + layer * (BOX_WIDTH + LAYER_GAP) for layer in range(len(layers))]
    boxes = {key: (columns[layer_of[key]], heights[key]) for key in keys}
    paths: dict[Line, tuple[Point, ...]] = {}
    for parent, child in drawn:
        points = [(boxes[parent][0] + BOX_WIDTH, heights[parent] + BOX_HEIGHT / 2)]
        for layer in range(layer_of[parent] + 1, layer_of[child]):
            y = heights[parent, layer]
            points += [(columns[layer], y), (columns[layer] + BOX_WIDTH, y)]
        paths[parent, child] = (*points, (boxes[child][0], heights[child] + BOX_HEIGHT / 2))
    width = max((x for x, _ in boxes.values()), default=0.0) + BOX_WIDTH + MARGIN
    height = max(heights.values(), default=0.0) + BOX_HEIGHT + MARGIN
    return Drawing(width, height, boxes, paths)


def _layers(keys: Sequence[str], lines: Sequence[Line]) -> tuple[list[Line], dict[str, int]]:
    """Return the lines that close no cycle, and the layer of each key, behind its parents."""
    import networkx  # which torch needs, too

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_nodes_from(keys)
    graph.add_edges_from(lines)
    while not networkx.is_directed_acyclic_graph(graph):
        graph.remove_edge(*networkx.find_cycle(graph)[-1])
    order = list(networkx.topological_sort(graph))
    layer = dict.fromkeys(keys, 0)
    for key in order:
        for child in graph[key]:
            layer[child] = max(layer[child], layer[key] + 1)
    for key in reversed(order):
        if graph[key] and graph.in_degree(key) <= len(graph[key]):
            layer[key] = min(layer[child] for child in graph[key]) - 1
    return list(networkx.edge_dfs(graph, keys)), layer


def _with_bends(
    keys: Sequence[str], lines: Sequence[Line], layer_of: Mapping[str, int]
) -> tuple[list[list[_Item]], _Neighbours, _Neighbours]:
    """Return the layers with their bends, and each item's neighbours to the left and right."""
    import networkx

    graph: networkx.DiGraph[_Item] = networkx.DiGraph()
    graph.add_nodes_from(keys)
    for parent, child in lines:
        bends = [(parent, n) for n in range(layer_of[parent] + 1, layer_of[child])]
        networkx.add_path(graph, [parent, *bends, child])
    layers: list[list[_Item]] = [[] for _ in range(1 + max(layer_of.values(), default=-1))]
    for item in graph:
        layers[layer_of[item] if isinstance(item, str) else item[1]].append(item)
    left, right = ({item: list(near[item]) for item in graph} for near in (graph.pred, graph.succ))
    return layers, left, right


def _order(layers: list[list[_Item]], neighbours: _Neighbours, reverse: bool) -> None:
    """Sort each layer by the mean position of its items' neighbours in the layer before."""
    for before, layer in pairwise(reversed(layers) if reverse else layers):
        position = {item: index for index, item in enumerate(before)}
        weights = {}
        for index, item in enumerate(layer):
            positions = [position[other] for other in neighbours[item] if other in position]
            weights[item] = fmean(positions or [index]), index
        layer.sort(key=weights.__getitem__)


def _heights(
    layers: list[list[_Item]], left: _Neighbours, right: _Neighbours
) -> dict[_Item, float]:
    """Give each item its height: near its neighbours', in its layer's order, without overlap."""
    top: dict[_Item, float] = {}
    for layer in layers:
        _settle(layer, dict.fromkeys(layer, 0.0), top)
    for layer in SWEEPS * [*layers, *reversed(layers)]:
        targets = {}
        for item in layer:
            middles = [top[k] + _size(k) / 2 for k in (*left[item], *right[item])]
            middle = sum(middles) / len(middles) if middles else top[item] + _size(item) / 2
            targets[item] = middle - _size(item) / 2
        _settle(layer, targets, top)
    lowest = min(top.values(), default=0.0)
    return {item: MARGIN + round(y - lowest, 1) for item, y in top.items()}


def _settle(layer: list[_Item], targets: Mapping[_Item, float], top: dict[_Item, float]) -> None:
    """Place items as near as can be to the tops they want, in order and without overlap."""
    from scipy.optimize import isotonic_regression

    heights = (_size(item) + (ROW_GAP if _size(item) else LINE_GAP) for item in layer)
    offsets = list(accumulate(heights, initial=0.0))[:-1]  # of items without space between them
    shifts = [targets[item] - offset for item, offset in zip(layer, offsets, strict=True)]
    for item, offset, shift in zip(layer, offsets, isotonic_regression(shifts).x, strict=True):
        top[item] = offset + float(shift)


def _size(item: _Item) -> float:
    return BOX_HEIGHT if isinstance(item, str) else 0.0


def _svg_path(points: Sequence[Point]) -> str:
    """Return SVG path data: curves between layers, straight where the line passes one."""
    path = "M{} {}".format(*map(_svg_number, points[0]))
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = max(abs(x1 - x0) / 2, 24)
        first, second = _svg_number(x0 + bend), _svg_number(x1 - bend)
        curve = f"C{first} {_svg_number(y0)} {second} {_svg_number(y1)} "
        path += f"{'L' if y0 == y1 else curve}{_svg_number(x1)} {_svg_number(y1)}"
    return path


def _box_texts(node: ArtifactNode) -> tuple[str, str]:
    """Return the two lines of a box, of 24 and 28 characters at most."""
    when = f" · {node.created_at:%m-%d %H:%M}" if node.created_at else ""
    title, below = node.kind, f"{node.digest[:12]}{when}"
    if node.kind == MODEL_VERSION:
        title, _, number = node.label.rpartition(" version ")
        aliases = node.facts.get("aliases", "")
        below = f"version {number}" + (f" @{aliases}" if aliases else "")
    elif node.label:
        title, below = node.label, f"{node.kind} {node.digest[:12]}".strip()
    return shorten(title, 24), shorten(below, 28)


MAX_FILES = 200  # files of one artifact that the page lists


def render_page(
    review: Review, audit: Audit | None = None, comparison: ArtifactComparison | None = None
) -> str:
    """Return the page. audit: what checking found, None if nothing was checked."""
    graph = review.graph
    parents: dict[str, list[Edge]] = defaultdict(list)
    children: dict[str, list[Edge]] = defaultdict(list)
    names: dict[Line, list[str]] = defaultdict(list)
    for edge in graph.edges.values():
        parents[edge.child].append(edge)
        children[edge.parent].append(edge)
        names[edge.parent, edge.child].append(edge.name)
    faults: dict[str, list[str]] = defaultdict(list)
    notes: dict[str, list[str]] = defaultdict(list)
    for finding in audit.findings if audit else ():
        (faults if finding.is_fault else notes)[finding.key].append(finding.text)
    marks: dict[str, str] = {}
    for key, node in graph.nodes.items():
        if node.missing and node.missing not in faults[key]:
            faults[key].append(node.missing)
        marks[key] = "missing" if node.missing else "fault" if faults[key] else ""
    if comparison is not None:
        title = f"{comparison.before.name} and {comparison.after.name}: what differs"
    elif review.starts:
        title = f"Lineage of {', '.join(node.name for node in review.starts)}"
    else:
        title = f"Lineage: {', '.join(review.index.roots)}"
    drawing = arrange(list(graph.nodes), names)
    css, script = html_templates.stylesheet(), html_templates.asset(__package__, "page.js")
    return _templates().get_template("page.html.j2").render(
        audit=audit, box_height=BOX_HEIGHT, box_width=BOX_WIDTH, children=children,
        comparison=comparison, css=css, drawing=drawing, edge_names=names, faults=faults,
        graph=graph, marks=marks, most_files=MAX_FILES, notes=notes, parents=parents,
        review=review, script=script, title=title,
        by_time=sorted(graph.nodes.values(), key=lambda n: (str(n.created_at or ""), n.kind)),
        ids={key: f"lineage-{number}" for number, key in enumerate(graph.nodes)},
        policy=html_templates.content_policy(css, script),
        tab_order=sorted(graph.nodes, key=drawing.boxes.__getitem__),
    )  # fmt: skip


@functools.cache
def _templates() -> Environment:
    environment = html_templates.environment(__package__)
    # Other kinds than those of the style sheet share a colour.
    coloured = re.findall(r"\.k-(\w+)", html_templates.stylesheet())
    environment.filters |= {
        "as_text": as_text, "data_line": data_line, "metric": metric, "row_lines": row_lines,
        "signed": signed, "svg_number": _svg_number, "svg_path": _svg_path,
        "kind_class": lambda kind: f"k-{kind}" if kind in coloured else "k-other",
    }  # fmt: skip
    environment.globals |= {"box_texts": _box_texts, "facts": _facts, "flatten": flatten}
    return environment


def _facts(node: ArtifactNode) -> dict[str, str]:
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
