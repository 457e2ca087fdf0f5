"""The commands of the README and the operations guide: each exists, with what it is given."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flyte_runs import REPOSITORY, Place
from flytekit.interaction.click_types import DateTimeType

from engine.stages.dataset import check_kickoff
from workflows.register import image_digest

README = REPOSITORY / "README.md"
GUIDE = REPOSITORY / "docs" / "operations.md"
PAGES = (README, GUIDE)
PROGRAMS = ("python", "pyflyte", "mlflow", "make", "source")


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks; a continued one is one line."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.strip()]


def needs_cluster(line: str) -> bool:
    return line.endswith("# cluster")


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


ANYWHERE = [line for page in PAGES for line in commands(page) if not needs_cluster(line)]


def those_of(program: str) -> list[str]:
    return [line for line in ANYWHERE if line.startswith(program)]


@pytest.mark.parametrize(("page", "least"), [(README, 8), (GUIDE, 10)])
def test_both_kinds_are_there_and_nothing_else_is_marked(page: Path, least: int) -> None:
    assert sum(not needs_cluster(line) for line in commands(page)) >= least
    for line in commands(page):
        program = words_of(line)[0]
        assert needs_cluster(line) or program in PROGRAMS, line
        assert program not in ("flytectl", "kubectl", "docker") or needs_cluster(line), line


def options(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


@pytest.mark.parametrize("line", those_of("pyflyte"))
def test_a_workflow_takes_what_it_is_given(place: Place, line: str) -> None:
    words = words_of(line)[1:]
    assert words[0] == "run"
    file = REPOSITORY / words[1]
    shown = place.invoke("run", str(file), words[2], "--help")
    assert shown.code == 0, shown.text
    for option in options(words):
        name = option.removeprefix("--").replace("_", "[-_]")
        assert re.search(rf"--{name}\b", shown.out), f"{line}: no {option}"


@pytest.mark.parametrize("line", [line for line in ANYWHERE if "--kickoff" in line])
def test_a_kick_off_is_the_present_wherever_one_is(line: str) -> None:
    words = words_of(line)
    value = words[words.index("--kickoff") + 1]
    said = subprocess.run(
        ["bash", "-c", f'TZ=Asia/Tokyo; export TZ; printf %s "{value}"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    at, now = DateTimeType().convert(said, None, None), datetime.now(UTC)
    check_kickoff(at, now)
    assert abs((at.replace(tzinfo=UTC) - now).total_seconds()) < 60


@pytest.mark.parametrize("line", those_of("python -m"))
def test_a_module_takes_what_it_is_given(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, module, *words = words_of(line)
    settings = [word.partition("=")[0] for word in words if not word.startswith("-")]
    subcommands = [word for word in words[:1] if not word.startswith("-") and "=" not in word]
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", [module, *subcommands, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (None, 0)
    shown = capsys.readouterr().out
    for option in options(words):
        assert option in shown, f"{line}: no {option}"
    if module == "engine.main_ppo":
        known = shown.split()
        for setting in settings:
            assert setting in known, f"{line}: no {setting}"


@pytest.mark.parametrize("line", those_of("make"))
def test_a_target_of_make_takes_what_it_is_given(line: str) -> None:
    words = words_of(line)
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", *words[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    for given in (word for word in words[1:] if "=" in word):
        assert given.partition("=")[2] in made.stdout, f"{line}: {given} is not used"


@pytest.mark.parametrize("line", [line for line in ANYWHERE if "@" in line or "IMAGE" in line])
def test_an_image_is_named_by_digest(line: str) -> None:
    if found := re.search(r"(?:IMAGE=|--image )(\S+)", line):
        assert image_digest("default", found[1])


def test_what_make_installs_is_activated_before_it_is_used() -> None:
    lines = commands(README)
    activated = lines.index("source .venv/bin/activate")
    bare = [number for number, line in enumerate(lines) if line.startswith(("pyflyte", "python"))]
    assert activated < min(bare)
    assert "VENV := .venv\n" in (REPOSITORY / "Makefile").read_text()


def test_gsm8k_is_where_it_is_said_to_be_or_on_disk_or_on_the_hub(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("Makefile", "images", "pyproject.toml"):
        (clone / name).symlink_to(REPOSITORY / name)

    def path_of(*given: str) -> str:
        made = subprocess.run(
            ["make", "--dry-run", "gsm8k", *given], cwd=clone, capture_output=True, text=True
        )
        found = re.search(r"--path (\S+) ", made.stdout)
        assert found, made.stderr
        return found[1]

    assert path_of() == "openai/gsm8k"
    (tmp_path / "shared" / "data" / "gsm8k").mkdir(parents=True)
    assert path_of() == "../shared/data/gsm8k"
    assert path_of("GSM8K=/data/gsm8k") == "/data/gsm8k"


@pytest.mark.parametrize("page", PAGES)
def test_what_it_links_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
