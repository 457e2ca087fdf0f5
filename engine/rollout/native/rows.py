"""Where sampled tokens are kept during a rollout, and when a row is done.

One entry or table row for each completion of the request, on the model's device; Python lists are
made once, at the end. Slots and batches are the callers' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.requests import RolloutStats
from engine.rollout.sampling import row_keys


class RowResults:
    """Tokens, log-probs and ends of all rows; row `prompt_index * n + j` is a completion.

    Index `total`, one past the rows, is a spare row: what is recorded there is dropped.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_model_len: int,
        device: torch.device,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.device, self._params, self._on_progress = device, params, on_progress
        self.total = total = len(prompts) * params.n
        self.finished = 0
        row = torch.arange(total + 1, device=device)
        self.keys = row_keys(params.seed, row // params.n, row % params.n)  # int64 [total + 1]
        lengths = torch.tensor([len(p) for p in prompts] + [0], device=device)
        self.prompt_lengths = lengths[row // params.n]  # int64 [total + 1]
        self._limit = (max_model_len - self.prompt_lengths).clamp(max=params.max_new_tokens)
        self._limit[total] = params.max_new_tokens + 1  # the spare row is never done
        self._stop = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        shape = (total + 1, params.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(total + 1, dtype=torch.long, device=device)
        self._stopped = torch.zeros(total + 1, dtype=torch.bool, device=device)

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
            self._raise_nan(int(rows[bad][0]), wrong)
        if ended:
            self._lengths[rows[done]] = column[done] + 1
            if stop is not None:
                self._stopped[rows[done]] = stop[done]
            self.finished += ended
            if self._on_progress is not None:
                self._on_progress(self.finished)
        return done

    def _raise_nan(self, row: int, count: int) -> None:
        raise RolloutError(
            f"the model gave NaN logits for {count} rows, the first being completion "
            f"{row % self._params.n} of prompt {row // self._params.n}; its weights have "
            f"diverged: go back to a checkpoint and lower the learning rate"
        )

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
