"""A promotion that waits for a person: asked only when nothing but consent is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flyte_runs import Outcome, Place, settings

from engine.tracking import Tracker

REQUIRED = {"promote": {"approval": "required"}}
HARDER = {"rl": {"trainer": {"total_training_steps": 2}}, "promote": {"minimum_gain": 0.9}}
NAME = "hybridflyte-policy"


@pytest.fixture(scope="module")
def asked(new_place: Callable[[], Place]) -> tuple[Place, Outcome]:
    """A run whose first model waits for consent, and gets it."""
    place = new_place()
    return place, place.run("--config", settings(REQUIRED), answers="y\n")


def champion(place: Place, name: str = NAME) -> str | None:
    found = Tracker(place.tracking_uri).champion(name)
    return found.version if found else None


def test_with_consent_it_is_promoted(asked: tuple[Place, Outcome]) -> None:
    place, outcome = asked
    assert outcome.code == 0, outcome.text
    assert f"make {NAME} version 1 the champion in place of version none" in outcome.out
    assert outcome.stages[-2:] == ["promotion", "promotion"]
    assert outcome.summary["promotion"]["promoted"]
    assert champion(place) == "1"


def test_nobody_is_asked_where_another_rule_fails(asked: tuple[Place, Outcome]) -> None:
    place, _ = asked
    outcome = place.run("--config", settings(REQUIRED, HARDER))
    assert outcome.code == 0, outcome.text
    assert "Approval Gate" not in outcome.text
    assert outcome.stages[-1] == "promotion"
    assert not outcome.summary["promotion"]["promoted"]
    assert champion(place) == "1"


def test_without_consent_nothing_moves(asked: tuple[Place, Outcome]) -> None:
    place, _ = asked
    other = {"promote": {"model_name": "not-approved"}}
    outcome = place.run("--config", settings(REQUIRED, other), answers="n\n")
    assert outcome.code != 0
    assert "did not approve" in outcome.text
    assert champion(place, "not-approved") is None
