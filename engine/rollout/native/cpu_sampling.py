"""Drawing tokens from logits: by the compiled library where there is one, else by `sampling.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.rollout.native.cpu_library import library
from engine.rollout.protocol import SamplingParams
from engine.rollout.sampling import sample, uniforms

_BLOCK = 256  # as in cpu/sample.h
_ROWS_OF_TWO = 1 << 18  # numbers from which more than one thread is worth waking


def draw(
    logits: Tensor, keys: Tensor, columns: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: tokens int64 `[R]` and their log-probs float32 `[R]`.

    `logits` is `[R, V]`; the noise is that of `keys` at `columns`, both int64 `[R]`. What
    `sampling.sample` returns, but for tokens within rounding of another one's share of [0, 1).
    """
    found = None if _is_cut(params, logits.shape[1]) or logits.device.type != "cpu" else library()
    if found is None or logits.dtype == torch.float64:
        return sample(logits, uniforms(keys, columns), params)
    logits = logits.float().contiguous()
    keys, columns = keys.contiguous(), columns.contiguous()
    rows, size = logits.shape
    sums = torch.empty(rows, -(-size // _BLOCK), dtype=torch.float64)
    tokens, log_probs = torch.empty_like(keys), logits.new_empty(rows)
    found.sample_rows(
        logits.data_ptr(),
        rows,
        size,
        params.temperature,
        keys.data_ptr(),
        columns.data_ptr(),
        torch.get_num_threads() if logits.numel() >= _ROWS_OF_TWO else 1,
        sums.data_ptr(),
        tokens.data_ptr(),
        log_probs.data_ptr(),
    )
    return tokens, log_probs


def _is_cut(params: SamplingParams, vocabulary: int) -> bool:
    """Whether tokens are drawn from the most likely ones only."""
    return params.temperature > 0 and (0 < params.top_k < vocabulary or params.top_p < 1)
