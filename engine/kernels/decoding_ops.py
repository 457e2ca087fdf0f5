"""The compiled loops of decoding, `cpu/step.c`: a whole decode step, and the draw of tokens.

A step of a small model is hundreds of short operations, and launching them takes longer than
computing them. `cpu/step.c` computes what `rollout.native.llama_decoder` composes of PyTorch's
operations, over the same weights and caches, and only for sequences that still run. In other dtypes
and without the library the native engine goes on with those.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import compiled
from engine.kernels.training_ops import address, fastest_products


class LinearWeights(NamedTuple):
    """A linear's parameters: weight `[out, in]`, bias `[out]` or None."""

    weight: Tensor
    bias: Tensor | None
    unpack: Callable[[], Tensor] | None = None  # makes the matrix of a packed `weight`
    adapter: tuple[Tensor, Tensor] | None = None  # LoRA's A `[r, in]` and α/r · B `[out, r]`


class RMSNorm(NamedTuple):
    """An RMSNorm's weight `[size]` and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    input_norm: RMSNorm
    post_norm: RMSNorm
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A Llama-shaped model: its parameters and the numbers that a decode step needs."""

    layers: tuple[LayerWeights, ...]
    embedding: Tensor  # [V, hidden]
    head: LinearWeights
    norm: RMSNorm
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float  # multiplies q·k
    activation: Callable[[Tensor], Tensor]


class LiveCache(NamedTuple):
    """The keys and values of L slots; the tensors of caches end in contiguous rows."""

    completions: Tensor  # [layers, 2, slots, kv_heads, T, head_dim]
    prompts: Tensor | None = None  # [layers, 2, groups, kv_heads, P, head_dim]
    group: Tensor | None = None  # [L], int64: whose prompt a slot's sequence follows
    prompt_lengths: Tensor | None = None  # [groups], int64


@cache
def library() -> ctypes.CDLL | None:
    """Compile `cpu/step.c`; None where that can't be done or used."""
    functions = compiled("step.c", fastest_products())
    if functions is None:
        return None
    functions.decode_step.argtypes = [c_void_p, c_void_p, c_int64]
    functions.decode_step.restype = None
    functions.scratch_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    functions.scratch_bytes.restype = c_int64
    functions.sample_rows.argtypes = [
        *(c_void_p, c_int64, c_int64, c_double),  # logits, rows, size, temperature
        *(c_void_p, c_void_p, c_int64),  # keys, columns, threads
        *(c_void_p, c_void_p, c_void_p),  # sums, tokens, log-probs
    ]
    functions.sample_rows.restype = None
    return functions


_BLOCK = 256  # as in cpu/sample.h
_ROWS_OF_TWO = 1 << 18  # numbers from which more than one thread is worth waking


