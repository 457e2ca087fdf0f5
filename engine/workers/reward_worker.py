"""The reward role: turns completions into scores with the function that the run was given.

The functions themselves are in `engine.rewards`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.algorithms.shaping import last_turn, on_last_token, weigh_components
from engine.batch import Batch, Column
from engine.config import RewardConfig
from engine.data.templates import decode_response
from engine.data.tokenizer import load_tokenizer
from engine.rewards import Scorer, Scores
from engine.rewards.answers import ENVIRONMENT
from engine.workers.role import Dispatch, Worker, WorkerContext, dispatch

_WRITES = (
    "token_level_scores",
    "reward_components",
    "reward_error",
    "reward_failed",
    "completion",
    "has_format",
    "reward_correct",
    "reward_error_cause",
    "reward_component_names",
)


def reward_columns(columns: Mapping[str, Column]) -> dict[str, list[object]]:
    """The columns that rewards get: those of the batch, and prompts as `messages`."""
    others = {name: list(values) for name, values in columns.items() if name != "prompt"}
    return {"messages": list(columns["prompt"]), **others}


class RewardWorker(Worker):
    """Scores completions on CPU; holds a tokenizer and no weights.

    Raises ConfigError for weights of components that the reward is known not to have.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: RewardConfig,
        plugins: tuple[str, ...] = (),
    ) -> None:
        """`plugins` are the modules that may register the reward."""
        super().__init__(context)
        self.config = config
        self.scorer = Scorer(config, plugins)
        self.tokenizer = load_tokenizer(model_path)

    @dispatch(Dispatch.DATA_PARALLEL, writes=_WRITES)
    def score(self, batch: Batch) -> Batch:
        """Score the rows; raise RewardError where none of them can be scored.

        Tensors added: `token_level_scores [B, R]` float32, the weighted sum of the components on
        each completion's last sampled token, and what an episode's environment gave on those of its
        turns; `reward_components [B, K]` float32 where there are any;
        `reward_error [B]` bool, true where the reward failed (its scores are then 0); and
        `reward_failed [B]` bool, true for those rows that must not be learned from, which is all
        of them with on_error=drop.

        Columns added: `completion` (text), `reward_correct` (right or not), `has_format` (whether
        it keeps the format, where the reward knows one), `reward_error_cause` ("" or one of raised,
        deadline, malformed, not_finite, crashed) and, with components, `reward_component_names`
        (the K names in order, the same in each row).
        """
        return self._score(batch, whole=True)

    @dispatch(Dispatch.DATA_PARALLEL, writes=_WRITES)
    def score_part(self, batch: Batch) -> Batch:
        """Score some rows of a batch; parts that are concatenated equal the whole.

        As `score`, but no error where all of them fail, since other parts may have scores: look
        at `reward_error` when they are together.
        """
        return self._score(batch, whole=False)

    def close(self) -> None:
        """End the reward's process and what it left behind."""
        self.scorer.close()

    def _score(self, batch: Batch, whole: bool) -> Batch:
        texts = self._completions(batch)
        scores = self.scorer.score(
            [message[-1]["content"] for message in batch.columns["prompt"]],
            texts,
            reward_columns(batch.columns),
        )
        if whole:
            scores.raise_if_none()
        sources = list(batch.columns.get("data_source", [""] * len(batch)))
        columns: dict[str, Column] = {
            "completion": texts,
            "reward_correct": self.scorer.correct(scores, sources),
            "reward_error_cause": [
                scores.failures[row].cause if row in scores.failures else ""
                for row in range(len(batch))
            ],
        }
        well_formed = self.scorer.well_formed(texts, sources)
        if well_formed is not None:
            columns["has_format"] = well_formed
        if scores.components:
            columns["reward_component_names"] = [scores.components] * len(batch)
        return Batch(self._tensors(scores, batch), columns)

    def _completions(self, batch: Batch) -> list[str]:
        """The text of each completion; of an episode, of its last turn."""
        turns = last_turn(batch["response_mask"])
        rows = batch["responses"]
        return [
            decode_response(self.tokenizer, ids[own].tolist())
            for ids, own in zip(rows, turns, strict=True)
        ]

    def _tensors(self, scores: Scores, batch: Batch) -> dict[str, Tensor]:
        names, mask = scores.components, batch["response_mask"]
        weights: list[float] = []  # nothing is known of the columns before the first result
        if names is not None:
            weights = self.scorer.weights(names)
        table = torch.tensor(scores.rows, dtype=torch.float32).reshape(len(mask), len(weights))
        error = torch.tensor([row in scores.failures for row in range(len(mask))], dtype=torch.bool)
        dropped = error.clone() if self.config.on_error == "drop" else torch.zeros_like(error)
        total = weigh_components(table, weights)
        if (failed := batch.get("episode_failed")) is not None:
            error, dropped = error | failed, dropped | failed
        tensors = {
            "token_level_scores": self._token_scores(total, batch),
            "reward_error": error,
            "reward_failed": dropped,
        }
        return tensors | ({"reward_components": table} if names else {})

    def _token_scores(self, total: Tensor, batch: Batch) -> Tensor:
        """Completions' scores `[B]` on their tokens, `[B, R]`, with what environments gave by turn.

        An episode of several rows has its score on the last of them.
        """
        mask, given = batch["response_mask"], batch.get("environment_rewards")
        if given is None:
            return on_last_token(total, mask)
        if self.config.name == ENVIRONMENT:  # the sum of `given`, over all rows of an episode
            sums = torch.tensor(batch.columns["episode_reward"].astype(float), dtype=total.dtype)
            total = total - sums
        if (continues := batch.get("continues")) is not None:
            total = total.masked_fill(continues, 0.0)
        return on_last_token(total, mask) + given
