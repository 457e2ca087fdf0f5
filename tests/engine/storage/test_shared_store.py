"""Artifacts in the shared store: complete by their manifest, found from machines that have nothing.

A machine is a HYBRIDFLYTE_HOME; the store is a real S3 server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import moto.s3.models
import pytest
import s3fs
from faulty_s3 import Faults, faulty_s3

from engine.errors import ConfigError, LineageError, StorageError
from engine.lineage.__main__ import main
from engine.storage import filesystem, s3
from engine.storage.artifacts import (
    Draft,
    Parent,
    local_path,
    publish,
    read_manifest,
    share,
    staging,
    verify,
)
from engine.storage.digests import hash_file
from engine.storage.filesystem import (
    Timeouts,
    home,
    is_artifact_address,
    local_copy_path,
    shared_address,
)
from engine.tracking import Tracker

Machine = Callable[[str], Path]


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_s3("shared") as made:
        yield made


@pytest.fixture
def machine(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Go to the machine of this name; only the store, whose prefix is the test's own, stays."""
    monkeypatch.setenv("HYBRIDFLYTE_STORE", f"s3://shared/{tmp_path.name}/")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(filesystem, "BACKOFF_SECONDS", 0.02)

    def move(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("HYBRIDFLYTE_HOME", str(folder / "home"))
        monkeypatch.chdir(folder)
        return folder

    move("first")
    return move


def make(text: str = "weights", *parents: Parent, kind: str = "rl", run: str = "") -> Path:
    with staging(kind) as folder:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
        (folder / "model.safetensors").write_text(text)
        draft = Draft(kind=kind, parents=parents, config={"text": text}, mlflow_run=run)
        return publish(folder, draft)


def objects(uri: str) -> dict[str, bytes]:
    store = s3fs.S3FileSystem()
    store.invalidate_cache()
    root = uri.removeprefix("s3://")
    return {path.removeprefix(root + "/"): store.cat_file(path) for path in store.find(root)}


def test_addresses_are_those_of_published_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    folder = tmp_path / "artifacts" / "rl" / ("0" * 16)
    beside = folder.with_name(folder.name + "-89abcdef")
    monkeypatch.delenv("HYBRIDFLYTE_STORE", raising=False)
    assert shared_address(folder) == str(folder)
    assert local_copy_path(f"s3://b/artifacts/rl/{'0' * 16}") is None
    monkeypatch.setenv("HYBRIDFLYTE_STORE", "s3://b/p/")
    for path in (folder, beside):
        uri = shared_address(path)
        assert uri == f"s3://b/p/artifacts/rl/{path.name}"
        assert local_copy_path(uri) == path
    assert is_artifact_address(f"s3://another/artifacts/rl/{'0' * 16}")
    assert local_copy_path(f"s3://another/artifacts/rl/{'0' * 16}") is None
    for other in (tmp_path / "runs" / "1", folder / "model", tmp_path / "artifacts", "/else"):
        assert shared_address(other) == str(other)
    for wrong in ("/folder", "gs://b", "s3://", "bucket", "s3://b/a b"):
        monkeypatch.setenv("HYBRIDFLYTE_STORE", wrong)
        with pytest.raises(ConfigError, match=r"HYBRIDFLYTE_STORE=.* set it to s3://bucket/prefix"):
            shared_address(folder)


def test_without_a_store_nothing_leaves_the_machine(
    faults: Faults, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYBRIDFLYTE_STORE")
    before = len(faults.asked)
    path = make()
    assert share(path) == str(path)
    assert faults.asked[before:] == []


def test_an_artifact_is_published_to_the_store_with_its_manifest_last(
    faults: Faults, machine: Machine, tmp_path: Path
) -> None:
    path = make()
    uri = share(path)
    assert uri == f"s3://shared/{tmp_path.name}/artifacts/rl/{path.name}"
    assert objects(uri) == {
        p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()
    }
    sent = faults.writes(path.name)
    assert len(sent) == 3
    assert sent[-1].endswith("/manifest.json")
    assert verify(uri) == verify(path)
    before = len(faults.writes())
    assert make() == path
    assert len(faults.writes()) == before, "what is there is not sent again"


def test_another_machine_finds_it_checked_and_once(faults: Faults, machine: Machine) -> None:
    path = make()
    uri = share(path)
    machine("second")
    got = local_path(uri)
    assert got == home() / "artifacts" / "rl" / path.name
    assert got != path
    assert verify(got) == verify(path)
    before = len([p for _, p in faults.asked if "model" in p])
    assert local_path(uri) == got
    assert len([p for _, p in faults.asked if "model" in p]) == before, "it was fetched again"
    (got / "model.safetensors").write_text("damaged")
    assert (local_path(uri) / "model.safetensors").read_text() == "weights"


def test_equal_content_has_one_manifest_whichever_machine_makes_it(machine: Machine) -> None:
    first = make(run="run-1")
    machine("second")
    second = make(run="run-2")
    assert second.name == first.name
    assert read_manifest(second).own_digest == read_manifest(first).own_digest
    assert read_manifest(share(second)).mlflow_run == "run-1"


def test_equal_content_of_another_making_goes_beside(machine: Machine) -> None:
    first = share(make("same", Parent(name="a", kind="source", digest="1" * 64)))
    machine("second")
    second = share(make("same", Parent(name="a", kind="source", digest="2" * 64)))
    assert second.startswith(first + "-")
    assert read_manifest(first).parents != read_manifest(second).parents
    machine("third")
    assert verify(local_path(second)).parents[0].digest == "2" * 64


def test_nobody_s_manifest_is_replaced(machine: Machine) -> None:
    path = make()
    uri = share(path)
    data = (path / "manifest.json").read_bytes()
    s3fs.S3FileSystem().pipe_file(f"{uri}/manifest.json", b"{}")
    with pytest.raises(StorageError, match=r"manifest\.json.* remove it, and publish again"):
        share(path)
    other = data.replace(b'"text": "weights"', b'"text": "edited"')
    s3fs.S3FileSystem().pipe_file(f"{uri}/manifest.json", other)
    with pytest.raises(StorageError, match="holds another artifact"):
        share(path)
    assert objects(uri)["manifest.json"] == other


PART = 1 << 16
PUBLISH = (
    "import sys\n"
    "from engine.storage.artifacts import publish, staging\n"
    "from engine.storage.artifacts import Draft\n"
    "from engine.storage import s3\n"
    f"s3.PARALLEL, s3.PART = 1, {PART}\n"
    "with staging('rl') as folder:\n"
    "    for number in range(6):\n"
    "        (folder / f'shard-{number}').write_bytes(bytes([number]) * 1000)\n"
    "    (folder / 'shard-9').write_bytes(bytes(s3.PART + 1))\n"
    "    publish(folder, Draft(kind='rl'))\n"
)


@pytest.mark.parametrize("seen", ["shard-2", "shard-9", "manifest.json"])
def test_killed_in_the_middle_nothing_looks_complete_and_the_next_call_ends_it(
    faults: Faults,
    machine: Machine,
    seen: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART)  # S3's is 5 MiB
    faults.pause_s = 0.2  # before each answer: what was seen has not been written yet
    first = subprocess.Popen([sys.executable, "-c", PUBLISH])
    deadline = time.monotonic() + 120
    while not faults.writes(seen):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(0.5)  # requests on their way arrive, or don't
    faults.pause_s = 0.0
    (folder,) = (home() / "artifacts" / "rl").iterdir()
    uri = shared_address(folder)
    if seen == "manifest.json":  # it was on its way: there, all is; or it is not
        arrived = objects(uri)
        if "manifest.json" in arrived:
            verify(uri)
            return
    else:
        assert set(objects(uri)) < {p.name for p in folder.iterdir()}
    machine("second")
    with pytest.raises(StorageError, match="never written whole; run again"):
        local_path(uri)
    with pytest.raises(LineageError, match=r"has no manifest\.json"):
        read_manifest(uri)
    assert main(["show", uri, "--no-registry"]) == 1
    assert main(["verify", "--no-registry"]) == 0
    assert "verified: 0 artifacts" in capsys.readouterr().err
    assert not [p for p in home().rglob("*") if p.is_file()]
    machine("first")
    whole, before = set(objects(uri)), len(faults.writes())
    assert share(folder) == uri
    sent = [path.rsplit("/", 1)[-1] for path in faults.writes()[before:]]
    assert not whole & set(sent), "what had arrived was sent again"
    assert sent[-1] == "manifest.json"
    assert verify(uri) == verify(folder)


def test_two_processes_that_publish_the_same_agree(machine: Machine, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from engine.storage.artifacts import publish, staging\n"
        "from engine.storage.artifacts import Draft, read_manifest\n"
        "time.sleep(max(0, float(sys.argv[1]) - time.time()))\n"
        "for text in map(str, range(6)):\n"
        "    with staging('sft') as folder:\n"
        "        (folder / 'a').write_text(text)\n"
        "        path = publish(folder, Draft(kind='sft', mlflow_run=sys.argv[2]))\n"
        "    print(read_manifest(path).own_digest)\n"
    )
    start = str(time.time() + 4)
    said = []
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, start, name],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HYBRIDFLYTE_HOME": str(tmp_path / name)},
        )
        for name in ("one", "two")
    ]
    for child in children:
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        said.append(out.split())
    assert len(said[0]) == 6
    assert said[0] == said[1], "two manifests for the same artifact"


