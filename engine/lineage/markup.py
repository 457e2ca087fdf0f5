"""Small pieces of HTML in which every text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

# What no HTML document may hold, and the marks that turn text around for the eye.
_UNWRITABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
LONGEST = 4000  # characters of one text that a page shows


def text(value: object) -> str:
    """Return a value as the text of an element."""
    shown = str(value)
    if len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]}… ({len(shown):,} characters)"
    return html.escape(_UNWRITABLE.sub("\ufffd", shown))


def attribute(value: object) -> str:
    """Return a value as it stands between an attribute's double quotes."""
    return text(value)


def element(tag: str, content: object, **attributes: str) -> str:
    """Return `<tag …>content</tag>` with the content escaped; `class_` stands for class."""
    pairs = "".join(f' {k.rstrip("_")}="{attribute(v)}"' for k, v in attributes.items())
    return f"<{tag}{pairs}>{text(content)}</{tag}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> str:
    """Return a table; cells are HTML already, heads are text. Empty when there are no rows."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return ""
    heads = "".join(element("th", name, scope="col") for name in head)
    top = f"<thead><tr>{heads}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table class="{class_}">{top}<tbody>{body}</tbody></table></div>'
