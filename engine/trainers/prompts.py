"""The prompts of an RL run, in batches or one by one, ahead of time and again after a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.batch import Batch
from engine.controller.timeline import span
from engine.data.collate import collate_prompts
from engine.data.loader import PromptLoader
from engine.data.templates import encode_prompt
from engine.rollout.partial_groups import PartialGroup, take_partial_groups, with_partial_groups
from engine.trainers.queue_state import plain


class PromptStream:
    """Encodes what a loader gives. Its state says where a resumed run goes on.

    Use it by batches or one by one, not both.
    """

    def __init__(self, loader: PromptLoader, tokenizer: PreTrainedTokenizerBase) -> None:
        self.loader, self._tokenizer = loader, tokenizer
        self._ahead: Batch | None = None  # drawn and not handed out, or not wholly
        self._given = 0  # of its rows, one by one
        self._again: deque[Batch] = deque()  # single prompts that come before all others
        self._mark: dict[str, Any] = {}  # the loader before its latest draw

    def encode(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """The batch of prompts that a rollout starts from."""
        return collate_prompts(rows, [encode_prompt(self._tokenizer, r["prompt"]) for r in rows])

    def next_batch(self) -> Batch:
        """The prompts of the next step, or of a refill."""
        ahead, self._ahead = self._ahead, None
        return ahead or self._draw()

    def prefetch(self) -> None:
        """Prepare the next batch, while workers are busy."""
        with span("next prompts"):
            self._ahead = self._ahead or self._draw()

    def next_one(self) -> Batch:
        """The next prompt alone; with its partial group, if it was under way."""
        if self._again:
            return self._again.popleft()
        if self._ahead is None or self._given == len(self._ahead):
            self._ahead, self._given = self._draw(), 0
        self._given += 1
        return self._ahead.rows([self._given - 1])

    def state_dict(self, again: Sequence[Batch] = ()) -> dict[str, Any]:
        """Where to go on: tensors and plain values.

        `again` are single prompts that were handed out and led to no whole group yet, with what is
        there of their completions.
        """
        drawn = [take_partial_groups(prompt) for prompt in (*again, *self._again)]
        return {
            "loader": self.loader.state_dict() if self._ahead is None else self._mark,
            "given": self._given if self._ahead is not None else 0,
            "again": [_row(prompt) for prompt, _ in drawn],
            "begun": [begun.tree() if begun is not None else None for _, [begun] in drawn],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.loader.load_state_dict(state["loader"])
        self._ahead, self._given = None, int(state["given"])
        if self._given:
            self._ahead = self._draw()
        self._again = deque(
            with_partial_groups(self.encode([row]), [PartialGroup.from_tree(tree)])
            if tree
            else self.encode([row])
            for row, tree in zip(state["again"], state["begun"], strict=True)
        )

    def _draw(self) -> Batch:
        self._mark = self.loader.state_dict()
        return self.encode(self.loader.next_batch())


def _row(prompt: Batch) -> dict[str, Any]:
    """The data row that a batch of one prompt was made of, as plain values."""
    columns = {k: v[0] for k, v in prompt.columns.items() if k not in ("prompt_ids",)}
    row: dict[str, Any] = plain(columns)
    return row
