"""Publishing is whole or not at all; leftovers go; remote artifacts come over S3 for real."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import s3_bucket

from engine.errors import LineageError, StorageError
from engine.storage import artifacts, filesystem
from engine.storage.artifacts import Draft, local_path, publish, read_manifest, staging, verify
from engine.storage.digests import tree_digest
from engine.storage.filesystem import artifact_path, home

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
