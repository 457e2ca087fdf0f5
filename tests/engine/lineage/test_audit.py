"""Every way of tampering is found, named, and told from what could not be checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lineage_store import Run, edit, make, make_run, parent

from engine.lineage.audit import Audit, audit
from engine.lineage.lookup import review
from engine.storage.artifacts import read_manifest


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def check(*references: Path | str, descendants: bool = False) -> Audit:
    names = [str(reference) for reference in references]
    return audit(review(names, registry=False, descendants=descendants))


def faults(*references: Path | str) -> list[str]:
    return [finding.text for finding in check(*references).faults]


def test_an_untouched_run_has_no_fault_and_one_note(run: Run) -> None:
    found = check(run.evaluation)
    assert found.faults == ()
    assert found.checked == 5
    (note,) = found.notes
    assert "evaluation" in note.text
    assert "no child, run or model version records its manifest's digest" in note.text


def test_what_a_child_in_the_store_recorded_counts_though_it_is_not_asked_for(run: Run) -> None:
    assert check(run.rl).notes == ()
    edit(run.rl, metrics={"reward": 1.0})
    (fault,) = faults(run.rl)
    assert "rl" in fault
    assert f"where evaluation {read_manifest(run.evaluation).digest[:12]} recorded" in fault


def test_a_poisoned_file_in_an_ancestor(run: Run) -> None:
    (run.dataset / "content.txt").write_text("poison")
    (fault,) = faults(run.evaluation)
    assert f"{run.dataset}: content.txt differs" in fault


def test_added_removed_and_linked_files(run: Run) -> None:
    (run.dataset / "more.txt").write_text("")
    (run.sft / "content.txt").unlink()
    (run.rl / "link").symlink_to(run.raw)
    found = " ".join(faults(run.evaluation))
    assert "more.txt is in the folder but not in the manifest" in found
    assert "content.txt is in the manifest but not in the folder" in found
    assert "link is a link" in found


def consistent_edit(folder: Path, **values: object) -> None:
    """An edit that keeps content digest and config digest right."""
    edit(folder, **values)
    assert read_manifest(folder)


EDITS: dict[str, Callable[[Run], object]] = {
    "parents": lambda run: edit(run.sft, parents=[]),
    "metrics": lambda run: edit(run.sft, metrics={"validation_loss": 0.1}),
    "code_version": lambda run: edit(run.sft, code_version="0" * 40),
    "created_at": lambda run: edit(run.sft, created_at="2001-01-01T00:00:00Z"),
    "mlflow_run": lambda run: edit(run.sft, mlflow_run="another"),
    "white space": lambda run: (run.sft / "manifest.json").write_text(
        (run.sft / "manifest.json").read_text() + " "
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_parents_manifest_shows_in_its_child(run: Run, name: str) -> None:
    EDITS[name](run)
    (fault,) = faults(run.rl)
    assert f"{run.sft}/manifest.json is of SHA-256" in fault
    assert f"where rl {read_manifest(run.rl).digest[:12]} recorded" in fault


def test_an_edit_with_a_recomputed_config_digest_is_found_as_well(run: Run) -> None:
    from engine.storage.artifacts import json_digest

    config = {"text": "innocent"}
    edit(run.sft, config=config, config_digest=json_digest(config))
    (fault,) = faults(run.evaluation)
    assert "recorded" in fault


def test_content_and_manifest_forged_together_are_a_missing_parent(run: Run) -> None:
    forged = make("sft", "forged")
    for name in ("content.txt", "manifest.json"):
        shutil.copy(forged / name, run.sft / name)
    (fault,) = faults(run.rl)
    assert "is missing" in fault
    assert f"where sft {read_manifest(forged).digest[:12]} is now" in fault


def test_a_child_edited_to_accept_a_forged_parent_is_found_one_further_down(run: Run) -> None:
    edit(run.sft, metrics={"validation_loss": 0.0})
    parents = json.loads((run.rl / "manifest.json").read_text())["parents"]
    parents[0]["manifest"] = read_manifest(run.sft).own_digest
    edit(run.rl, parents=parents)
    (fault,) = faults(run.evaluation)
    assert str(run.rl) in fault


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Callable[[Path], Path]:
    """The run's store, copied beside the original, which stays as it is."""
    store = shutil.copytree(run.rl.parents[1], tmp_path / "copy" / "artifacts")
    return lambda original: store / original.parent.name / original.name


