"""`pyflyte run workflows/review.py review`: from a model version to its page and Deck."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flyte_runs import REPOSITORY, Place

from engine.storage.artifacts import Draft, publish, read_manifest, staging
from engine.tracking import Tracker

WORKFLOW = REPOSITORY / "workflows" / "review.py"


def make(kind: str, text: str, **draft: object) -> Path:
    with staging(kind) as folder:
        (folder / "content.txt").write_text(text)
        return publish(folder, Draft.model_validate({"kind": kind, **draft}))


def register(place: Place) -> tuple[Path, Path]:
    """Publish a dataset and a champion made from it."""
    with place.entered():
        data = make("dataset", "rows")
        model = make("rl", "weights", parents=(read_manifest(data).as_parent("dataset", data),))
        tracker = Tracker()
        with tracker.stage("rl") as stage:
            version = tracker.register_model(model, "policy", stage.run_id)
        tracker.set_alias("policy", "champion", version, None)
    return data, model


@pytest.mark.slow
def test_a_champion_is_reviewed_and_a_poisoned_one_fails(place: Place) -> None:
    data, model = register(place)
    arguments = ("run", str(WORKFLOW), "review", "--artifact", "models:/policy@champion")
    outcome = place.pyflyte(*arguments)
    assert outcome.code == 0, outcome.text
    page = Path(outcome.out.strip().splitlines()[-1]).read_text()
    assert "policy version 1" in page
    assert read_manifest(model).digest in page
    decks = [path.read_text() for path in (place.root / "tmp").rglob("deck.html")]
    assert any("policy version 1" in text for text in decks)

    (data / "content.txt").write_text("poison")
    outcome = place.pyflyte(*arguments)
    assert outcome.code == 1
    assert "content.txt differs" in outcome.error
    decks = [path.read_text() for path in (place.root / "tmp").rglob("deck.html")]
    assert any("1 thing is not as recorded" in text for text in decks)

    outcome = place.pyflyte(*arguments, "--no-verify-content")
    assert outcome.code == 0, outcome.text


def test_inputs_come_from_a_file_as_well(place: Place, tmp_path: Path) -> None:
    with place.entered():
        one, two = make("sft", "one"), make("sft", "two")
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps({"artifact": str(two), "against": str(one)}))
    outcome = place.invoke("run", str(WORKFLOW), "review", "--inputs-file", str(inputs))
    assert outcome.code == 0, outcome.text
    assert "what differs" in Path(outcome.out.strip().splitlines()[-1]).read_text()
