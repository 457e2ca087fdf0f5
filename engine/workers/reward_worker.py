"""The reward role: turns completions into scores with the function that the run was given."""

import torch
from torch import Tensor

from engine.algorithms.shaping import last_turn, on_last_token, weigh_components
from engine.batch import Batch, Column
from engine.config import RewardConfig
from engine.data.rows import answered_messages
from engine.data.templates import turn_text
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
    "lenient_correct",
    "reward_error_cause",
    "reward_component_names",
)


class RewardWorker(Worker):
    """Scores completions on CPU; ConfigError for weights of components that there are not."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: RewardConfig,
        plugins: tuple[str, ...] = (),
    ) -> None:
        super().__init__(context)
        self.config = config
        self.scorer = Scorer(config, plugins)
        self.tokenizer = load_tokenizer(model_path)

    @dispatch(Dispatch.DATA_PARALLEL, writes=_WRITES)
    def score(self, batch: Batch) -> Batch:
        """Score the rows; raise RewardError where none of them can be scored.

        Tensors: `token_level_scores [B, R]` float32, the weighted sum of the components on each
        completion's last sampled token, and what an episode's environment gave on those of its
        turns; `reward_components [B, K]` float32 where there are any, NaN where one doesn't apply
        to a row; `reward_error [B]` bool, true
        where the reward failed (its scores are then 0); `reward_failed [B]` bool, true for rows
        that must not be learned from, which is all of them with on_error=drop.

        Columns: `completion` (text), `reward_correct`, `lenient_correct` (as
        `Scorer.leniently_right`), `has_format` (where the reward knows a format),
        `reward_error_cause` ("" or raised, deadline, malformed, not_finite, not_applicable,
        crashed) and, with components, `reward_component_names` (the K names in order, in each row).
        """
        return self._score(batch, whole=True)

    @dispatch(Dispatch.DATA_PARALLEL, writes=_WRITES)
    def score_part(self, batch: Batch) -> Batch:
        """As `score`, of some rows of a batch: no error where all of them fail."""
        return self._score(batch, whole=False)

    def close(self) -> None:
        self.scorer.close()

    def _score(self, batch: Batch, whole: bool) -> Batch:
        texts = self._completions(batch)
        others = {name: list(values) for name, values in batch.columns.items() if name != "prompt"}
        messages = [list(answered_messages(prompt)) for prompt in batch.columns["prompt"]]
        scores = self.scorer.score(
            [prompt[-1]["content"] for prompt in messages], texts, {"messages": messages, **others}
        )
        if whole:
            scores.raise_if_none()
        sources, failures = (
            list(batch.columns.get("data_source", [""] * len(batch))),
            scores.failures,
        )
        truths = list(batch.columns.get("ground_truth", [None] * len(batch)))
        columns: dict[str, Column] = {
            "completion": texts,
            "reward_correct": self.scorer.correct(scores, sources),
            "lenient_correct": self.scorer.leniently_right(texts, sources, truths),
            "reward_error_cause": [
                failures[row].cause if row in failures else "" for row in range(len(batch))
            ],
        }
        well_formed = self.scorer.well_formed(texts, sources)
        if well_formed is not None:
            columns["has_format"] = well_formed
        if scores.components:
            columns["reward_component_names"] = [scores.components] * len(batch)
        return Batch(self._tensors(scores, batch), columns)

    def _completions(self, batch: Batch) -> list[str]:
        """The text of each completion, or last turn, with what its prompt has opened of it."""
        texts, start = [], batch["input_ids"].shape[1] - batch["responses"].shape[1]
        turns = last_turn(batch["response_mask"])
        for ids, present, turn in zip(
            batch["input_ids"], batch["attention_mask"].bool(), turns, strict=True
        ):
            begin = start + int(turn.long().argmax())
            before = ids[:begin][present[:begin]].tolist()
            texts.append(turn_text(self.tokenizer, before, ids[start:][turn].tolist()))
        return texts

    def _tensors(self, scores: Scores, batch: Batch) -> dict[str, Tensor]:
        names, mask = scores.components, batch["response_mask"]
        # Nothing is known of the columns before the first result.
        weights = [] if names is None else self.scorer.weights(names)
        table = torch.tensor(scores.rows, dtype=torch.float32).reshape(len(mask), len(weights))
        error = torch.tensor([row in scores.failures for row in range(len(mask))], dtype=torch.bool)
        dropped = error.clone() if self.config.on_error == "drop" else torch.zeros_like(error)
        if (failed := batch.get("episode_failed")) is not None:
            error, dropped = error | failed, dropped | failed
        tensors = {
            "token_level_scores": self._token_scores(weigh_components(table, weights), batch),
            "reward_error": error,
            "reward_failed": dropped,
        }
        return tensors | ({"reward_components": table} if names else {})

    def _token_scores(self, total: Tensor, batch: Batch) -> Tensor:
        """Scores `[B]` on the last tokens, `[B, R]`, and what environments gave on turns."""
        mask, by_turn = batch["response_mask"], batch.get("environment_rewards")
        if by_turn is None:
            return on_last_token(total, mask)
        if self.config.name == ENVIRONMENT:  # the sum of `by_turn`, over all rows of an episode
            total = total - torch.tensor(batch.columns["episode_reward"].astype(float)).to(total)
        if (continues := batch.get("continues")) is not None:
            total = total.masked_fill(continues, 0.0)
        return on_last_token(total, mask) + by_turn
