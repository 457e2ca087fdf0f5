"""Artifacts: folders, manifests, atomic writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lineage_store import edit, parent
from lineage_store import make as make_manifest
from s3_server import s3_bucket

from engine.config import PipelineConfig
from engine.config import digest as config_digest_of
from engine.errors import LineageError, StorageError
from engine.lineage.lookup import write_origin
from engine.storage import artifacts, filesystem
from engine.storage.artifacts import (
    Draft,
    Parent,
    differences,
    local_path,
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
from engine.storage.filesystem import artifact_path, fsync, fsync_tree, home

DRAFT = Draft(kind="dataset", config={"rows": 2}, metrics={"rows": 2.0})


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


def write(folder: Path, text: str = "hello") -> Path:
    (folder / "splits").mkdir(exist_ok=True)
    (folder / "splits" / "train.txt").write_text(text)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make(text: str = "hello") -> Path:
    with staging("dataset") as folder:
        return publish(write(folder, text), DRAFT)


def everything() -> set[str]:
    """Names of all files below home()."""
    return {p.relative_to(home()).as_posix() for p in home().rglob("*") if p.is_file()}


def test_home_is_absolute_and_from_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home() == tmp_path / "home"
    monkeypatch.delenv("HYBRIDFLYTE_HOME")
    monkeypatch.chdir(tmp_path)
    assert home() == tmp_path / "outputs"


def test_publish_names_the_folder_by_its_content() -> None:
    path = make()
    manifest = verify(path)
    assert path == home() / "artifacts" / "dataset" / manifest.digest[:16]
    assert (path / "splits" / "train.txt").read_text() == "hello"
    assert manifest.digest == tree_digest(path)
    assert manifest.files.keys() == {"splits/train.txt", "tokenizer.json"}
    assert not list((home() / ".staging").iterdir())


def test_an_equal_artifact_is_kept() -> None:
    first = make()
    before = (first / "manifest.json").stat().st_ino
    assert make() == first
    assert (first / "manifest.json").stat().st_ino == before
    assert make("other") != first


@pytest.mark.parametrize("damage", ["edit", "delete", "add", "manifest"])
def test_a_damaged_equal_artifact_is_replaced(damage: str) -> None:
    path = make()
    if damage == "edit":
        (path / "tokenizer.json").write_text("[]")
    elif damage == "delete":
        (path / "splits" / "train.txt").unlink()
    elif damage == "add":
        (path / "extra").write_text("x")
    else:
        (path / "manifest.json").unlink()
    with pytest.raises(LineageError):
        verify(path)
    assert make() == path
    verify(path)
    assert not list((home() / ".staging").iterdir())


@pytest.mark.parametrize("error", [ValueError, ConnectionError, KeyboardInterrupt, SystemExit])
def test_staging_is_removed_on_any_exception(error: type[BaseException]) -> None:
    def stage() -> None:
        with staging("sft") as folder:
            write(folder)
            raise error("its own words")

    with pytest.raises(error, match="its own words"):
        stage()
    assert everything() == set()


def test_a_full_disk_names_the_path_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(artifacts.os, "rename", full)
    with pytest.raises(StorageError, match=r"no space left.*HYBRIDFLYTE_HOME") as caught:
        make()
    assert str(home() / "artifacts" / "dataset") in str(caught.value)
    assert everything() == set()


FILL = """
import ctypes, json, os, sys
from pathlib import Path

libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
new_user, new_mounts = 0x10000000, 0x20000
if libc.unshare(new_user | new_mounts):  # refused to a process with threads, as torch starts
    sys.exit(77)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
if libc.mount(b"tmpfs", os.environb[b"HYBRIDFLYTE_HOME"], b"tmpfs", 0, b"size=1m"):
    sys.exit(77)

import torch
from safetensors.torch import save_file
from engine.errors import StorageError
from engine.storage.artifacts import publish, staging
from engine.storage.filesystem import home
from engine.storage.artifacts import Draft

fill = {
    "python": lambda file: file.write_bytes(bytes(4 << 20)),
    "safetensors": lambda file: save_file({"a": torch.zeros(1 << 20)}, file),
    "torch": lambda file: torch.save({"a": torch.zeros(1 << 20)}, file),
    "manifest": lambda file: file.write_bytes(bytes(1 << 20)),  # publishing fails
}
for name, write in fill.items():
    try:
        with staging("sft") as folder:
            write(folder / "weights")
            publish(folder, Draft(kind="sft"))
    except StorageError as error:
        left = [file.name for file in home().rglob("*") if file.is_file()]
        print(json.dumps([name, str(error), left]))
