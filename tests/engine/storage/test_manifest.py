"""Digests are of content alone, manifests are checked to the byte, code versions are told apart."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lineage_store import edit, make, parent

from engine.config import PipelineConfig
from engine.config import digest as config_digest_of
from engine.errors import LineageError
from engine.lineage.lookup import write_origin
from engine.storage.artifacts import (
    Draft,
    Parent,
    differences,
    publish,
    read_manifest,
    staging,
    verify,
    write_manifest,
)
from engine.storage.digests import (
    FileEntry,
    code_version,
    content_digest,
    git_version,
    sources_digest,
    tree_digest,
)
from engine.storage.filesystem import home


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


# Digests


def test_tree_digest_is_the_documented_formula(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"one")
    (tmp_path / "a").write_bytes(b"two")
    (tmp_path / "manifest.json").write_text("ignored")
    one, two = (hashlib.sha256(word).hexdigest() for word in (b"one", b"two"))
    expected = hashlib.sha256(f"a\0{two}\nb/x\0{one}\n".encode()).hexdigest()
    assert tree_digest(tmp_path) == expected


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=4), max_size=5))
def test_content_digest_ignores_order_and_sees_every_change(files: dict[str, bytes]) -> None:
    entries = {
        k: FileEntry(size=len(v), sha256=hashlib.sha256(v).hexdigest()) for k, v in files.items()
    }
    digest = content_digest(entries)
    assert content_digest(dict(reversed(entries.items()))) == digest
    for name in entries:
        other = entries | {name: FileEntry(size=0, sha256="0" * 64)}
        assert content_digest(other) != digest
        assert content_digest({k: v for k, v in entries.items() if k != name}) != digest


def test_a_manifest_and_an_origin_hold_no_credentials(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "x").write_text("x")
    source = Parent(name="log", kind="source", digest="ab", uri="https://me:hunter2@host/log")
    config = {"reward": {"api_key": "hunter2", "urls": ["http://a:hunter2@b"], "name": "judge"}}
    draft = Draft(kind="rl", parents=(source,), config=config)
    manifest = write_manifest(folder, draft)
    origin = write_origin(tmp_path / "checkpoints", draft)
    for path in (folder / "manifest.json", tmp_path / "checkpoints" / "origin.json"):
        assert "hunter2" not in path.read_text()
        assert "https://me:***@host/log" in path.read_text()
    assert verify(folder).inputs_digest == manifest.inputs_digest == origin.inputs_digest
    plain = Draft(kind="rl", config={"lr": 0.1, "path": "s3://bucket/x", "betas": [0.9, 1e-8]})
    assert plain.redacted() == plain


def test_config_digest_equals_that_of_the_section(tmp_path: Path) -> None:
    config = PipelineConfig()
    (tmp_path / "x").write_text("x")
    manifest = write_manifest(tmp_path, Draft(kind="rl", config=config.model_dump(mode="json")))
    assert manifest.config_digest == config_digest_of(config)


def test_sources_digest_depends_on_sources_alone(tmp_path: Path) -> None:
    for package in ("engine", "tasks", "examples"):
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
    template = tmp_path / "two" / "engine" / "page.html.j2"
    template.write_text("<p>")
    assert sources_digest(tmp_path / "two") != first
    template.unlink()
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


def test_a_manifest_knows_the_digest_of_its_own_bytes(tmp_path: Path) -> None:
    folder = make("dataset", "rows")
    expected = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert read_manifest(folder).own_digest == expected
    assert parent("dataset", folder).manifest == expected
    (tmp_path / "x").write_text("x")
    assert write_manifest(tmp_path, Draft(kind="rl")).own_digest == (
        read_manifest(tmp_path).own_digest
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "content.txt").write_text("rowz"), r"content\.txt differs"),
        (lambda f: (f / "content.txt").unlink(), r"content\.txt is in the manifest but not in"),
        (lambda f: (f / "new.txt").write_text(""), r"new\.txt is in the folder but not in"),
        (lambda f: (f / "new.txt").symlink_to("/etc/hosts"), r"new\.txt is a link"),
        (lambda f: edit(f, digest="0" * 64), "digest is 000000000000 where"),
        (lambda f: edit(f, config={"text": "else"}), "config_digest is"),
        (lambda f: edit(f, config={"text": float("nan")}), "config is not JSON"),
    ],
)
def test_verify_names_what_differs(damage, message: str) -> None:
    folder = make("dataset", "rows")
    verify(folder)
    damage(folder)
    with pytest.raises(LineageError, match=message):
        verify(folder)


def test_all_differences_are_named_not_only_the_first() -> None:
    folder = make("dataset", "rows")
    manifest = read_manifest(folder)
    (folder / "content.txt").write_text("else")
    (folder / "new.txt").write_text("")
    assert len(differences(folder, manifest)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't read"),
        ("[" * 100_000, "can't read"),
        ("[]", "is not a manifest"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 2, "kind": "sft"}', "is not a manifest: digest"),
    ],
)
def test_unreadable_manifests_are_sentences(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(LineageError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../../.ssh/authorized_keys", "/etc/passwd", "a/../../b", "."])
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused(name: str) -> None:
    folder = make("sft", "weights")
    entry = read_manifest(folder).files["content.txt"].model_dump()
    edit(folder, files={"content.txt": entry, name: entry})
    with pytest.raises(LineageError, match=rf"names a file '{name}' outside of its folder"):
        read_manifest(folder)


@pytest.mark.parametrize(("field", "value"), [("kind", "../sft"), ("digest", "../../home")])
def test_a_manifest_whose_parent_leads_out_of_the_store_is_refused(field: str, value: str) -> None:
    folder = make("sft", "weights", parent("dataset", make("dataset", "rows")))
    (above,) = read_manifest(folder).parents
    edit(folder, parents=[above.model_dump() | {field: value}])
    with pytest.raises(LineageError, match=rf"is not a manifest: parents\.0\.{field}"):
        read_manifest(folder)


def test_a_manifest_of_the_first_schema_is_still_read() -> None:
    old = make("sft", "weights", parent("dataset", make("dataset", "rows")))
    parents = [
        {"name": p.name, "kind": p.kind, "digest": p.digest, "uri": p.uri}
        for p in read_manifest(old).parents
    ]
    edit(old, schema_version=1, parents=parents)
    assert verify(old).parents[0].manifest == ""


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    for value in (tmp_path, float("nan")):
        with pytest.raises(LineageError, match="not JSON"):
            write_manifest(tmp_path, Draft(kind="sft", config={"path": value}))


# Equal content, made of other things


def test_equal_content_of_other_parents_or_config_keeps_its_own_manifest() -> None:
    one, two = make("dataset", "one"), make("dataset", "two")
    first = make("sft", "weights", parent("dataset", one), config={"lr": 1})
    again = make("sft", "weights", parent("dataset", one), config={"lr": 1})
    other_config = make("sft", "weights", parent("dataset", one), config={"lr": 2})
    other_data = make("sft", "weights", parent("dataset", two), config={"lr": 1})
    assert again == first
    assert len({first, other_config, other_data}) == 3
    for path, config, data in (
        (first, {"lr": 1}, one),
        (other_config, {"lr": 2}, one),
        (other_data, {"lr": 1}, two),
    ):
        manifest = verify(path)
        assert manifest.config == config
        assert manifest.parents[0].digest == read_manifest(data).digest


def test_a_damaged_artifact_made_again_keeps_the_manifest_that_children_know() -> None:
    with staging("sft") as folder:
        (folder / "content.txt").write_text("weights")
        first = publish(folder, Draft(kind="sft", metrics={"seconds": 1.0}))
    known = read_manifest(first).own_digest
    (first / "content.txt").write_text("damaged")
    with staging("sft") as folder:
        (folder / "content.txt").write_text("weights")
        assert publish(folder, Draft(kind="sft", metrics={"seconds": 2.0})) == first
    assert verify(first).own_digest == known
    assert list((home() / ".staging").iterdir()) == []
