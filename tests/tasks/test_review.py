"""Review and rollback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from flytekit import FlyteContextManager

from engine.promotion.champions import Champions
from engine.storage.artifacts import Draft, Parent, publish, read_manifest, staging
from engine.storage.filesystem import home
from engine.storage.signatures import KEYS_VARIABLE, SIGNING_VARIABLE, new_key
from engine.tracking import Tracker
from tasks.host import StageError
from tasks.stages import review, rollback


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


def make(kind: str, text: str, *parents: Parent) -> Path:
    with staging(kind) as folder:
        (folder / "content.txt").write_text(text)
        return publish(folder, Draft(kind=kind, parents=parents, config={"text": text}))


@pytest.fixture
def models() -> tuple[Path, Path, Path]:
    """A dataset and two models made from it."""
    data = make("dataset", "rows")
    above = read_manifest(data).as_parent("dataset", data)
    return data, make("rl", "one", above), make("rl", "two", above)


def run(
    artifact: Path | str, against: Path | str = "", verify: bool = True, signed: bool = False
) -> str:
    """Run the task; return the page."""
    page = review(
        artifact=str(artifact),
        against=str(against),
        store="",
        verify_content=verify,
        require_signatures=signed,
    )
    return Path(page.path).read_text()


def deck() -> str:
    """What the task put into its Deck."""
    decks = FlyteContextManager.current_context().user_space_params.decks
    return next(d.html for d in reversed(decks) if d.name == "Lineage")


def test_what_no_key_that_counts_signed_fails(
    models: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StageError, match="no public key counts"):
        run(models[0], signed=True)
    monkeypatch.setenv(KEYS_VARIABLE, new_key(Path("key.pem")))
    with pytest.raises(StageError, match=r"dataset \w+ is not signed"):
        run(models[1], signed=True)
    monkeypatch.setenv(SIGNING_VARIABLE, str(Path("key.pem").absolute()))
    data = make("dataset", "rows")
    assert data != models[0], "which is not signed"
    model = make("rl", "three", read_manifest(data).as_parent("dataset", data))
    assert "Verified: 2 artifacts" in run(model, signed=True)


def test_the_page_and_the_deck_are_the_same(models: tuple[Path, Path, Path]) -> None:
    page = run(models[0])
    assert "Verified: 3 artifacts" in page
    assert page in deck()
    for model in models[1:]:
        assert read_manifest(model).digest in page


def test_two_are_compared(models: tuple[Path, Path, Path]) -> None:
    page = run(models[2], against=models[1], verify=False)
    assert "what differs" in page
    assert page.index('<code class="was">one</code>') < page.index('<code class="is">two</code>')
    assert "Not verified" in page


def test_tampering_fails_the_task_and_is_in_its_deck(models: tuple[Path, Path, Path]) -> None:
    (models[0] / "content.txt").write_text("poison")
    with pytest.raises(StageError, match=r"content\.txt differs"):
        run(models[1])
    assert "1 thing is not as recorded" in deck()
    assert run(models[1], verify=False)


def test_what_is_not_there_is_one_sentence() -> None:
    with pytest.raises(StageError, match=r"has no manifest\.json"):
        run("nothing")
    assert not (home() / "reviews").exists()


NAME = "policy"


@pytest.fixture
def champions(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Champions:
    """A model of two versions, of which the second is champion after the first."""
    shutil.copy(mlflow_store, tmp_path)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    tracker = Tracker()
    run = tracker.start_pipeline("models")
    found = Champions(tracker, NAME)
    before = None
    for text in ("one", "two"):
        with staging("rl") as folder:
            (folder / "model.safetensors").write_text(text)
            version = tracker.register_model(
                publish(folder, Draft(kind="rl", config={"text": text})), NAME, run
            )
        found.promote(version, before, text, request=text)
        before = version
    return found


def test_the_champion_before_is_restored_once_an_execution(champions: Champions) -> None:
    def attempt() -> Path:
        return Path(rollback(model_name=NAME, reason="worse in use", request="exec-1").path)

    folder = attempt()
    moved = json.loads((folder / "rollback.json").read_text())
    assert (moved["version"], moved["replaced"], moved["reason"]) == ("1", "2", "worse in use")
    tracker = champions.registry
    parents = {p.name: p.digest for p in read_manifest(folder).parents}
    assert parents == {
        name: tracker.model_version(f"models:/{NAME}/{number}").tags["artifact_digest"]
        for name, number in (("restored", "1"), ("left", "2"))
    }
    assert json.loads((attempt() / "rollback.json").read_text()) == moved
    assert len(champions.history()) == 3
    with pytest.raises(StageError, match="is the first champion"):
        rollback(model_name=NAME, reason="again")
    assert champions.history()[-1].version == "1"


def test_what_can_t_be_asked_moves_nothing(
    champions: Champions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StageError, match="reason is empty"):
        rollback(model_name=NAME, reason="")
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        with pytest.raises(StageError, match="connection refused"):
            rollback(model_name=NAME, reason="why")
    assert champions.history()[-1].version == "2"