def test_a_flipped_bit_in_the_bucket_is_refused_and_repaired_by_publishing(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make()
    uri = share(path)
    model = f"{uri}/model.safetensors"
    s3fs.S3FileSystem().pipe_file(model, b"weightz")
    machine("second")
    with pytest.raises(LineageError, match=r"model\.safetensors differs from the manifest"):
        local_path(uri)
    assert not [p for p in home().rglob("*") if p.is_file()]
    assert main(["verify", uri, "--no-registry"]) == 1
    assert "model.safetensors differs from the manifest" in capsys.readouterr().err
    machine("first")
    share(path)
    machine("second")
    assert verify(local_path(uri)) == verify(path)
    assert main(["verify", uri, "--no-registry"]) == 0


def test_a_busy_store_is_asked_again_and_one_that_refuses_leaves_the_local_artifact(
    faults: Faults, machine: Machine
) -> None:
    faults.part, faults.status, faults.times = "/rl/", 503, 3
    path = make()
    assert faults.refused == 3
    verify(share(path))
    faults.status, faults.times = 403, 1 << 30
    with pytest.raises(StorageError, match="can't be written: Not now; check the address"):
        make("other")
    faults.part = ""
    (other,) = (p for p in (home() / "artifacts" / "rl").iterdir() if p != path)
    assert objects(shared_address(other)) == {}
    verify(share(other))


def test_a_store_that_is_not_there_ends_in_a_sentence_in_seconds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make()
    uri = share(path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(filesystem, "QUICK", Timeouts(2, 1, 1, 3))
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"Could not connect.*check the address"):
        share(path)
    with pytest.raises((StorageError, LineageError), match="Could not connect"):
        local_path(uri)
    assert time.monotonic() - start < 20


def test_lineage_needs_the_store_alone(
    machine: Machine,
    mlflow_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A chain, and a model version of it, seen from a machine that has no artifact."""
    folder = machine("first")
    raw = folder / "raw.jsonl"
    raw.write_text("{}\n")
    source = Parent(name="raw", kind="source", digest=hash_file(raw), uri="s3://shared/raw.jsonl")
    data = make("rows", source, kind="dataset")
    above = read_manifest(data).as_parent("dataset", share(data))
    model = make("weights", above)
    shutil.copy(mlflow_store, folder / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    tracker = Tracker()
    with tracker.stage("promote") as run:
        tracker.register_model(model, "policy", run.run_id)
    tracker.set_alias("policy", "champion", "1", None)
    champion = tracker.champion("policy")
    assert champion is not None
    assert champion.tags["artifact_uri"] == share(model)
    digest = read_manifest(model).digest

    machine("second")
    assert main(["verify", "models:/policy@champion"]) == 0
    assert "verified: 3 artifacts" in capsys.readouterr().err
    assert main(["show", digest[:16]]) == 0
    out = capsys.readouterr().out
    assert f"dataset {above.digest[:12]}" in out
    assert "policy version 1" in out
    assert not home().exists()
    store = s3fs.S3FileSystem()
    store.rm(above.uri, recursive=True)
    assert main(["verify", "models:/policy@champion"]) == 1
    assert f"dataset {above.digest[:12]} is missing" in capsys.readouterr().err
