"""Jinja2 for the HTML pages: a room's `templates/` folder, with every text from data escaped."""

import base64
import hashlib
import re
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

# Characters that HTML can't contain, and marks that reorder the text around them.
_UNPRINTABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
LONGEST = 4000  # characters of one text that a page shows
# Before a table that may be wider than a phone.
HINT = Markup(
    '<p class="hint note" aria-hidden="true">wider than this screen: scroll sideways →</p>'
)


def environment(package: str) -> Environment:
    """Return the templates of `package`; what they print is made `printable`, then escaped."""
    made = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=printable,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["breakable"] = breakable
    made.globals["hint"] = HINT
    return made


def breakable(name: str) -> Markup:
    """Let a line break after a separator in a name, and so nowhere within its words."""
    return Markup(re.sub(r"([/_.])", r"\1<wbr>", str(escape(printable(name)))))


def stylesheet() -> Markup:
    """Return the style of all pages, to be put into a page as it is."""
    return asset("engine", "pages.css")


def asset(package: str, name: str) -> Markup:
    """Return a style sheet or script of `package`, to be put into a page as it is."""
    return Markup(files(package).joinpath("templates", name).read_text(encoding="utf-8"))


def printable(value: object) -> object:
    """Cut a text to `LONGEST` characters, and replace what HTML can't contain by U+FFFD."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    if len(value) > LONGEST:
        value = f"{value[:LONGEST]}… ({len(value):,} characters)"
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)


def content_policy(css: str, script: str) -> str:
    """Return a content security policy for this style and this script, and no address at all."""

    def source(content: str) -> str:
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{source(css)}'; "
        f"script-src 'sha256-{source(script)}'; base-uri 'none'; form-action 'none'"
    )
