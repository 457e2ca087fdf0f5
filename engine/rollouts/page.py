"""The samples of a run as one HTML page that needs nothing else, for a browser or a Flyte Deck.

Completions are hostile text. They are data in the page, not markup: its script puts them into text
nodes alone, and a content security policy permits this script and style and no address at all.
"""

from __future__ import annotations

import functools
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from engine import html_templates
from engine.rollouts.files import SampleFolder
from engine.rollouts.page_data import PageData


def render_page(data: PageData, title: str) -> str:
    """Return the page; title: which run it is of."""
    css = html_templates.asset(__package__, "rollouts.css")
    script = Markup("").join(
        html_templates.asset(__package__, name)
        for name in ("curves.js", "episodes.js", "rollouts.js")
    )
    return (
        _templates()
        .get_template("rollouts.html.j2")
        .render(
            css=css,
            data=Markup(data.as_json()),
            policy=html_templates.content_policy(css, script),
            script=script,
            title=title,
        )
    )


def read_page_data(folder: SampleFolder) -> PageData:
    """All samples of a folder."""
    data = PageData()
    for name in folder.names():
        data.add(name, *folder.read(name))
    return data


def page_of(folder: SampleFolder) -> str:
    """The page of all samples in a folder."""
    return render_page(read_page_data(folder), run_name(folder.uri))


def run_name(uri: str) -> str:
    """The run's folder, for a title: the last two parts of its address above `rollouts`."""
    parts = [part for part in uri.split("/") if part]
    above = parts[:-1] if parts[-1:] == ["rollouts"] else parts
    return "/".join(above[-2:]) or str(Path(uri))


@functools.cache
def _templates() -> Environment:
    return html_templates.environment(__package__)
