"""A dataset's card: rows, lengths, digests, samples and what was left out, as Markdown and HTML."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.data.rows import prompt_text

CARD = "README.md"  # where the hub looks for it
SAMPLES, SHOWN_CHARACTERS, BINS, BAR = 3, 400, 12, 40


@dataclass
class SplitCard:
    """What a card says of one split. Lengths are of prompts."""

    name: str  # e.g. "train"
    unit: str  # of the lengths: "tokens" or "characters"
    lengths: array[int] = field(default_factory=lambda: array("L"))
    samples: list[str] = field(default_factory=list)  # the first rows, as JSON
    left_out: dict[str, int] = field(default_factory=dict)  # reason: rows
    digest: str = ""  # SHA-256 of the split's file

    def add(self, row: Mapping[str, Any], length: int) -> None:
        """Count a row."""
        self.lengths.append(length)
        if len(self.samples) < SAMPLES:
            self.samples.append(_sample(row))

    def leave_out(self, reason: str, rows: int = 1) -> None:
        """Count rows that the split doesn't have, e.g. of the reason "repeated"."""
        self.left_out[reason] = self.left_out.get(reason, 0) + rows


def card_markdown(
    source: str, digest: str, splits: Sequence[SplitCard], notes: Sequence[str] = ()
) -> str:
    """The card as Markdown. `digest` is the source's; `notes` are sentences for the end."""
    reasons = list(dict.fromkeys(reason for card in splits for reason in card.left_out))
    head = ["split", "rows", "least", "median", "mean", "95 %", "most", *reasons, "SHA-256"]
    units = " and ".join(dict.fromkeys(card.unit for card in splits))
    lines = [
        f"# Data: {_inline(source)}",
        "",
        f"Source digest `{digest[:16]}`. Lengths are those of prompts, in {units}; columns after "
        "them count the rows that were left out.",
        "",
        _table_row(head),
        _table_row(["---"] * len(head)),
        *(_table_row(_numbers(card, reasons)) for card in splits),
    ]
    for card in splits:
        lines += ["", f"## {card.name}", *_histogram(card), *_sample_block(card)]
    if notes:
        lines += ["", "## Left out", "", *(f"- {_inline(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def card_html(markdown: str) -> str:
    """The card as a page's body; HTML that the data contain stays text."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)


def _numbers(card: SplitCard, reasons: Sequence[str]) -> list[str]:
    lengths = np.asarray(card.lengths)
    if not len(lengths):
        cells = ["0", "", "", "", "", ""]
    else:
        median, high = np.percentile(lengths, [50, 95])
        figures = (lengths.min(), median, lengths.mean(), high, lengths.max())
        cells = [f"{len(lengths):,}", *(f"{figure:,.0f}" for figure in figures)]
    counts = [f"{card.left_out.get(reason, 0):,}" for reason in reasons]
    return [card.name, *cells, *counts, f"`{card.digest[:16]}`" if card.digest else ""]


def _histogram(card: SplitCard) -> list[str]:
    if not len(card.lengths):
        return []
    counts, edges = np.histogram(np.asarray(card.lengths), bins=BINS)
    most = max(counts)
    bars = [
        f"{edges[i]:>10,.0f} {'█' * -(-int(count) * BAR // int(most))} {count:,}".rstrip()
        for i, count in enumerate(counts)
    ]
    return ["", f"Rows by the prompt's {card.unit}, from:", "", "```", *bars, "```"]


def _sample_block(card: SplitCard) -> list[str]:
    return ["", "First rows:", *(f"\n    {sample}" for sample in card.samples)]


def _sample(row: Mapping[str, Any]) -> str:
    shown = {"prompt": prompt_text(row["prompt"])[:SHOWN_CHARACTERS]}
    for column in ("response", "chosen", "rejected", "completion"):
        if column in row:
            shown[column] = str(row[column])[:SHOWN_CHARACTERS]
    if isinstance(rule := row.get("reward_model"), Mapping):
        shown["ground_truth"] = str(rule.get("ground_truth"))[:SHOWN_CHARACTERS]
    return json.dumps(shown, ensure_ascii=False)


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _inline(text: str) -> str:
    return " ".join(text.split())
