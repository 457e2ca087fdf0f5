"""The compiled loops of decoding, `cpu/step.c`: a whole decode step, and the draw of tokens.

In other dtypes and without the library the native engine goes on with PyTorch's operations.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import compiled
from engine.rollout.native.decoding_weights import LayerWeights, LlamaWeights, RMSNorm
from engine.rollout.native.kv_cache import LiveCache
from engine.rollout.protocol import SamplingParams
from engine.rollout.sampling import sample, uniforms

# The compiled loops of decoding, `cpu/step.c`: see `engine.compiled`.


@cache
def library() -> ctypes.CDLL | None:
    """`cpu/step.c`, compiled; None where that can't be done or used."""
    found = compiled(Path(__file__).parent / "cpu" / "step.c")
    if found is None:
        return None
    found.decode_step.argtypes = [c_void_p, c_void_p, c_int64]
    found.decode_step.restype = None
    found.scratch_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    found.scratch_bytes.restype = c_int64
    found.sample_rows.argtypes = [
        *(c_void_p, c_int64, c_int64, c_double),  # logits, rows, size, temperature
        *(c_void_p, c_void_p, c_int64),  # keys, columns, threads
        *(c_void_p, c_void_p, c_void_p),  # sums, tokens, log-probs
    ]
    found.sample_rows.restype = None
    return found


# Drawing tokens from logits: by the compiled library where there is one, else by `sampling.py`.

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


# A whole decode step in one call, on CPUs that multiply bfloat16 (AVX512-BF16).
#
# A step of a small model is hundreds of short operations, and launching them takes longer than
# computing them. `cpu/step.c` computes what `LlamaDecoder` composes of PyTorch's operations, over
# the
# same weights and caches, and only for sequences that still run. In other dtypes, and without the
# library (`cpu_library.py`), the decoder goes on with those.

_SHARED_BYTES = 24 << 20  # of weights that stay in the cores' common cache
_WORK_OF_A_THREAD = 10_000_000  # multiplications, about 50 µs


def _pointers(*names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, type[c_int64]]]:
    return [(name, c_int64) for name in names]


_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")


class _Layer(ctypes.Structure):
    _fields_ = _pointers(*(f"{name}{part}" for name in _LINEARS for part in ("", "_bias")), *_NORMS)


class _Model(ctypes.Structure):
    _fields_ = [
        *_integers("layer_count", "hidden", "inner", "vocabulary", "heads", "kv_heads", "head_dim"),
        ("eps", c_double),
        ("scaling", c_double),
        *_pointers("embedding", "norm", "head", "head_bias", "cos", "sin"),
        ("layers", POINTER(_Layer)),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("data", c_void_p), *_integers("layer", "kind", "slot", "head", "column")]


class _Step(ctypes.Structure):
    _fields_ = [
        *_integers("rows", "threads", "by_rows"),
        *_pointers("tokens", "positions", "columns", "group", "prompt_lengths"),
        ("prompts", _Cache),
        ("completions", _Cache),
        *_pointers("logits", "scratch"),
    ]


