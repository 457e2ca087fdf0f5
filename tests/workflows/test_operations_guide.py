"""The commands of the operations guide: each exists, with the options that it is given."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from flyte_runs import REPOSITORY, Place

GUIDE = REPOSITORY / "docs" / "operations.md"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def needs_cluster(line: str) -> bool:
    return line.endswith("# cluster")


ANYWHERE = [line for line in commands() if not needs_cluster(line)]


def test_both_kinds_are_there_and_nothing_else_is_marked() -> None:
    assert len(ANYWHERE) >= 10
    for line in commands():
        program = shlex.split(line)[0]
        assert needs_cluster(line) or program in ("python", "pyflyte", "mlflow"), line
        assert program not in ("flytectl", "kubectl", "docker") or needs_cluster(line), line


def options(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


@pytest.mark.parametrize("line", [line for line in ANYWHERE if line.startswith("pyflyte")])
def test_a_workflow_takes_what_it_is_given(place: Place, line: str) -> None:
    words = shlex.split(line)[1:]
    assert words[0] == "run"
    file = REPOSITORY / words[1]
    shown = place.invoke("run", str(file), words[2], "--help")
    assert shown.code == 0, shown.text
    for option in options(words):
        name = option.removeprefix("--").replace("_", "[-_]")
        assert re.search(rf"--{name}\b", shown.out), f"{line}: no {option}"


@pytest.mark.parametrize("line", [line for line in ANYWHERE if line.startswith("python -m")])
def test_a_module_takes_what_it_is_given(line: str) -> None:
    _, _, module, *words = shlex.split(line)
    subcommands = [word for word in words[:1] if not word.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-m", module, *subcommands, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for option in options(words):
        assert option in done.stdout, f"{line}: no {option}"


def test_what_it_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / target).exists(), target
