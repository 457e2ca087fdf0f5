"""Where sampled tokens are kept during a rollout, and when a row is done.

One entry or table row for each completion, on the model's device; Python lists are made once, at
the end. `RowTable` records tokens; `RowResults` is the table of a whole request, `stream_rows.py`
has that of a stream. Slots and batches are the callers' business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.requests import RolloutStats
from engine.rollout.sampling import row_keys


class RowTable(ABC):
    """Tokens and log-probs by row; a subclass says what a row is and fills in the inputs.

    Index `total`, one past the rows, is a spare row: what is recorded there is dropped.
    """

    def __init__(self, total: int, params: SamplingParams, columns: int, device: torch.device):
        """Hold `total` rows of at most `columns` tokens."""
        self.device, self._params, self.total = device, params, total
        self.finished = 0  # rows done so far
        self.keys = torch.zeros(total + 1, dtype=torch.long, device=device)
        self.prompt_lengths = torch.zeros_like(self.keys)
        self._limit = torch.full_like(self.keys, columns + 1)  # the spare row is never done
        self._stop = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        self._tokens = torch.zeros((total + 1, columns), dtype=torch.long, device=device)
        self._log_probs = torch.zeros((total + 1, columns), dtype=torch.float32, device=device)

    def record(self, rows: Tensor, column: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
        """Store a token at `column` of each of `rows`, all `[R]`; return bool `[R]`, the rows done.

        Raises RolloutError if a row's log-prob is NaN.
        """
        self._tokens[rows, column] = token
        self._log_probs[rows, column] = log_prob
        real = rows < self.total
        done = column + 1 >= self._limit[rows]
        stop = None
        if len(self._stop):
            stop = token == self._stop if len(self._stop) == 1 else torch.isin(token, self._stop)
            stop &= real
            done |= stop
        bad = log_prob.isnan() & real
        ended, wrong = torch.stack((done.sum(), bad.sum())).tolist()
        if wrong:
            raise RolloutError(
                f"the model gave NaN logits for {wrong} rows, the first being "
                f"{self._name(int(rows[bad][0]))}; its weights have diverged: go back to a "
                f"checkpoint and lower the learning rate"
            )
        if ended:
            self.finished += ended
            self._end(rows[done], column[done] + 1, None if stop is None else stop[done])
        return done

    @abstractmethod
    def _name(self, row: int) -> str:
        """Say which completion `row` is."""

    @abstractmethod
    def _end(self, rows: Tensor, lengths: Tensor, stopped: Tensor | None) -> None:
        """Note that `rows` `[R]` are done, with `lengths` tokens; `stopped`: by a stop token."""


class RowResults(RowTable):
    """All rows of one request; row `prompt_index * n + j` is a completion."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_model_len: int,
        device: torch.device,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        total = len(prompts) * params.n
        super().__init__(total, params, min(params.max_new_tokens, max_model_len), device)
        self._on_progress = on_progress
        row = torch.arange(total + 1, device=device)
        prompt = params.first_prompt + row // params.n
        self.keys = row_keys(params.seed, prompt, row % params.n)  # int64 [total + 1]
        lengths = torch.tensor([len(p) for p in prompts] + [0], device=device)
        self.prompt_lengths = lengths[row // params.n]  # int64 [total + 1]
        limit = (max_model_len - self.prompt_lengths).clamp(max=params.max_new_tokens)
        self._limit[:total] = limit[:total]
        self._lengths = torch.zeros(total + 1, dtype=torch.long, device=device)
        self._stopped = torch.zeros(total + 1, dtype=torch.bool, device=device)

    def _name(self, row: int) -> str:
        return f"completion {row % self._params.n} of prompt {row // self._params.n}"

    def _end(self, rows: Tensor, lengths: Tensor, stopped: Tensor | None) -> None:
        self._lengths[rows] = lengths
        if stopped is not None:
            self._stopped[rows] = stopped
        if self._on_progress is not None:
            self._on_progress(self.finished)

    def completions(self, policy_version: int, stats: RolloutStats) -> list[Completion]:
        """Return all rows in order as lists, and count their tokens into `stats`."""
        lengths, stopped = self._lengths.tolist(), self._stopped.tolist()
        longest = max(lengths)
        tokens = self._tokens[:, :longest].tolist()
        log_probs = self._log_probs[:, :longest].tolist()
        stats.generated_tokens += sum(lengths)
        return [
            Completion(
                prompt_index=row // self._params.n,
                token_ids=tokens[row][: lengths[row]],
                log_probs=log_probs[row][: lengths[row]],
                finish_reason="stop" if stopped[row] else "length",
                policy_version=policy_version,
            )
            for row in range(self.total)
        ]
