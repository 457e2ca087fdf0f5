"""Prompts of an RL run, and completions that no step has used, as checkpoints store them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.agents.episode import PartialEpisodes
from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict
from engine.controller.timeline import span
from engine.data import cells
from engine.data.chat_template import with_template_variables
from engine.data.collate import collate_prompts
from engine.data.loader import PromptLoader
from engine.data.order import observed_rates
from engine.data.templates import encode_prompts
from engine.rollout.stream import PartialGroup, take_partial_groups, with_partial_groups


class PromptStream:
    """Encodes the rows of a loader, in batches or one by one (not both); has a `state_dict`."""

    def __init__(self, loader: PromptLoader, tokenizer: PreTrainedTokenizerBase) -> None:
        self.loader = loader
        self._tokenizer = with_template_variables(tokenizer, loader.template_variables)
        self._batch: Batch | None = None  # drawn, and not fully handed out
        self._handed_out = 0  # rows of it that `next_prompt` has returned
        self._resumed: deque[Batch] = deque()  # single prompts of a checkpoint, which come first
        self._loader_state: StateDict = {}  # before its latest draw
        self._observed: list[tuple[object, float]] = []  # prompts and pass rates since that draw

    def encode(self, rows: Sequence[dict[str, Any]]) -> Batch:
        prompts = [row["prompt"] for row in rows]
        encoded = encode_prompts(self._tokenizer, prompts, "rows of a step")
        if (truncation := self.loader.truncation) is not None:
            encoded = [truncation.cut(ids) for ids in encoded]
        return collate_prompts(rows, encoded)

    def next_batch(self) -> Batch:
        """The next batch of prompts, for a step or a DAPO refill."""
        batch, self._batch = self._batch, None
        return batch or self._draw()

    def prefetch(self) -> None:
        with span("next prompts"):
            self._batch = self._batch or self._draw()

    def next_prompt(self) -> Batch:
        """The next prompt, one row; a resumed one has its partial completions (`PARTIAL_GROUP`)."""
        if self._resumed:
            return self._resumed.popleft()
        if self._batch is None or self._handed_out == len(self._batch):
            self._batch, self._handed_out = self._draw(), 0
        self._handed_out += 1
        return self._batch.rows([self._handed_out - 1])

    @property
    def wants_rates(self) -> bool:
        return self.loader.wants_rates

    def observe(self, sampled: Batch) -> None:
        """Note the pass rates of scored groups, if the loader wants them."""
        if not self.wants_rates:
            return
        for prompt, rate in observed_rates(sampled):
            self.loader.observe(prompt, rate)
            self._observed.append((prompt, rate))

    def state_dict(self, unfinished: Sequence[Batch] = ()) -> StateDict:
        """The position in the data, and `unfinished` prompts with their partial completions."""
        drawn = [take_partial_groups(prompt) for prompt in (*unfinished, *self._resumed)]
        ahead = self._batch is not None
        return {
            "loader": self._loader_state if ahead else self.loader.state_dict(),
            "given": self._handed_out if ahead else 0,
            "observed": to_json_values(self._observed) if ahead else [],
            "again": [
                to_json_values({k: v[0] for k, v in prompt.columns.items() if k != "prompt_ids"})
                for prompt, _ in drawn
            ],
            "begun": [partial.tree() if partial is not None else None for _, [partial] in drawn],
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.loader.load_state_dict(state["loader"])
        self._batch, self._handed_out = None, int(state["given"])
        observed = [(prompt, rate) for prompt, rate in state.get("observed", [])]
        if self._handed_out or observed:
            self._batch = self._draw()
        for prompt, rate in observed:  # after the draw, so that it is the same again
            self.loader.observe(prompt, rate)
        self._observed = observed
        begun = zip(state["again"], state["begun"], strict=True)
        self._resumed = deque(self._encode_begun(row, tree) for row, tree in begun)

    def _encode_begun(self, row: dict[str, Any], tree: Any) -> Batch:
        prompt = self.encode([row])
        if not tree:
            return prompt
        kind = PartialEpisodes if "episodes" in tree else PartialGroup
        return with_partial_groups(prompt, [kind.from_tree(tree)])

    def _draw(self) -> Batch:
        self._loader_state, self._observed = self.loader.state_dict(), []
        return self.encode(self.loader.next_batch())


@dataclass(frozen=True, slots=True)
class Rollout:
    prompts: Batch
    completions: Batch  # whole groups, with the versions of the weights that sampled them

    def to_tree(self) -> StateDict:
        return {"prompts": batch_to_tree(self.prompts), "done": batch_to_tree(self.completions)}

    @staticmethod
    def from_tree(tree: StateDict) -> Rollout:
        return Rollout(batch_from_tree(tree["prompts"]), batch_from_tree(tree["done"]))


def to_json_values(value: object) -> Any:
    """`value` with arrays and tuples as lists, NumPy numbers as numbers, other types as text."""
    return json.loads(json.dumps(value, default=cells.plain))


def batch_to_tree(batch: Batch) -> StateDict:
    return {
        "tensors": {name: batch[name] for name in batch.names},
        "columns": {name: to_json_values(list(column)) for name, column in batch.columns.items()},
    }


def batch_from_tree(tree: StateDict) -> Batch:
    """Restore `batch_to_tree`; tuples and arrays in columns become lists."""
    return Batch({name: t.clone() for name, t in tree["tensors"].items()}, tree["columns"])
