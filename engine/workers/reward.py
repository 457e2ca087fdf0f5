"""The reward role: turns completions into scores with the function that the run was given."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.config import RewardConfig
from engine.data.templates import decode_response
from engine.data.tokenizer import load_tokenizer
from engine.rewards import has_format, resolve_reward, score
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch


class RewardWorker(Worker):
    """Scores completions on CPU; holds a tokenizer and no weights."""

    def __init__(self, context: WorkerContext, *, model_path: str, config: RewardConfig) -> None:
        super().__init__(context)
        self.config = config
        self.function = resolve_reward(config.name)
        self.tokenizer = load_tokenizer(model_path)

    @dispatch(Dispatch.DATA_PARALLEL)
    def score(self, batch: Batch) -> Batch:
        """`token_level_scores [B, R]` with the score on each completion's last token.

        Columns added: `completion` (text) and `has_format` (it ends in an answer line).
        """
        mask = batch["response_mask"]
        lengths = mask.sum(1).long()
        rows = batch["responses"].tolist()
        texts = [
            decode_response(self.tokenizer, ids[:length])
            for ids, length in zip(rows, lengths.tolist(), strict=True)
        ]
        prompts = [message[-1]["content"] for message in batch.columns["prompt"]]
        columns = {k: list(v) for k, v in batch.columns.items() if k != "prompt"}
        scores = score(self.function, prompts, texts, columns, self.config.timeout_s)
        out = torch.zeros_like(mask)
        out[torch.arange(len(scores)), (lengths - 1).clamp(min=0)] = torch.tensor(scores)
        return Batch(
            {"token_level_scores": out},
            {"completion": texts, "has_format": [has_format(text) for text in texts]},
        )
