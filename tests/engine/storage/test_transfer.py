"""Files to and from a real S3 server: parallel, in parts, checked, tried again, or nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import moto.s3.models
import pytest
import s3fs
from faulty_s3 import Faults, faulty_s3

from engine.errors import StorageError
from engine.storage import filesystem, s3
from engine.storage.digests import FileEntry
from engine.storage.filesystem import QUICK, Timeouts, s3_credentials
from engine.storage.s3 import SHA256_KEY, Objects, download, upload

PART = 1 << 16


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(filesystem, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART)  # S3's is 5 MiB
    monkeypatch.setattr(s3, "RANGE", PART)
    with faulty_s3("transfer") as made:
        yield made


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"s3://transfer/{tmp_path.name}"


def write(folder: Path, **sizes: int) -> dict[str, FileEntry]:
    """Files of random bytes; `model` in the name makes it `deep/model`."""
    files = {}
    for name, size in sizes.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = os.urandom(size)
        path.write_bytes(data)
        name = path.relative_to(folder).as_posix()
        files[name] = FileEntry(size=size, sha256=sha256(data).hexdigest())
    return files


def pending() -> list[Any]:
    return list(s3fs.S3FileSystem().list_multipart_uploads("transfer"))


def test_a_folder_goes_there_and_back(faults: Faults, uri: str, tmp_path: Path) -> None:
    files = write(tmp_path / "a", empty=0, small=10, whole=PART, deep__big=3 * PART + 7)
    assert upload(tmp_path / "a", uri, files) == 4 * PART + 17
    assert len(faults.writes("deep/big")) == 4 + 2  # parts, the beginning and the end
    assert len(faults.writes("whole")) == 1
    assert pending() == []
    download(uri, tmp_path / "b", files)
    for name, entry in files.items():
        assert sha256((tmp_path / "b" / name).read_bytes()).hexdigest() == entry.sha256
    before = len(faults.writes())
    assert upload(tmp_path / "a", uri, files) == 0
    assert len(faults.writes()) == before


def test_requests_go_side_by_side_and_no_more_than_so_many(
    faults: Faults, uri: str, tmp_path: Path
) -> None:
    files = write(tmp_path / "a", big=3 * PART, **{f"f{i}": 100 for i in range(12)})
    faults.pause_s = 0.1
    upload(tmp_path / "a", uri, files)
    assert 4 < faults.at_once <= s3.PARALLEL
    faults.at_once, faults.reads = 0, True
    download(uri, tmp_path / "b", files)
    assert 4 < faults.at_once <= s3.PARALLEL


def test_a_busy_store_is_asked_again(faults: Faults, uri: str, tmp_path: Path) -> None:
    files = write(tmp_path / "a", big=2 * PART, small=10)
    faults.part, faults.status, faults.times, faults.reads = f"{uri[5:]}/", 503, 4, True
    upload(tmp_path / "a", uri, files)
    assert faults.refused == 4
    faults.times, faults.refused = 3, 0
    download(uri, tmp_path / "b", files)
    assert faults.refused == 3
    assert (tmp_path / "b" / "big").read_bytes() == (tmp_path / "a" / "big").read_bytes()


@pytest.mark.parametrize("status", [503, 403])
def test_a_store_that_refuses_to_the_end_is_a_sentence_and_keeps_no_part(
    faults: Faults, uri: str, tmp_path: Path, status: int
) -> None:
    files = write(tmp_path / "a", big=2 * PART)
    faults.part, faults.status = "/big", status
    with pytest.raises(StorageError, match=r"/big can't be written: Not now; check the address"):
        upload(tmp_path / "a", uri, files)
    assert faults.refused == (5 if status == 503 else 1)
    faults.part = ""
    assert (Objects(uri).sizes(), pending()) == ({}, [])


def test_parts_that_were_sent_before_a_refusal_are_forgotten(
    faults: Faults, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path / "a", big=4 * PART)
    real, sent = Objects.upload_part, []

    def some(self: Objects, name: str, upload: str, number: int, data: bytes) -> Any:
        if number == 4:
            while not sent:
                time.sleep(0.01)
            assert len(pending()) == 1, "the parts are there"
            raise StorageError("enough")
        part = real(self, name, upload, number, data)
        sent.append(number)
        return part

    monkeypatch.setattr(Objects, "upload_part", some)
    with pytest.raises(StorageError, match="enough"):
        upload(tmp_path / "a", uri, files)
    assert (Objects(uri).sizes(), pending()) == ({}, [])


@pytest.mark.parametrize("size", [1000, 2 * PART])
def test_what_is_damaged_on_the_way_is_sent_again(
    faults: Faults, uri: str, tmp_path: Path, size: int
) -> None:
    files = write(tmp_path / "a", model=size)
    faults.part, faults.status, faults.flip = "/model", 0, 1
    upload(tmp_path / "a", uri, files)
    assert faults.flip == 0, "a bit was flipped"
    assert s3fs.S3FileSystem().cat_file(f"{uri}/model") == (tmp_path / "a" / "model").read_bytes()


@pytest.mark.parametrize("size", [1000, 2 * PART])
def test_a_file_that_is_not_what_its_manifest_says_is_not_sent(
    uri: str, tmp_path: Path, size: int
) -> None:
    files = write(tmp_path / "a", model=size)
    with (tmp_path / "a" / "model").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(StorageError, match="is not what its manifest says"):
        upload(tmp_path / "a", uri, files)
    assert (Objects(uri).sizes(), pending()) == ({}, [])


def test_an_object_that_somebody_changed_is_sent_again(uri: str, tmp_path: Path) -> None:
    files = write(tmp_path / "a", one=100, two=100)
    upload(tmp_path / "a", uri, files)
    s3fs.S3FileSystem().pipe_file(f"{uri}/one", os.urandom(100))
    assert upload(tmp_path / "a", uri, files) == 100
    download(uri, tmp_path / "b", files)
    assert (tmp_path / "b" / "one").read_bytes() == (tmp_path / "a" / "one").read_bytes()


def test_missing_short_and_forged_files_are_sentences(uri: str, tmp_path: Path) -> None:
    files = write(tmp_path / "a", one=100)
    with pytest.raises(StorageError, match="one is missing"):
        download(uri, tmp_path / "b", files)
    s3fs.S3FileSystem().pipe_file(f"{uri}/one", b"short")
    with pytest.raises(StorageError, match=r"one differs from the manifest: it ends before byte"):
        download(uri, tmp_path / "b", files)
    for name in ("../one", "/etc/passwd", "a/../../b"):
        with pytest.raises(StorageError, match="it was forged"):
            download(uri, tmp_path / "b", {name: FileEntry(size=1, sha256="0" * 64)})


def test_what_is_large_shows_how_far_it_is(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    monkeypatch.setattr(s3, "PART", mib)
    monkeypatch.setattr(s3, "RANGE", mib)
    files = write(tmp_path / "a", big=2 * mib)
    upload(tmp_path / "a", f"{uri}/quiet", files)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(s3, "LARGE", mib)
    upload(tmp_path / "a", uri, files, "upload rl")
    assert "upload rl: 2/2 (100 %)" in capsys.readouterr().err
    download(uri, tmp_path / "b", files, "download rl")
    said = capsys.readouterr().err
    assert "download rl: 2/2 (100 %)" in said
    assert "MiB/s" in said


def test_an_endpoint_that_is_not_there_ends_in_a_sentence_in_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(StorageError, match=r"Could not connect.*AWS_ENDPOINT_URL") as caught:
            Objects("s3://transfer/x", QUICK).sizes()
    assert time.monotonic() - start < 8
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(StorageError, match="can't be read: "):
            Objects("s3://transfer/x", Timeouts(2, 1, 0.5, 20)).read("a")
        with pytest.raises(StorageError, match=r"no answer in 1 s"):
            Objects("s3://transfer/x", Timeouts(2, 1, 30, 1)).read("a")
        assert time.monotonic() - start < 10


def test_credentials_that_are_none_end_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with monkeypatch.context() as patch:
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(variable)
        with pytest.raises(StorageError, match=r"credentials.*AWS_ACCESS_KEY_ID"):
            Objects("s3://transfer/x", QUICK).put("a", b"a")


def test_flyte_s_variables_are_taken_where_aws_s_are_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", "http://flyte")
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "s")
    own = {"client_kwargs": {"endpoint_url": endpoint}}
    assert s3_credentials() == own
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert s3_credentials() == {"client_kwargs": {"endpoint_url": "http://s3"}}
    flyte = {"client_kwargs": {"endpoint_url": "http://flyte"}, "key": "k", "secret": "s"}
    with monkeypatch.context() as patch:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"):
            patch.delenv(variable)
        assert s3_credentials() == flyte


def test_what_is_there_is_not_overwritten_by_what_must_be_new(uri: str) -> None:
    objects = Objects(uri)
    assert objects.put("a", b"first", only_if="")
    assert not objects.put("a", b"second", only_if="")
    assert objects.read("a") == b"first"
    assert objects.put("a", b"third")
    assert objects.head("a")["Metadata"] == {SHA256_KEY: sha256(b"third").hexdigest()}
    assert objects.sizes() == {"a": 5}
