"""A promotion that waits for a person: asked only when nothing but consent is missing."""

from __future__ import annotations

from typing import Any

from flyte_runs import NO_WARM_START, ONE_STEP, REQUIRED, Asked, Outcome, Place, settings

from engine.tracking import Tracker

NAME = "hybridflyte-policy"


def run_again(asked: Asked, answers: str = "", **rules: Any) -> Outcome:
    """The same run with other rules, of which only the promotion is not cached."""
    config = settings(ONE_STEP, NO_WARM_START, REQUIRED, {"promote": rules})
    outcome = asked.place.run("--model", str(asked.start), "--config", config, answers=answers)
    assert outcome.stages == ["promotion"], outcome.text
    return outcome


def champion(place: Place, name: str = NAME) -> str | None:
    found = Tracker(place.tracking_uri).champion(name)
    return found.version if found else None


def test_with_consent_it_is_promoted(asked: Asked) -> None:
    outcome = asked.outcome
    assert outcome.code == 0, outcome.text
    assert f"make {NAME} version 1 the champion in place of version none" in outcome.out
    assert outcome.stages[-2:] == ["promotion", "promotion"]
    assert outcome.summary["promotion"]["promoted"]
    assert champion(asked.place) == "1"


def test_nobody_is_asked_where_another_rule_fails(asked: Asked) -> None:
    outcome = run_again(asked, model_name="no-better", bootstrap=False)
    assert outcome.code == 0, outcome.text
    assert "Approval Gate" not in outcome.text
    assert not outcome.summary["promotion"]["promoted"]
    assert champion(asked.place, "no-better") is None


def test_without_consent_nothing_moves(asked: Asked) -> None:
    outcome = run_again(asked, answers="n\n", model_name="not-approved")
    assert outcome.code != 0
    assert "did not approve" in outcome.text
    assert champion(asked.place, "not-approved") is None
