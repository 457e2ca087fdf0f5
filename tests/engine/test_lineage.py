"""Digests are of content alone, manifests are checked to the byte, and trees resolve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.artifacts import home, publish, staging
from engine.config import PipelineConfig
from engine.config import digest as config_digest_of
from engine.errors import LineageError
from engine.lineage import (
    Draft,
    FileEntry,
    Parent,
    ancestry,
    code_version,
    hash_file,
    read_manifest,
    sources_digest,
    tree_digest,
    verify,
    write_manifest,
)
from engine.lineage.__main__ import main
from engine.lineage.code import git_version
from engine.lineage.manifest import content_digest
from engine.lineage.tree import check


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


def make(kind: str, text: str, *parents: Parent, **metrics: float) -> Path:
    with staging(kind) as folder:
        (folder / "content.txt").write_text(text)
        draft = Draft(kind=kind, parents=parents, config={"text": text}, metrics=metrics)
        return publish(folder, draft)


def parent(name: str, path: Path) -> Parent:
    return read_manifest(path).as_parent(name, path)


@pytest.fixture
def pipeline(tmp_path: Path) -> dict[str, Path]:
    """source file → dataset → warm start → RL model, which also reads the dataset."""
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"question": "1+1"}\n')
    source = Parent(name="gsm8k", kind="source", digest=hash_file(raw), uri=str(raw))
    data = make("dataset", "rows", source, rows=7)
    sft = make("sft", "weights", parent("dataset", data), validation_loss=0.5)
    rl = make("rl", "better", parent("warm_start", sft), parent("dataset", data), reward=0.875)
    return {"raw": raw, "dataset": data, "sft": sft, "rl": rl}


# Digests


def test_tree_digest_is_the_documented_formula(tmp_path: Path) -> None:
    import hashlib

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"one")
    (tmp_path / "a").write_bytes(b"two")
    (tmp_path / "manifest.json").write_text("ignored")
    one, two = (hashlib.sha256(word).hexdigest() for word in (b"one", b"two"))
    expected = hashlib.sha256(f"a\0{two}\nb/x\0{one}\n".encode()).hexdigest()
    assert tree_digest(tmp_path) == expected


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=4), max_size=5))
def test_content_digest_ignores_order_and_sees_every_change(files: dict[str, bytes]) -> None:
    import hashlib

    entries = {
        k: FileEntry(size=len(v), sha256=hashlib.sha256(v).hexdigest()) for k, v in files.items()
    }
    digest = content_digest(entries)
    assert content_digest(dict(reversed(entries.items()))) == digest
    for name in entries:
        other = entries | {name: FileEntry(size=0, sha256="0" * 64)}
        assert content_digest(other) != digest
        assert content_digest({k: v for k, v in entries.items() if k != name}) != digest


def test_config_digest_equals_that_of_the_section(tmp_path: Path) -> None:
    config = PipelineConfig()
    (tmp_path / "x").write_text("x")
    manifest = write_manifest(tmp_path, Draft(kind="rl", config=config.model_dump(mode="json")))
    assert manifest.config_digest == config_digest_of(config)


def test_sources_digest_depends_on_sources_alone(tmp_path: Path) -> None:
    for package in ("engine", "tasks"):
        (tmp_path / "one" / package / "sub").mkdir(parents=True)
        (tmp_path / "one" / package / "sub" / "a.py").write_text(f"# {package}\n")
    first = sources_digest(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    os.utime(tmp_path / "two" / "engine" / "sub" / "a.py", (1, 1))
    cache = tmp_path / "two" / "engine" / "__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").write_bytes(b"x")
    (tmp_path / "two" / "engine" / "notes.md").write_text("x")
    assert sources_digest(tmp_path / "two") == first
    edited = tmp_path / "two" / "tasks" / "sub" / "a.py"
    edited.write_text("# tasks \n")
    assert sources_digest(tmp_path / "two") != first
    edited.write_text("# tasks\n")
    edited.rename(edited.with_name("b.py"))
    assert sources_digest(tmp_path / "two") != first


def test_sources_digest_of_the_project_reads_its_own_files() -> None:
    digest = sources_digest()
    assert len(digest) == 64
    assert digest != sources_digest("/nonexistent-root")


# Code version


def test_git_version_marks_edited_sources(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    git_version.cache_clear()
    assert git_version(tmp_path) == commit
    (tmp_path / "a.py").write_text("2\n")
    git_version.cache_clear()
    assert git_version(tmp_path) == f"{commit}-dirty"
    below = tmp_path / "site-packages"
    below.mkdir()
    assert git_version(below) == "unknown"


def test_code_version_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_CODE_VERSION", "v1.2-image")
    assert code_version() == "v1.2-image"


# Manifests


def test_manifest_round_trips_with_odd_metrics(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    draft = Draft(kind="rl", metrics={"kl": float("inf")}, mlflow_run="r1", flyte_execution="e1")
    written = write_manifest(tmp_path, draft)
    assert read_manifest(tmp_path) == written == verify(tmp_path)
    assert written.metrics["kl"] == float("inf")
    assert written.sources_digest == sources_digest()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "content.txt").write_text("rowz"), r"content\.txt differs"),
        (lambda f: (f / "content.txt").unlink(), r"content\.txt is in the manifest but not in"),
        (lambda f: (f / "new.txt").write_text(""), r"new\.txt is in the folder but not in"),
        (lambda f: edit(f, "digest", "0" * 64), "digest is 000000000000 where"),
        (lambda f: edit(f, "config", {"text": "else"}), "config_digest is"),
    ],
)
def test_verify_names_what_differs(damage, message: str) -> None:
    folder = make("dataset", "rows")
    verify(folder)
    damage(folder)
    with pytest.raises(LineageError, match=message):
        verify(folder)


def edit(folder: Path, key: str, value: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't read"),
        ("[]", "is not a manifest"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1, "kind": "sft"}', "is not a manifest: digest"),
    ],
)
def test_unreadable_manifests_are_sentences(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(LineageError, match=message):
        read_manifest(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    for value in (tmp_path, float("nan")):
        with pytest.raises(LineageError, match="not JSON"):
            write_manifest(tmp_path, Draft(kind="sft", config={"path": value}))


# Trees


def shape(path: Path) -> list[tuple[str, str, bool, bool]]:
    return [(n.name, n.kind, n.missing, n.repeated) for n in ancestry(path).walk()]


WHOLE = [
    ("", "rl", False, False),
    ("warm_start", "sft", False, False),
    ("dataset", "dataset", False, False),
    ("gsm8k", "source", False, False),
    ("dataset", "dataset", False, True),
]


def test_ancestry_reaches_the_source_and_expands_a_node_once(pipeline: dict[str, Path]) -> None:
    assert shape(pipeline["rl"]) == WHOLE


def test_ancestry_survives_a_moved_store(
    pipeline: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(home() / "artifacts", tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "rl" / pipeline["rl"].name
    assert shape(moved) == WHOLE
    (tmp_path / "home2").mkdir()
    shutil.move(tmp_path / "elsewhere", tmp_path / "home2" / "artifacts")
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home2"))
    copy = shutil.copytree(
        tmp_path / "home2" / "artifacts" / "rl" / pipeline["rl"].name, tmp_path / "copy"
    )
    assert shape(Path(copy)) == WHOLE


def test_missing_parents_and_sources_are_shown_as_such(pipeline: dict[str, Path]) -> None:
    pipeline["raw"].unlink()
    shutil.rmtree(pipeline["sft"])
    assert shape(pipeline["rl"]) == [
        ("", "rl", False, False),
        ("warm_start", "sft", True, False),
        ("dataset", "dataset", False, False),
        ("gsm8k", "source", True, False),
    ]


def test_another_artifact_at_the_recorded_address_is_not_the_parent(
    pipeline: dict[str, Path], tmp_path: Path
) -> None:
    shutil.rmtree(pipeline["sft"])
    shutil.copytree(make("sft", "impostor"), pipeline["sft"])
    assert ("warm_start", "sft", True, False) in shape(pipeline["rl"])


def test_check_finds_a_changed_source_and_a_tampered_parent(pipeline: dict[str, Path]) -> None:
    assert check(ancestry(pipeline["rl"])) == []
    pipeline["raw"].write_text("changed")
    (pipeline["sft"] / "content.txt").write_text("poisoned")
    faults = check(ancestry(pipeline["rl"]))
    assert len(faults) == 2
    assert "content.txt differs" in faults[0]
    assert "raw.jsonl is now" in faults[1]


# The command


def test_command_prints_the_tree(pipeline: dict[str, Path], capsys) -> None:
    assert main([str(pipeline["rl"])]) == 0
    out = capsys.readouterr().out
    digest = read_manifest(pipeline["rl"]).digest
    assert out.startswith(f"rl {digest[:12]}")
    assert "warm_start: sft" in out
    assert "reward=0.875" in out
    assert "shown above" in out
    assert f"gsm8k: source {hash_file(pipeline['raw'])[:12]} {pipeline['raw']}" in out
    assert f"config {read_manifest(pipeline['sft']).config_digest[:12]}" in out


def test_command_as_json(pipeline: dict[str, Path], capsys) -> None:
    assert main([str(pipeline["rl"]), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["manifest"]["metrics"] == {"reward": 0.875}
    assert tree["parents"][0]["parents"][0]["parents"][0]["kind"] == "source"


def test_command_verifies(pipeline: dict[str, Path], capsys) -> None:
    assert main([str(pipeline["rl"]), "--verify"]) == 0
    assert "verified: 4" in capsys.readouterr().err
    (pipeline["dataset"] / "content.txt").write_text("poisoned")
    assert main([str(pipeline["rl"]), "--verify"]) == 1
    assert "content.txt differs" in capsys.readouterr().err


def test_command_on_a_wrong_path_is_one_sentence_and_exit_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.lineage", str(tmp_path / "nothing")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "has no manifest.json" in done.stderr
