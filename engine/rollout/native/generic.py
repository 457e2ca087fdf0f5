"""Rollouts of any causal LM by its own forward pass: correct for all, slower than `decoder.py`.

Rows are decoded in static batches: prompts padded on the left, a group's prompt computed once, rows
dropped as they finish. A model that keeps transformers' key/value caches reuses them; one that
takes only `(input_ids, attention_mask)` is run over the whole sequence for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from engine.rollout.inference_mode import evaluating
from engine.rollout.native.rows import RowResults
from engine.rollout.protocol import SamplingParams
from engine.rollout.requests import RolloutStats
from engine.rollout.sampling import sample, uniforms


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    slots: int,
    results: RowResults,
    stats: RolloutStats,
) -> None:
    """Fill `results` with `n` completions a prompt, decoding at most `slots` rows at a time."""
    with evaluating(model):
        for rows in _batches(len(prompts), params.n, slots):
            _run_batch(model, prompts, rows, results, params, stats)


def _batches(prompts: int, n: int, slots: int) -> Iterator[range]:
    """Split rows into batches of at most `slots`, between groups wherever a group fits."""
    if n >= slots:
        for prompt in range(prompts):
            for start in range(prompt * n, (prompt + 1) * n, slots):
                yield range(start, min(start + slots, (prompt + 1) * n))
        return
    size = slots // n * n
    for start in range(0, prompts * n, size):
        yield range(start, min(start + size, prompts * n))


def _run_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    batch: range,
    results: RowResults,
    params: SamplingParams,
    stats: RolloutStats,
) -> None:
    """Decode the rows in `batch` to their ends."""
    first, last = batch.start // params.n, (batch.stop - 1) // params.n
    chosen = prompts[first : last + 1]
    device = results.device
    rows = torch.arange(batch.start, batch.stop, device=device)
    sequences = Sequences(model, chosen, device)
    logits = sequences.prefill()[rows // params.n - first]
    sequences.select(rows // params.n - first)
    stats.prefill_tokens += sum(map(len, chosen))
    count = torch.zeros_like(rows)
    while True:
        token, log_prob = sample(logits, uniforms(results.keys[rows], count), params)
        done = results.record(rows, count, token, log_prob)
        if bool(done.any()):
            keep = (~done).nonzero()[:, 0]
            if not len(keep):
                return
            rows, count, token = rows[keep], count[keep], token[keep]
            sequences.select(keep)
        count = count + 1
        logits = sequences.step(token)
        stats.decode_steps += 1


class Sequences:
    """Rows of one batch as the model sees them: ids and mask `[R, T]`, its cache if it has one."""

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], device: Any) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache = DynamicCache(config=model.config) if "past_key_values" in accepted else None  # type: ignore[arg-type]
        self._extra: dict[str, Any] = {"use_cache": True} if "use_cache" in accepted else {}
        if self._cache is None and "use_cache" in accepted:
            self._extra = {"use_cache": False}
        width = max(map(len, prompts))
        self._ids = torch.zeros(len(prompts), width, dtype=torch.long)
        self._mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self._ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
            self._mask[row, width - len(prompt) :] = 1
        self._ids, self._mask = self._ids.to(device), self._mask.to(device)

    def prefill(self) -> Tensor:
        """Run the prompts; logits `[R, V]` after the last token."""
        return self._forward(self._ids.shape[1])

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` `[R]`; logits `[R, V]` after them."""
        self._ids = torch.cat((self._ids, tokens[:, None]), dim=1)
        self._mask = torch.cat((self._mask, torch.ones_like(tokens)[:, None]), dim=1)
        return self._forward(1 if self._cache is not None else self._ids.shape[1])

    def select(self, index: Tensor) -> None:
        """Keep the rows at `index` `[K]`, repeated where it repeats."""
        self._ids, self._mask = self._ids[index], self._mask[index]
        if self._cache is not None:
            self._cache.batch_select_indices(index)

    def _forward(self, new: int) -> Tensor:
        """Run the last `new` columns and return the logits of the last one."""
        inputs = dict(self._extra)
        if self._takes_positions:
            inputs["position_ids"] = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
        if self._cache is not None:
            inputs["past_key_values"] = self._cache
        output = self._model(input_ids=self._ids[:, -new:], attention_mask=self._mask, **inputs)
        logits: Tensor = output.logits if hasattr(output, "logits") else output
        return logits[:, -1]