"""


def test_a_really_full_disk_leaves_nothing() -> None:
    """A file system of 1 MiB, mounted in a namespace of the child alone, whoever writes to it."""
    home().mkdir()
    done = subprocess.run([sys.executable, "-c", FILL], stdout=subprocess.PIPE, text=True)
    if done.returncode == 77:
        pytest.skip("this machine permits no private mounts")
    assert done.returncode == 0
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in said] == ["python", "safetensors", "torch", "manifest"]
    for name, error, left in said:
        assert error.startswith("can't write"), name
        assert "no space left on the disk; free some, or set HYBRIDFLYTE_HOME" in error, name
        assert left == [], name


def test_an_empty_folder_is_not_published() -> None:
    with pytest.raises(StorageError, match="no files"), staging("sft") as folder:
        publish(folder, Draft(kind="sft"))


def test_a_link_is_not_published(tmp_path: Path) -> None:
    with staging("sft") as folder:
        (folder / "weights").symlink_to(tmp_path)
        (folder / "config.json").write_text("{}")
        with pytest.raises(LineageError, match="is a link"):
            publish(folder, Draft(kind="sft"))
    assert everything() == set()


def test_leftovers_of_a_killed_process_are_swept_and_of_a_live_one_kept() -> None:
    code = (
        "import time\n"
        "from engine.storage.artifacts import staging\n"
        "with staging('rl') as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    leftover = Path(child.stdout.readline().strip())
    make("while it lives")
    assert (leftover / "half").exists()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert (leftover / "half").exists()
    make("after it died")
    assert not leftover.exists()


def test_two_processes_publishing_the_same_content_agree() -> None:
    code = (
        "import sys, time\n"
        "from engine.storage.artifacts import publish, staging\n"
        "from engine.storage.artifacts import Draft\n"
        "time.sleep(max(0, float(sys.argv[1]) - time.time()))\n"
        "for text in map(str, range(40)):\n"
        "    with staging('sft') as folder:\n"
        "        (folder / 'a').write_text(text)\n"
        "        publish(folder, Draft(kind='sft'))\n"
    )
    start = str(time.time() + 1.5)
    children = [subprocess.Popen([sys.executable, "-c", code, start]) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    published = list((home() / "artifacts" / "sft").iterdir())
    assert len(published) == 40
    assert {verify(path).digest[:16] for path in published} == {path.name for path in published}


def test_local_path_of_paths_and_file_uris() -> None:
    path = make()
    assert local_path(path) == local_path(str(path)) == local_path(f"file://{path}") == path


def test_a_deleted_artifact_names_the_way_out() -> None:
    missing = artifact_path("sft", "ab" * 32)
    with pytest.raises(StorageError, match=r"was deleted.*--overwrite-cache.*make clean-cache"):
        local_path(missing)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """The file system of a real S3 server in this process, with a bucket of that name."""
    import s3fs

    with s3_bucket("bucket"):
        yield s3fs.S3FileSystem()


def test_an_s3_artifact_is_downloaded_checked_and_cached(bucket) -> None:
    path = make("remote")
    bucket.put(str(path), "bucket/store/data", recursive=True)
    uri = "s3://bucket/store/data"
    assert read_manifest(uri) == read_manifest(path)
    got = local_path(uri)
    assert verify(got).digest == read_manifest(path).digest
    inode = (got / "tokenizer.json").stat().st_ino
    assert local_path(uri) == got
    assert (got / "tokenizer.json").stat().st_ino == inode
    (got / "tokenizer.json").write_text("damaged")
    verify(local_path(uri))


@pytest.mark.parametrize("moment", ["while it is hashed", "while it is renamed"])
@pytest.mark.parametrize("what", ["artifact", "folder", "file"])
def test_of_two_downloads_at_once_the_first_stays(
    bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, moment: str
) -> None:
    """Another process is faster; whoever it serves is reading its copy already."""
    uri = f"s3://bucket/twice/{what}/data"
    if what == "file":
        bucket.pipe_file(uri, b"rows")
    else:
        folder = make("twice") if what == "artifact" else write(tmp_path)
        for file in folder.rglob("*.*"):
            bucket.put_file(str(file), f"{uri}/{file.relative_to(folder).as_posix()}")
    first: list[tuple[Path, int]] = []

    def other_process() -> None:
        if not first:
            first.append((Path(), 0))
            path = local_path(uri)
            first[0] = path, path.stat().st_ino

    def tree(path: Path, real: Any = filesystem.fsync_tree) -> None:
        real(path)
        other_process()

    def rename(source: Path, target: Path, real: Any = os.rename) -> None:
        if Path(target).name == "data":
            other_process()
        real(source, target)

    if moment == "while it is hashed":
        monkeypatch.setattr(filesystem, "fsync_tree", tree)
    else:
        monkeypatch.setattr(artifacts.os, "rename", rename)
    second = local_path(uri)
    assert first[0][0] == second
    if what != "file" or moment == "while it is hashed":  # a file open for reading stays readable
        assert first[0][1] == second.stat().st_ino
    assert (second / "splits" / "train.txt" if what != "file" else second).read_bytes()
    assert not [p for p in (home() / ".staging").rglob("*") if p.is_file()]


def test_a_damaged_s3_artifact_is_refused_and_leaves_nothing(bucket) -> None:
    bucket.put(str(make("soon damaged")), "bucket/store/bad", recursive=True)
    bucket.pipe("bucket/store/bad/tokenizer.json", b"tampered")
    with pytest.raises(LineageError, match=r"tokenizer\.json differs"):
        local_path("s3://bucket/store/bad")
    assert not any(name.startswith((".cache", ".staging")) for name in everything())


def test_missing_and_unreachable_s3_are_sentences(bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"s3://bucket/none was deleted"):
        local_path("s3://bucket/none")
    with pytest.raises(StorageError, match=r"can't download nosuch://x"):
        local_path("nosuch://x")


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


def test_manifest_round_trips_with_odd_metrics(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    draft = Draft(kind="rl", metrics={"kl": float("inf")}, mlflow_run="r1", flyte_execution="e1")
    written = write_manifest(tmp_path, draft)
    assert read_manifest(tmp_path) == written == verify(tmp_path)
    assert written.metrics["kl"] == float("inf")
    assert written.sources_digest == sources_digest()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_manifest_knows_the_digest_of_its_own_bytes(tmp_path: Path) -> None:
    folder = make_manifest("dataset", "rows")
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
    folder = make_manifest("dataset", "rows")
    verify(folder)
    damage(folder)
    with pytest.raises(LineageError, match=message):
        verify(folder)


def test_all_differences_are_named_not_only_the_first() -> None:
    folder = make_manifest("dataset", "rows")
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
    folder = make_manifest("sft", "weights")
    entry = read_manifest(folder).files["content.txt"].model_dump()
    edit(folder, files={"content.txt": entry, name: entry})
    with pytest.raises(LineageError, match=rf"names a file '{name}' outside of its folder"):
        read_manifest(folder)


@pytest.mark.parametrize(("field", "value"), [("kind", "../sft"), ("digest", "../../home")])
def test_a_manifest_whose_parent_leads_out_of_the_store_is_refused(field: str, value: str) -> None:
    folder = make_manifest("sft", "weights", parent("dataset", make_manifest("dataset", "rows")))
    (above,) = read_manifest(folder).parents
    edit(folder, parents=[above.model_dump() | {field: value}])
    with pytest.raises(LineageError, match=rf"is not a manifest: parents\.0\.{field}"):
        read_manifest(folder)


def test_a_manifest_of_the_first_schema_is_still_read() -> None:
    old = make_manifest("sft", "weights", parent("dataset", make_manifest("dataset", "rows")))
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


def test_equal_content_of_other_parents_or_config_keeps_its_own_manifest() -> None:
    one, two = make_manifest("dataset", "one"), make_manifest("dataset", "two")
    first = make_manifest("sft", "weights", parent("dataset", one), config={"lr": 1})
    again = make_manifest("sft", "weights", parent("dataset", one), config={"lr": 1})
    other_config = make_manifest("sft", "weights", parent("dataset", one), config={"lr": 2})
    other_data = make_manifest("sft", "weights", parent("dataset", two), config={"lr": 1})
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


def test_nothing_of_a_tree_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b/c", "b/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    forced: set[int] = set()
    real = os.fsync

    def record(descriptor: int) -> None:
        forced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    fsync_tree(tmp_path)
    assert forced == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fsync(tmp_path / "nothing")
