"""The picture of a graph: texts of its boxes and SVG paths of its lines, for `graph.svg.j2`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.lineage.graph import MODEL_VERSION, ArtifactNode, Graph
from engine.lineage.graph_layout import Line, Point, arrange

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