def draw_compiled(
    logits: Tensor, keys: Tensor, columns: Tensor, temperature: float
) -> tuple[Tensor, Tensor] | None:
    """Draw one token a row: tokens int64 `[R]` and their log-probs float32 `[R]`.

    `logits` is `[R, V]`; the noise is that of `keys` at `columns`, both int64 `[R]`. None where
    the library does not do it.
    """
    compiled_library = library() if logits.device.type == "cpu" else None
    if compiled_library is None or logits.dtype == torch.float64:
        return None
    logits = logits.float().contiguous()
    keys, columns = keys.contiguous(), columns.contiguous()
    rows, size = logits.shape
    sums = torch.empty(rows, -(-size // _BLOCK), dtype=torch.float64)
    tokens, log_probs = torch.empty_like(keys), logits.new_empty(rows)
    compiled_library.sample_rows(
        logits.data_ptr(), rows, size, temperature, keys.data_ptr(), columns.data_ptr(),
        torch.get_num_threads() if logits.numel() >= _ROWS_OF_TWO else 1,
        sums.data_ptr(), tokens.data_ptr(), log_probs.data_ptr(),
    )  # fmt: skip
    return tokens, log_probs


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
        self, library: ctypes.CDLL, weights: DecoderWeights, cos: Tensor, sin: Tensor
    ) -> None:
        """Bind weights, and `cos` and `sin` `[columns, head_dim]`, sin's first half negated."""
        w, self._library, self._columns = weights, library, len(cos)
        self._referenced = [*_tensors(w), cos, sin]  # C has their addresses
        self._layers = (_Layer * len(w.layers))(*map(_layer, w.layers))
        self._model = _Model(
            len(w.layers), w.embedding.shape[1], w.layers[0].gate.weight.shape[0],
            w.head.weight.shape[0], w.heads, w.kv_heads, w.head_dim, w.norm.eps, w.scaling,
            w.embedding.data_ptr(), w.norm.weight.data_ptr(), w.head.weight.data_ptr(),
            address(w.head.bias), cos.data_ptr(), sin.data_ptr(), self._layers,
        )  # fmt: skip
        self._parameters = sum(linear.weight.numel() for linear in _linears(w))
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._logits = w.embedding.new_empty(0, w.head.weight.shape[0], dtype=torch.float32)

    def run(self, tokens: Tensor, positions: Tensor, columns: Tensor, cache: LiveCache) -> Tensor:
        """Feed one token to each of the first L slots; return logits `[L, V]` until the next call.

        They are float32 numbers that bfloat16 holds. `tokens`, their `positions` in the sequence, 0
        for a finished one's slot, and `columns` in the completions' cache are int64 `[L]`.
        """
        rows = len(tokens)
        threads = min(torch.get_num_threads(), 1 + rows * self._parameters // _WORK_OF_A_THREAD)
        self._reserve(rows, threads)
        tokens, positions, columns = (t.contiguous() for t in (tokens, positions, columns))
        step = _Step(
            rows, threads, 2 * self._parameters <= _SHARED_BYTES,
            tokens.data_ptr(), positions.data_ptr(), columns.data_ptr(),
            address(cache.group), address(cache.prompt_lengths),
            _Cache() if cache.prompts is None else _strided(cache.prompts),
            _strided(cache.completions), self._logits.data_ptr(), self._scratch.data_ptr(),
        )  # fmt: skip
        self._library.decode_step(ctypes.byref(self._model), ctypes.byref(step), self._columns)
        return self._logits[:rows]

    def _reserve(self, rows: int, threads: int) -> None:
        """Make room for the logits of `rows` and for what is computed on the way there."""
        size = self._library.scratch_bytes(ctypes.byref(self._model), rows, self._columns, threads)
        if size > self._scratch.numel():
            self._scratch = torch.empty(size, dtype=torch.uint8)
        if rows > len(self._logits):
            self._logits = self._logits.new_empty(rows, self._logits.shape[1])


def cpu_step(weights: DecoderWeights, cos: Tensor, sin: Tensor) -> CpuStep | None:
    """Bind `weights`, or return None where `cpu/step.c` does not compute with them."""
    if weights.activation is not F.silu or weights.head_dim % 32:
        return None
    if len({norm.eps for norm in _norms(weights)}) > 1:
        return None
    if any(linear.unpack or linear.adapter for linear in _linears(weights)):
        return None
    if not all(
        t.device.type == "cpu" and t.dtype == torch.bfloat16 and t.is_contiguous()
        for t in (*_tensors(weights), cos, sin)
    ):
        return None
    compiled_library = library()
    return None if compiled_library is None else CpuStep(compiled_library, weights, cos, sin)


def _tensors(w: DecoderWeights) -> list[Tensor]:
    """List all parameters, detached."""
    tensors = [w.embedding, *(norm.weight for norm in _norms(w))]
    tensors += [t for linear in _linears(w) for t in linear[:2] if t is not None]
    return [t.detach() for t in tensors]


def _linears(w: DecoderWeights) -> list[LinearWeights]:
    return [w.head, *(getattr(layer, name) for layer in w.layers for name in _LINEARS)]


def _norms(w: DecoderWeights) -> list[RMSNorm]:
    norms = [w.norm, *(getattr(layer, name) for layer in w.layers for name in _NORMS)]
    return [norm for norm in norms if norm is not None]


def _layer(layer: LayerWeights) -> _Layer:
    linears = [getattr(layer, name) for name in _LINEARS]
    norms = [getattr(layer, name) for name in _NORMS]
    addresses = [address(tensor) for linear in linears for tensor in linear[:2]]
    return _Layer(*addresses, *(None if n is None else n.weight.data_ptr() for n in norms))


def _strided(kv: Tensor) -> _Cache:
    return _Cache(kv.data_ptr(), *kv.stride()[:5])