def test_an_edit_in_a_copied_store_shows_though_the_original_is_whole(
    run: Run, copied: Callable[[Path], Path]
) -> None:
    assert faults(copied(run.rl)) == []
    edit(copied(run.dataset), metrics={"rows_train": 8.0})
    for asked in (run.rl, run.dataset):
        (fault,) = faults(copied(asked))
        assert f"{copied(run.dataset)}/manifest.json is of SHA-256" in fault
        assert "recorded" in fault
        assert faults(asked) == [], "the original"


def test_another_artifact_in_a_copied_store_is_not_the_parent(
    run: Run, copied: Callable[[Path], Path]
) -> None:
    forged = make("dataset", "poison")
    shutil.rmtree(copied(run.dataset))
    shutil.copytree(forged, copied(run.dataset))
    (fault,) = faults(copied(run.rl))
    assert f"is missing: it is not at {copied(run.dataset)}, where dataset" in fault


def test_missing_parents_and_changed_sources(run: Run) -> None:
    shutil.rmtree(run.sft)
    run.raw.write_text("changed")
    found = faults(run.evaluation)
    assert len(found) == 2
    assert any(f"is missing: it is not at {run.sft}" in text for text in found)
    assert any("raw.jsonl is now" in text for text in found)


def test_a_removed_source_is_a_fault_and_a_remote_one_a_note(run: Run) -> None:
    from engine.storage.artifacts import Parent

    run.raw.unlink()
    assert any("source" in text and "is missing" in text for text in faults(run.rl))
    away = Parent(name="hub", kind="source", digest="ab" * 32, uri="s3://nowhere/data")
    found = check(make("dataset", "from afar", away))
    assert found.faults == ()
    assert any("s3://nowhere/data is not on a disk" in note.text for note in found.notes)
    assert found.checked == 1


def test_descendants_are_checked_when_asked(run: Run) -> None:
    (run.evaluation / "content.txt").write_text("better than it was")
    assert check(run.sft).faults == ()
    (fault,) = check(run.sft, descendants=True).faults
    assert str(run.evaluation) in fault.text


def test_a_whole_store_is_checked_with_manifests_that_cannot_be_read(run: Run) -> None:
    assert check().faults == ()
    assert check().checked == 5
    (run.evaluation / "manifest.json").write_text("{")
    (run.dataset / "content.txt").write_text("poison")
    found = [finding.text for finding in check().faults]
    assert len(found) == 2
    assert any("can't read" in text and str(run.evaluation) in text for text in found)


def test_copies_of_equal_content_are_each_held_to_their_own_children(tmp_path: Path) -> None:
    first = make("sft", "weights", config={"lr": 1})
    second = make("sft", "weights", config={"lr": 2})
    make("rl", "one", parent("warm_start", first))
    make("rl", "two", parent("warm_start", second))
    assert faults(first, second) == []
    edit(second, metrics={"loss": 0.0})
    (fault,) = faults(second)
    assert str(second) in fault


def test_a_damaged_checkpoint_is_found(tmp_path: Path) -> None:
    from engine.checkpoint import CheckpointStore

    store = CheckpointStore(tmp_path / "ckpt")
    draft = store.begin(5)
    draft.state = {"step": 5}
    folder = Path(store.commit(draft).folder)
    assert faults(folder) == []
    (folder / "state.json").write_text((folder / "state.json").read_text().replace("5", "6"))
    (fault,) = faults(folder)
    assert "state.json differs from its checksum" in fault
