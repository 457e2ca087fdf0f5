"""Text from data is escaped, cut and printable; assets are as in their files."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from engine import html_templates

ROOT = Path(__file__).parents[2]
PACKAGE = "engine.lineage"


def render(source: str, **values: object) -> str:
    return html_templates.environment(PACKAGE).from_string(source).render(values)


def test_text_is_escaped_and_markup_is_not() -> None:
    assert render("{{ a }}", a="<&\"'>") == "&lt;&amp;&#34;&#39;&gt;"
    assert render("{{ a }}", a=Markup("<b>")) == "<b>"
    assert render("{{ a }}|{{ b }}", a=3, b=0.5) == "3|0.5"


def test_text_is_cut_and_printable() -> None:
    assert "(5,000 characters)" in render("{{ a }}", a="x" * 5000)
    page = render('<p title="{{ a }}">{{ a }}</p>', a="a\0b\ud800c\u202ed\x1b\t\n")
    assert page == '<p title="a�b�c�d�\t\n">a�b�c�d�\t\n</p>'
    page.encode()


def test_a_missing_variable_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'name' is undefined"):
        render("{{ name }}")


def test_assets_are_as_in_their_files() -> None:
    file = ROOT / "engine/lineage/templates/page.js"
    assert html_templates.asset(PACKAGE, "page.js") == file.read_text()
    style = ROOT / "engine/templates/pages.css"
    assert html_templates.stylesheet() == style.read_text()


def test_templates_are_installed_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    found = [p for p in ROOT.glob("engine/**/templates/*") if p.is_file()]
    assert len(found) > 5
    for path in found:
        assert any(fnmatch(f"templates/{path.name}", pattern) for pattern in patterns), path


def test_a_policy_permits_this_script_alone() -> None:
    policy = html_templates.content_policy("a {}", "run()")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert policy != html_templates.content_policy("a {}", "run(1)")
    assert "unsafe" not in policy