class CpuStep:
    """Decode steps over bound weights; see `cpu_step`, which makes it."""

    def __init__(
        self, library: ctypes.CDLL, weights: LlamaWeights, cos: Tensor, sin: Tensor
    ) -> None:
        """`cos` and `sin` are `[columns, head_dim]`, `sin` with the first half's sign turned."""
        w, self._library, self._columns = weights, library, len(cos)
        self._kept = [*_tensors(w), cos, sin]  # C has their addresses
        self._layers = (_Layer * len(w.layers))(*map(_layer, w.layers))
        self._model = _Model(
            len(w.layers),
            w.embedding.shape[1],
            w.layers[0].gate.weight.shape[0],
            w.head.weight.shape[0],
            w.heads,
            w.kv_heads,
            w.head_dim,
            w.norm.eps,
            w.scaling,
            w.embedding.data_ptr(),
            w.norm.weight.data_ptr(),
            w.head.weight.data_ptr(),
            _address(w.head.bias),
            cos.data_ptr(),
            sin.data_ptr(),
            self._layers,
        )
        matrices = [w.head.weight, *(getattr(x, n).weight for x in w.layers for n in _LINEARS)]
        self._parameters = sum(matrix.numel() for matrix in matrices)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._logits = w.embedding.new_empty(0, w.head.weight.shape[0], dtype=torch.float32)

    def run(self, tokens: Tensor, positions: Tensor, columns: Tensor, cache: LiveCache) -> Tensor:
        """Feed one token to each of the first L slots: logits `[L, V]`, float32 numbers that
        bfloat16 holds, to be read before the next call.

        `tokens`, their `positions` in the sequence, 0 for a finished one's slot, and `columns` in
        the completions' cache are int64 `[L]`.
        """
        rows = len(tokens)
        threads = min(torch.get_num_threads(), 1 + rows * self._parameters // _WORK_OF_A_THREAD)
        self._reserve(rows, threads)
        tokens, positions, columns = (t.contiguous() for t in (tokens, positions, columns))
        step = _Step(
            rows,
            threads,
            2 * self._parameters <= _SHARED_BYTES,
            tokens.data_ptr(),
            positions.data_ptr(),
            columns.data_ptr(),
            _address(cache.group),
            _address(cache.prompt_lengths),
            _Cache() if cache.prompts is None else _strided(cache.prompts),
            _strided(cache.completions),
            self._logits.data_ptr(),
            self._scratch.data_ptr(),
        )
        self._library.decode_step(ctypes.byref(self._model), ctypes.byref(step), self._columns)
        return self._logits[:rows]

    def _reserve(self, rows: int, threads: int) -> None:
        """Make room for the logits of `rows` and for what is computed on the way there."""
        size = self._library.scratch_bytes(ctypes.byref(self._model), rows, self._columns, threads)
        if size > self._scratch.numel():
            self._scratch = torch.empty(size, dtype=torch.uint8)
        if rows > len(self._logits):
            self._logits = self._logits.new_empty(rows, self._logits.shape[1])


def cpu_step(weights: LlamaWeights, cos: Tensor, sin: Tensor) -> CpuStep | None:
    """Steps over `weights`, or None where `cpu/step.c` does not compute them."""
    if weights.tp is not None or weights.activation is not F.silu or weights.head_dim % 32:
        return None
    if len({norm.eps for norm in _norms(weights)}) > 1:
        return None
    every = [*_tensors(weights), cos, sin]
    if any(t.device.type != "cpu" or t.dtype != torch.bfloat16 for t in every):
        return None
    if not all(t.is_contiguous() for t in every):
        return None
    found = library()
    return None if found is None else CpuStep(found, weights, cos, sin)


def _tensors(w: LlamaWeights) -> list[Tensor]:
    """All parameters."""
    linears = [w.head, *(getattr(layer, name) for layer in w.layers for name in _LINEARS)]
    found = [w.embedding, *(norm.weight for norm in _norms(w))]
    found += [t for linear in linears for t in linear if t is not None]
    return [t.detach() for t in found]


def _norms(w: LlamaWeights) -> list[RMSNorm]:
    found = [w.norm, *(getattr(layer, name) for layer in w.layers for name in _NORMS)]
    return [norm for norm in found if norm is not None]


def _layer(layer: LayerWeights) -> _Layer:
    linears = [getattr(layer, name) for name in _LINEARS]
    norms = [getattr(layer, name) for name in _NORMS]
    addresses = [_address(tensor) for linear in linears for tensor in linear]
    return _Layer(*addresses, *(None if n is None else n.weight.data_ptr() for n in norms))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strided(kv: Tensor) -> _Cache:
    return _Cache(kv.data_ptr(), *kv.stride()[:5])
