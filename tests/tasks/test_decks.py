"""Decks: small tables of a task, and one that is published while its task runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.deck import DeckField
from flytekit.models.core.identifier import WorkflowExecutionIdentifier

from engine.stages.stage import facts_html
from tasks import host
from tasks.host import DECK, DECK_OF_SETTINGS, LiveDeck
from tasks.stages import evaluate_stage, plan, trigger_retraining

# Decks: small tables of a task's own, without markup and credentials.


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


# A Deck that is published while its task runs, from another thread.


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    """The output folder of a task that runs on a cluster, in a context of its own."""
    context = FlyteContextManager.current_context()
    pod = context.user_space_params.builder()
    pod.execution_id = WorkflowExecutionIdentifier("hybridflyte", "production", "f1a2b3")
    pod.output_metadata_prefix = str(tmp_path)
    pod.enable_deck = True
    pod.decks = []
    mode = ExecutionState.Mode.TASK_EXECUTION
    state = context.new_execution_state().with_params(mode=mode, user_space_params=pod.build())
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield tmp_path


def show(deck: LiveDeck, page: str) -> None:
    """From a thread, as the engine's writer does."""
    thread = threading.Thread(target=deck.show, args=(page,))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_the_page_can_be_read_while_the_task_runs(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir)
    before = sorted(sandbox.rglob("*"))
    deck = LiveDeck("Rollouts")
    show(deck, "<p>step 1</p>")
    file = outputs / "deck.html"
    assert "<p>step 1</p>" in file.read_text()
    show(deck, "<p>step 2</p>")
    assert "step 2" not in file.read_text(), "not yet: once a minute is enough"
    monkeypatch.setattr(host, "PUBLISH_SECONDS", 0.0)
    deck._due = 0.0
    show(deck, "<p>step 3</p>")
    assert "<p>step 3</p>" in file.read_text()
    assert file.read_text().count(">Rollouts<") == 1
    assert sorted(sandbox.rglob("*")) == before, "no copies are left"


def test_at_home_the_deck_is_written_once_at_the_end(tmp_path: Path) -> None:
    decks = FlyteContextManager.current_context().user_space_params.decks
    try:
        deck = LiveDeck("Rollouts")
        show(deck, "<p>step 1</p>")
        assert decks[-1] is deck
        assert deck.html == "<p>step 1</p>"
        assert deck._due == 0.0, "nothing was published"
    finally:
        decks.remove(deck)
