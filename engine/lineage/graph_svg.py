"""A graph as inline SVG: boxes that are links to their details, lines from parent to child."""

from __future__ import annotations

from collections.abc import Mapping

from engine.lineage.graph import MODEL_VERSION, Graph, Node
from engine.lineage.graph_layout import BOX_HEIGHT, BOX_WIDTH, Line, Point, arrange
from engine.lineage.markup import attribute, element

# Kinds with a colour of their own in `style`; others share one.
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
LONGEST = 24  # characters of a label in its box


def kind_class(kind: str) -> str:
    """Return the CSS class of a kind."""
    return f"k-{kind}" if kind in KINDS else "k-other"


def draw(graph: Graph, ids: Mapping[str, str], marks: Mapping[str, str]) -> str:
    """Return the SVG. ids: a node's id in the page by its key. marks: `fault` or `missing`."""
    lines: dict[Line, list[str]] = {}
    for edge in graph.edges.values():
        lines.setdefault((edge.parent, edge.child), []).append(edge.name)
    drawing = arrange(list(graph.nodes), lines)
    width, height = _number(drawing.width), _number(drawing.height)
    paths = "".join(
        _path(points, ids[line[0]], ids[line[1]], ", ".join(lines[line]))
        for line, points in drawing.lines.items()
    )
    # Tab goes from left to right, and down within a layer.
    order = sorted(graph.nodes, key=lambda key: drawing.boxes[key])
    boxes = "".join(_box(graph, graph.nodes[k], drawing.boxes[k], ids[k], marks) for k in order)
    return (
        f'<svg class="graph" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="group" aria-label="Lineage graph: {len(graph.nodes)} nodes, parents on the left">'
        '<defs><marker id="lineage-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" '
        'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/>'
        f"</marker></defs>{paths}{boxes}</svg>"
    )


def _path(points: tuple[Point, ...], parent: str, child: str, name: str) -> str:
    """One line: curves between layers, straight where it passes one."""
    d = f"M{_number(points[0][0])} {_number(points[0][1])}"
    for index in range(1, len(points)):
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        if y0 == y1:
            d += f"L{_number(x1)} {_number(y1)}"
        else:
            bend = max(abs(x1 - x0) / 2, 24)
            d += (
                f"C{_number(x0 + bend)} {_number(y0)} {_number(x1 - bend)} {_number(y1)} "
                f"{_number(x1)} {_number(y1)}"
            )
    return (
        f'<path class="edge" d="{d}" marker-end="url(#lineage-arrow)" '
        f'data-parent="{parent}" data-child="{child}">{element("title", name)}</path>'
    )


def _box(graph: Graph, node: Node, at: Point, id_: str, marks: Mapping[str, str]) -> str:
    mark = marks.get(node.key, "")
    focus = " focus" if node.key in graph.focus else ""
    title, under = box_texts(node)
    spoken = f"{node.kind} {node.label or node.digest[:12]}" + (f", {mark}" if mark else "")
    badge = ""
    if mark:
        badge = f'<text class="badge" x="{BOX_WIDTH - 10}" y="20" text-anchor="end">{mark}</text>'
    return (
        f'<a class="node {kind_class(node.kind)} {mark}{focus}" href="#{id_}" data-node="{id_}" '
        f'aria-label="{attribute(spoken)}" transform="translate({_number(at[0])} '
        f'{_number(at[1])})"><rect class="box" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<rect class="stripe" x="5" y="7" width="5" height="{BOX_HEIGHT - 14}" rx="2.5"/>'
        f"{element('title', node.name)}"
        f"{element('text', shorten(title, LONGEST), class_='name', x='20', y='22')}"
        f"{element('text', shorten(under, LONGEST + 4), class_='under', x='20', y='39')}"
        f"{badge}</a>"
    )


def box_texts(node: Node) -> tuple[str, str]:
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
