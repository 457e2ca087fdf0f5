"""What the site has beside the pages of this folder: the references, made from the sources."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import engine
from engine.config.text import markdown

PAGE = re.compile(r"\[([\w-]+\.md)\]\(")  # a link to a page, by its file's name
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")  # a link to a file of the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the configuration's reference and that of the public Python names."""
    files.append(File.generated(config, "configuration.md", content=markdown()))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_page_markdown(text: str, **_: object) -> str:
    """Name files of the repository that are no pages without a link, and pages by their title."""
    return PAGE.sub(_with_title, OUTSIDE.sub(r"\1", text))


def _with_title(link: re.Match[str]) -> str:
    """`[data.md](` becomes `[Data](`; a page that is made from the sources keeps its name."""
    page = Path(__file__).with_name(link[1])
    if not page.exists():
        return link[0]
    title = re.split("[:\n]", page.read_text())[0]
    return f"[{title.removeprefix('# ')}]("


def api() -> str:
    """The public names of `engine`, each with its docstring."""
    parts = ["# Python API", "", "All of these can be imported from `engine`.", ""]
    for name in engine.__all__:
        value = getattr(engine, name)
        if callable(value):
            parts += [f"::: {value.__module__}.{value.__qualname__}", ""]
    return "\n".join(parts)
