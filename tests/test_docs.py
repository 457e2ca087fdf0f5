"""The documentation: its map is that of the imports, its links lead somewhere, its code runs."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.config import PipelineConfig
from engine.config.text import sections

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md"])


def rooms() -> dict[str, set[str]]:
    """Every folder and module of `engine/`, and the others that it imports at any place."""
    paths = {
        path.stem: path
        for path in (ROOT / "engine").iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
    }
    return {name: imported(path) & set(paths) - {name} for name, path in paths.items()}


def imported(room: Path) -> set[str]:
    """The rooms that a room's modules import, except its command line."""
    names: set[str] = set()
    for path in [room] if room.is_file() else sorted(room.rglob("*.py")):
        if path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            names |= {m.split(".")[1] for m in modules if m.startswith("engine.")}
    return names


def test_a_room_imports_only_rooms_below_it() -> None:
    page = (DOCS / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(rooms())
    upward = {
        name: sorted(set(listed[: listed.index(name)]) & uses) for name, uses in rooms().items()
    }
    assert {name: above for name, above in upward.items() if above} == {}


def test_the_page_of_the_rooms_names_files_that_are_there() -> None:
    page = (DOCS / "architecture.md").read_text()
    for room, file in re.findall(r"^\| `(\w+)` \|.*\| `([\w.]+)` \|$", page, re.MULTILINE):
        assert (ROOT / "engine" / room / file).exists(), (room, file)


def anchors(page: Path) -> set[str]:
    """The places in a page that a link can name, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"]({page.name})" not in index] == [
        "README.md"
    ]


def test_paths_of_the_repository_exist() -> None:
    """A page, the Makefile or a workflow that names a file of ours names one that is there."""
    named = [(page, r"`((?:engine|tasks|workflows|tests)/[\w./]+)`") for page in PAGES]
    commands = [ROOT / "Makefile", *(ROOT / "workflows").glob("*.py")]
    named += [(page, r"((?:engine|tasks|workflows|images)/[\w./]+\.\w+)") for page in commands]
    for page, pattern in named:
        for path in re.findall(pattern, page.read_text()):
            assert (ROOT / path).exists(), (page.name, path)


def test_figures_of_recipes_are_those_of_the_pages_behind() -> None:
    page = (DOCS / "recipes.md").read_text()
    rows = re.findall(r"^\| .* \| `(.*)` \| (.*) \| \[.*\]\((.*)\) \|", page, re.MULTILINE)
    assert len(rows) > 5
    for command, result, link in rows:
        behind = (DOCS / link.partition("#")[0]).read_text()
        figures = re.findall(r"\d+\.\d", result)
        assert len(figures) in (1, 2, 3, 4), command
        assert [one for one in figures if one not in behind] == [], command


def test_presets_of_commands_are_there() -> None:
    presets = {path.stem for path in (ROOT / "engine" / "config" / "presets").glob("*.yaml")}
    places = [ROOT / "Makefile", *PAGES, *(ROOT / "workflows").glob("*.py")]
    named = {n for place in places for n in re.findall(r"preset:([\w.-]*\w)", place.read_text())}
    assert len(named) > 5
    assert named - presets - {"NAME"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_of_ours_is_there(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine"):
                module = importlib.import_module(node.module or "")
                assert [a.name for a in node.names if not hasattr(module, a.name)] == [], (
                    node.module
                )


def training_commands() -> list[tuple[str, str, str]]:
    """Page, program and arguments of each `engine.main_*` in a block of shell commands."""
    return [
        (page.name, *found)
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        for found in re.findall(r"-m engine\.(?:trainer\.)?(main_\w+) (.*)", line)
    ]


def test_settings_of_training_commands_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    commands = training_commands()
    assert len(commands) > 15
    for page, program, text in commands:
        words = [
            word
            for word in shlex.split(text, comments=True)
            if word != "…" and not word.startswith("-") and not word.endswith(".yaml")
        ]
        main = importlib.import_module(f"engine.cli.commands.{program}").main
        assert main([*words, "--print-config"]) == 0, (page, text, capsys.readouterr().err)


def test_the_readme_shows_ppo_as_it_is() -> None:
    shown = (ROOT / "README.md").read_text().split("this is the body of PPO")[1]
    lines = shown.split("```python\n")[1].split("```")[0].splitlines()
    source = (ROOT / "engine/dataflows/recipes.py").read_text()
    assert [line for line in lines if line.split("  #")[0] not in source] == []


def test_the_rewards_of_the_page_score() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "rewards.md").read_text(), re.DOTALL)
    place: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "rewards.md", "exec"), place)
    reward, named = place["reward"], place["short_and_right"]
    assert callable(reward)
    assert callable(named)
    assert reward(["2+3?"] * 2, ["5", "6"], ground_truth=["5", "5"]) == [1.0, 0.0]
    assert named(["2+3?"], ["5"], ground_truth=["5"]) == {"right": [1.0], "short": [0.5]}


def test_the_environment_and_the_tool_of_the_page_play() -> None:
    from engine.agents import Action, ToolCall, make_environment

    page = (DOCS / "agents.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "agents.md", "exec"), {"__name__": "agents_md"})

    async def play(name: str, options: dict[str, object], *turns: Action) -> list[Any]:
        environment = make_environment(name, options)
        row = {"reward_model": {"ground_truth": "lemon"}}
        return [await environment.reset(row), *[await environment.step(turn) for turn in turns]]

    turns = (Action("melon"), Action("lemon"))
    first, again, last = asyncio.run(play("anagram", {"tries": 2}, *turns))
    assert sorted(first.messages[0]["content"][14:19]) == sorted("lemon")
    assert again.messages[0]["content"] == "No. 1 tries left."
    assert (last.reward, last.done) == (1.0, True)
    call = Action("", tool_calls=(ToolCall("word_length", {"word": "lemon"}),))
    _, said = asyncio.run(play("tools", {"tools": ["word_length"]}, call))
    assert said.messages[0]["content"] == "5"


@pytest.mark.slow
def test_the_site_is_built_with_every_link_checked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "total_training_steps" in (tmp_path / "configuration.html").read_text()
    api = (tmp_path / "api.html").read_text()
    documented = [name for name in engine.__all__ if name != "__version__"]
    assert [name for name in documented if f">{name}<" not in api] == []
    assert "<blockquote>" not in api  # an example that Markdown has taken for a quotation


def test_settings_of_the_page_for_trl_s_users_exist() -> None:
    known = [(s.path, part) for part, _, own in sections(PipelineConfig) for s in own]
    names = {name for pair in known for name in pair}
    page = (DOCS / "from-trl.md").read_text()
    ours = [row.split(" | ")[1] for row in page.splitlines() if row.startswith("| `")]
    asked = {name.removesuffix(".*") for cell in ours for name in re.findall(r"`([\w.*]+)`", cell)}
    assert len(asked) > 40
    assert asked - names == set()


def test_messages_of_the_page_of_errors_are_in_the_sources() -> None:
    """Each bold quotation is a part of a message of ours; others' messages are named here."""
    page = (DOCS / "faq.md").read_text()
    quoted = re.findall(r"`([^`]+)`", " ".join(re.findall(r"\*\*(`.+?`)\*\*", page)))
    others = {"CUDA out of memory"}
    sources = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for folder in ("engine", "tasks")
        for path in (ROOT / folder).rglob("*.py")
    )
    plain = re.sub(r"\{[^{}]*\}", "", sources)
    assert len(quoted) > 15
    assert [text for text in quoted if text not in plain and text not in others] == []
