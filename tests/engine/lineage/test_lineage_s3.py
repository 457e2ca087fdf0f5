"""Lineage over a real S3 server: walking, descendants, and re-hashing where things lie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lineage_store import Run, make_run
from s3_server import environment, s3_server

from engine.checkpoint import CheckpointStore
from engine.errors import LineageError
from engine.lineage.__main__ import main
from engine.lineage.lookup import review, write_origin
from engine.storage.artifacts import Draft, read_manifest, verify
from engine.storage.digests import hash_file, hash_files
from engine.storage.filesystem import home

STORE = "s3://lineage/raw/artifacts"


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A real S3 server in this process, and s3fs's settings to reach it."""
    import s3fs

    with s3_server() as endpoint, environment(AWS_ENDPOINT_URL=endpoint):
        yield s3fs.S3FileSystem()


@pytest.fixture
def run(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose artifacts are in the bucket alone."""
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path)
    bucket.mkdir("lineage")
    bucket.put(str(home() / "artifacts"), "lineage/raw/", recursive=True)
    shutil.rmtree(home())
    yield made
    bucket.rm("lineage", recursive=True)


def remote(path: Path) -> str:
    return f"{STORE}/{path.parent.name}/{path.name}"


def test_relatives_are_found_in_the_bucket(run: Run) -> None:
    found = review([remote(run.rl)], registry=False)
    assert found.index.roots == (STORE,)
    assert found.summary == "5 nodes: 1 dataset, 1 evaluation, 1 rl, 1 sft, 1 source"
    assert {n.uri for n in found.graph.nodes.values() if n.manifest} == {
        remote(p) for p in (run.dataset, run.sft, run.rl, run.evaluation)
    }
    assert not os.path.exists(home())


def test_a_store_may_be_any_prefix(run: Run) -> None:
    found = review([str(run.raw)], ["s3://lineage"], registry=False)
    assert len(found.graph.nodes) == 5
    with pytest.raises(LineageError, match=r"no artifact was made from it in s3://lineage/none"):
        review([str(run.raw)], ["s3://lineage/none"], registry=False)


def test_verify_reads_the_bucket_and_not_a_copy(run: Run, bucket: Any, capsys) -> None:
    assert verify(remote(run.rl)).digest == read_manifest(remote(run.rl)).digest
    assert main(["verify", remote(run.rl)]) == 0
    bucket.pipe(f"{remote(run.sft)}/content.txt", b"poisoned")
    bucket.pipe(f"{remote(run.dataset)}/more.txt", b"")
    assert main(["verify", remote(run.rl)]) == 1
    said = capsys.readouterr().err
    assert "content.txt differs" in said
    assert "more.txt is in the folder but not in the manifest" in said


def test_an_edited_manifest_in_the_bucket(run: Run, bucket: Any, capsys) -> None:
    where = f"{remote(run.sft)}/manifest.json"
    bucket.pipe(where, bucket.cat_file(where).replace(b"0.5", b"0.1"))
    assert main(["verify", remote(run.rl)]) == 1
    assert "its parents, configuration or metrics were edited" in capsys.readouterr().err


def test_a_removed_parent_in_the_bucket(run: Run, bucket: Any, capsys) -> None:
    bucket.rm(remote(run.sft), recursive=True)
    assert main(["verify", remote(run.rl)]) == 1
    assert "sft" in capsys.readouterr().err


def test_remote_hashes_equal_local_ones(bucket: Any, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "big"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(os.urandom(9 << 20))
    (folder / "empty").write_bytes(b"")
    bucket.put(str(folder), "lineage/big", recursive=True)
    found = hash_files("s3://lineage/big")
    assert found == hash_files(folder)
    assert found["deep/weights.bin"].sha256 == hash_file(folder / "deep" / "weights.bin")


def test_checkpoints_in_the_bucket_lead_to_their_parents(run: Run, capsys) -> None:
    manifest = read_manifest(remote(run.rl))
    root = "s3://lineage/checkpoints"
    write_origin(root, Draft(kind="rl", parents=manifest.parents, config=manifest.config))
    store = CheckpointStore(root)
    draft = store.begin(5)
    draft.state = {"step": 5}
    folder = store.commit(draft).folder
    found = review([folder], ["s3://lineage"], registry=False)
    assert {node.kind for node in found.graph.nodes.values()} == {
        "checkpoint", "dataset", "evaluation", "rl", "sft", "source",
    }  # fmt: skip
    assert main(["verify", folder, "--store", "s3://lineage"]) == 0


def test_what_is_not_there_and_who_may_not_read_it_are_sentences(run: Run, capsys) -> None:
    with pytest.raises(LineageError, match="does not exist; check the address"):
        hash_files("s3://lineage/none")
    assert main(["show", "s3://lineage/none"]) == 1
    assert "has no manifest.json" in capsys.readouterr().err
    assert main(["show", "s3://nobody/none", "--store", "s3://nobody"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
