"""Uploads of bytes of unknown number, to a real S3 server that can be slow, busy or wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import moto.s3.models
import pytest
import s3fs
from faulty_s3 import Faults, faulty_s3
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StorageError
from engine.storage import filesystem, s3
from engine.storage.digests import FileEntry, HashedChunks
from engine.storage.s3 import Objects, Uploader

PART = 1 << 16


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(filesystem, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART)  # S3's is 5 MiB
    with faulty_s3("stream") as made:
        yield made


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(f"s3://stream/{tmp_path.name}")


def pieces(size: int) -> list[bytes | memoryview]:
    """Random bytes in pieces of many lengths."""
    found: list[bytes | memoryview] = []
    left, chance = size, random.Random(size)
    while left:
        length = min(left, chance.choice([1, 1000, PART // 3, PART, 2 * PART + 1]))
        data = chance.randbytes(length)
        found.append(memoryview(data) if chance.random() < 0.5 else data)
        left -= length
    return found


def send(objects: Objects, name: str, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Upload bytes whose number is not known before; return what was sent."""
    hashed = HashedChunks(chunks)
    Uploader(objects).write(name, hashed)
    return hashed.entry


def pending() -> list[Any]:
    return list(s3fs.S3FileSystem().list_multipart_uploads("stream"))


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 4 * PART + 7])
def test_what_was_sent_is_there(objects: Objects, faults: Faults, size: int) -> None:
    chunks = pieces(size)
    whole = b"".join(chunks)
    wanted = FileEntry(size=size, sha256=sha256(whole).hexdigest())
    assert send(objects, "file", chunks) == wanted
    assert objects.read("file") == whole
    assert pending() == []
    requests = 1 if size < PART else 2 + -(-size // PART)  # parts, the beginning and the end
    assert len(faults.writes("/file")) == requests


def test_parts_go_side_by_side_and_no_more_than_so_many(objects: Objects, faults: Faults) -> None:
    faults.pause_s = 0.2
    send(objects, "file", pieces(11 * PART))
    assert 4 < faults.at_once <= s3.PARALLEL


def test_a_busy_store_and_a_flipped_bit_cost_nothing_but_time(
    objects: Objects, faults: Faults
) -> None:
    chunks = pieces(3 * PART)
    faults.part, faults.times, faults.flip = "/file", 3, 1
    assert send(objects, "file", chunks).size == 3 * PART
    assert faults.refused == 3
    assert faults.flip == 0
    assert objects.read("file") == b"".join(chunks)


@pytest.mark.parametrize("status", [503, 403])
def test_a_store_that_refuses_to_the_end_keeps_nothing(
    objects: Objects, faults: Faults, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    real, sent = Objects.upload_part, []

    def upload_part(self: Objects, name: str, upload: str, number: int, data: bytes) -> Any:
        if number == 2:
            faults.part, faults.status = "/file", status
        part = real(self, name, upload, number, data)
        sent.append(number)
        return part

    monkeypatch.setattr(Objects, "upload_part", upload_part)
    with pytest.raises(StorageError, match=r"/file can't be written: Not now; check the address"):
        send(objects, "file", pieces(4 * PART))
    faults.part = ""
    assert 2 not in sent
    assert (objects.sizes(), pending()) == ({}, [])


def test_nothing_is_left_when_the_bytes_end_in_an_error(objects: Objects) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(2 * PART)
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        send(objects, "file", chunks())
    assert (objects.sizes(), pending()) == ({}, [])


def test_an_end_whose_answer_was_lost_counts(
    objects: Objects, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request arrives, its answer doesn't; asked again, S3 knows of no such upload."""
    real = s3fs.S3FileSystem.call_s3
    lost = []

    def call_s3(self: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        answer = real(self, method, *arguments, **keywords)
        if method == "complete_multipart_upload" and not lost:
            lost.append(method)
            raise ConnectionError("the line is dead")
        return answer

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", call_s3)
    chunks = pieces(PART + 1)
    send(objects, "file", chunks)
    assert lost
    assert objects.read("file") == b"".join(chunks)


@given(st.integers(0, 5 << 40))
def test_parts_are_not_too_many_for_s3(size: int) -> None:
    length = s3.part_size(size)
    assert length >= s3.PART
    assert -(-size // length) <= s3.MAX_PARTS


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 7))
def test_parts_cover_the_bytes_once(chunks: list[bytes], length: int) -> None:
    parts = list(s3._split(chunks, length))
    assert b"".join(parts) == b"".join(chunks)
    assert all(len(part) == length for part in parts[:-1])
    assert all(0 < len(part) <= length for part in parts)
