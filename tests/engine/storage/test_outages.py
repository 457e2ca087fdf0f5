"""S3 that doesn't answer is told from S3 that refuses, and from what is not as recorded.

The first is a StorageError, which a cluster tries again; the others are faults of data or lineage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from faulty_s3 import Faults, faulty_s3

from engine.checkpoint import CheckpointStore
from engine.config import DataConfig
from engine.data.incremental_data import find_new_files
from engine.data.rows import rl_row
from engine.data.sources import load_splits
from engine.errors import DataError, LineageError, StorageError
from engine.lineage.__main__ import main
from engine.lineage.audit import audit
from engine.lineage.lookup import review, write_origin
from engine.promotion.gate import require_unmodified
from engine.storage import filesystem
from engine.storage.artifacts import Draft, Parent, publish, read_manifest, share, staging, verify
from engine.storage.digests import hash_files
from engine.storage.filesystem import Files, home
from engine.storage.readers import stream_rows

ROOT = "s3://outage"
NIGHT = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def server() -> Iterator[Faults]:
    """A bucket with data and a checkpoint."""
    with faulty_s3("outage") as faults:
        store = Files(ROOT).fs
        row = json.dumps(rl_row("sums", "What is 1 plus 1?", "2", {})) + "\n"
        store.pipe_file(f"{ROOT}/arrivals/2099-12-31/a.jsonl", row.encode())
        for split, ones in (("train", range(8)), ("test", range(8, 16))):
            rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in ones]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            store.pipe_file(f"{ROOT}/gsm8k/{split}.jsonl", text.encode())
        checkpoints = CheckpointStore(f"{ROOT}/checkpoints")
        draft = checkpoints.begin(5)
        draft.state = {"step": 5}
        checkpoints.commit(draft)
        yield faults


@pytest.fixture
def faults(server: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """That bucket as the shared store, and a machine that has nothing."""
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HYBRIDFLYTE_STORE", ROOT)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(filesystem, "BACKOFF_SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)
    yield server
    server.part, server.reads = "", False


def make(kind: str, *parents: Parent) -> str:
    with staging(kind) as folder:
        (folder / "content.txt").write_text(kind)
        return share(publish(folder, Draft(kind=kind, parents=parents)))


def artifact() -> str:
    data = make("dataset")
    return make("rl", read_manifest(data).as_parent("dataset", data))


def gsm8k() -> object:
    path = f"{ROOT}/gsm8k"
    return load_splits(DataConfig(source="gsm8k", path=path, validation_size=1), 0)


READS: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "new data": (lambda: find_new_files(f"{ROOT}/arrivals", NIGHT, [], 30), DataError),
    "a file": (lambda: list(stream_rows(f"{ROOT}/arrivals/2099-12-31/a.jsonl")), DataError),
    "gsm8k": (gsm8k, DataError),
    "hashing": (lambda: hash_files(f"{ROOT}/gsm8k"), LineageError),
    "manifest": (lambda: read_manifest(f"{ROOT}/artifacts/rl/0123456789abcdef"), LineageError),
    "origin": (lambda: write_origin(f"{ROOT}/run", Draft(kind="rl")), LineageError),
}


def no_one_listens(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")


def refuse(status: int) -> Callable[[Faults, pytest.MonkeyPatch], None]:
    def start(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
        faults.part, faults.status, faults.reads = "/outage", status, True

    return start


OUTAGES = {"nobody listens": no_one_listens, "broken": refuse(500)}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_store_that_does_not_answer_may_be_asked_again(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, what: str, outage: str
) -> None:
    OUTAGES[outage](faults, monkeypatch)
    with pytest.raises(StorageError, match=f"{ROOT}/.* check the ") as caught:
        READS[what][0]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", READS)
def test_a_store_that_refuses_may_not(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    refuse(403)(faults, monkeypatch)
    read, error = READS[what]
    with pytest.raises(error, match=f"{ROOT}/.* check the "):
        read()


@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_while_lineage_is_checked_is_no_finding(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, outage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = artifact()
    found = review([policy])
    checkpoint = review([f"{ROOT}/checkpoints/step_5"])
    assert audit(found).faults == audit(checkpoint).faults == ()
    OUTAGES[outage](faults, monkeypatch)
    for seen in (found, checkpoint):
        with pytest.raises(StorageError, match=f"{ROOT}/.* check the "):
            audit(seen)
    with pytest.raises(StorageError, match=f"can't read {ROOT}/"):
        verify(policy)
    with pytest.raises(StorageError, match=f"can't read {ROOT}/") as caught:
        require_unmodified([policy])
    assert "not as recorded" not in str(caught.value)
    assert main(["verify", policy, "--no-registry"]) == 1
    assert "can't read" in capsys.readouterr().err


def test_what_was_made_stays_on_the_disk_when_the_store_is_away(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_one_listens(faults, monkeypatch)
    with pytest.raises(StorageError, match="check the"):
        make("rl")
    (made,) = (home() / "artifacts" / "rl").iterdir()
    verify(made)
