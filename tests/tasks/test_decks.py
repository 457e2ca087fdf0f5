"""Decks: small tables of a task's own, without markup and credentials."""

from __future__ import annotations

from flytekit.deck import DeckField

from engine.stages.stage import facts_html
from tasks.host import DECK, DECK_OF_SETTINGS
from tasks.stages import evaluate_stage, plan, trigger_retraining


def test_a_table_shows_texts_as_they_are() -> None:
    page = facts_html({"reward": 0.123456, "steps": 12, "why": "<b>5 & more</b>"})
    assert page.count("<tr>") == 3
    assert "<td>0.1235</td>" in page
    assert "<td>&lt;b&gt;5 &amp; more&lt;/b&gt;</td>" in page


def test_a_table_has_no_credentials() -> None:
    page = facts_html({"model": "s3://writer:hunter2hunter2@bucket/model"})
    assert "hunter2" not in page
    assert "bucket/model" in page


def test_no_deck_shows_settings_as_they_were_given() -> None:
    """They hold what credentials a person put into them."""
    for task in (plan, trigger_retraining):
        assert task.deck_fields == list(DECK_OF_SETTINGS["deck_fields"]) == [DeckField.TIMELINE]
    assert evaluate_stage.deck_fields == list(DECK["deck_fields"])
    assert DeckField.INPUT not in evaluate_stage.deck_fields
