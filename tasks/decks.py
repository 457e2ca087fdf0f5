"""Decks: the tabs of a task's page in Flyte's console, and small tables for them."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from flytekit import Deck
from flytekit.deck import DeckField

from engine.config import PipelineConfig, digest
from engine.redaction import redact
from tasks.context import RunContext
from tasks.profiles import Profile

# Options of a task with a Deck. Of flytekit's other tabs, sources and packages take seconds to
# make, and inputs, which the console shows anyway, are settings as they were given: with
# credentials.
DECK: dict[str, Any] = {
    "enable_deck": True,
    "deck_fields": (DeckField.TIMELINE, DeckField.OUTPUT),
}
# The same for a task whose outputs are settings.
DECK_OF_SETTINGS: dict[str, Any] = {**DECK, "deck_fields": (DeckField.TIMELINE,)}


def show_facts(tab: str, facts: Mapping[str, object]) -> None:
    """A tab with a table of two columns; numbers with four digits, no credentials."""
    Deck(tab, facts_html(facts))


def show_run(
    run: RunContext, config: PipelineConfig, data_digest: str, profile: Profile, **more: object
) -> None:
    """What a run is: settings, data, start model and machines."""
    facts = {
        "run": run.run_id,
        "settings": digest(config)[:12],
        "data": f"{config.data.source} {data_digest[:12]}",
        "start model": config.model.path or "from scratch",
        "profile": profile.name,
        "GPUs": profile.world,
        "layout": config.rl.actor.parallel.model_dump_json(exclude_defaults=True),
    }
    show_facts("Run", facts | more)


def facts_html(facts: Mapping[str, object]) -> str:
    """The table, as HTML that shows texts as they are."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_text(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f'<table cellpadding="4">{rows}</table>'


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else redact(str(value))
