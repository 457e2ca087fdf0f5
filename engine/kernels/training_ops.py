"""Compiled loops of training (`cpu/train.c`), and matrix products by the faster of two libraries.

In bfloat16 on CPUs that multiply it (AVX512-BF16). A training pass of a small model is limited by
operations that are short, or that go over memory once more; each of these goes over it once, a
block of rows at a time through all that follows on each other while it is in a thread's cache. Sums
and gradients of weights are float32, and results are rounded where transformers' modules round
them, or less often. Functions here have no gradient; `decoder_layer` calls them.

MKL computes float32 products on AMD processors at half of oneDNN's rate; in bfloat16 torch's own
choice is the faster one. `choices` decides by a timing that is kept.
"""

import ctypes
import logging
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from engine.kernels import choices, compiled, has_tiles
from engine.kernels.choices import Choice, choose
from engine.parallel.module_shards import local_tensor

log = logging.getLogger(__name__)

_NUMBERS_OF_TWO = 1 << 14  # from which more than one thread is worth waking


@cache
def library() -> ctypes.CDLL | None:
    """Compile `cpu/train.c`; None where that can't be done or used."""
    return _load(fastest_products())


@cache
def fastest_products() -> str:
    """Return which of `choices.INSTRUCTIONS` multiply bfloat16 fastest here.

    FMA multiplies numbers that are widened to float32 in the cache: on Intel's processors faster
    than AVX512-BF16, which multiplies 32 pairs in four cycles. AMX's tiles are faster than both.
    """
    forced = choices.forced_implementation()
    if forced in choices.INSTRUCTIONS:
        return forced if forced != "AMX" or has_tiles() else "AVX512-BF16"
    fastest = "AVX512-BF16"
    for name in ("FMA", "AMX"):
        both = {True: _load(fastest), False: _load(name) if name != "AMX" or has_tiles() else None}
        if None in both.values():
            continue
        first, second = (_time_products(both, by_first, 32) for by_first in (True, False))
        if not torch.allclose(first, second, rtol=0.05, atol=1e-3):
            log.warning("products by %s give other numbers; they are left out", name)
            continue
        run, names = partial(_time_products, both), (fastest, name)
        clock = time.thread_time
        choice = choose("mlp", 512, _TIMED_SIZES, run, names, clock=clock, measured=True)
        fastest = choice.name
    return fastest


_TIMED_SIZES = (256, 768)  # of the MLP by which instructions are chosen


@cache
def _timed_tensors(rows: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, inner = _TIMED_SIZES
    shapes = (rows, hidden), (inner, hidden), (inner, hidden), (hidden, inner)
    return [torch.randn(shape, generator=draw).mul_(0.1).bfloat16() for shape in shapes]


def _time_products(libraries: Mapping[bool, Any], first: bool, rows: int) -> Tensor:
    """Compute an MLP by one of two libraries, on this thread alone."""
    x, *matrices = _timed_tensors(rows)
    out = torch.empty_like(x)
    tensors = (x, *matrices, None, None, out, None, None, None, None, None)
    call = _mlp_call(tensors)
    call.threads = 1
    libraries[first].mlp_forward(ctypes.byref(call))
    return out


@cache
def _load(instructions: str) -> ctypes.CDLL | None:
    functions = compiled("train.c", instructions)
    if functions is None:
        return None
    p, n = c_void_p, c_int64
    functions.norm_forward.argtypes = [p, p, p, n, n, c_double, n, p, p, p]
    functions.norm_backward.argtypes = [p, p, p, p, p, n, n, n, p, p]
    functions.scatter_rows.argtypes = [p, p, n, n, n, n, p]
    functions.column_sums.argtypes = [p, n, n, n, p]
    functions.adamw.argtypes = [p, p, n, n]
    functions.rotate.argtypes = [p, p, p, n, n, n, n, n, n, p]
    functions.silu_product.argtypes = [p, p, n, n, p]
    functions.silu_product_backward.argtypes = [p, p, p, n, n, p, p, p]
    functions.head_statistics.argtypes = [p, p, n, n, c_double, n, p, p, p, p]
    functions.head_gradients.argtypes = [p, p, p, p, p, p, n, n, c_double, n, p]
    functions.packed_attention.argtypes, functions.packed_attention.restype = [p, n], n
    for name in ("mlp_forward", "mlp_backward", "linears_forward", "linears_backward"):
        function = getattr(functions, name)
        function.argtypes, function.restype = [p], n
    return functions


def takes(*tensors: Tensor) -> bool:
    """Whether the loops compute with these: bfloat16, contiguous, on the CPU, and not empty."""
    return all(
        t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.is_contiguous() and t.numel() > 0
        for t in tensors
    ) and (library() is not None)


def norm(x: Tensor, weight: Tensor, eps: float, plus: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return x [..., H] + plus, its RMSNorm, and 1 / √(mean(x²) + eps) of each row in float32."""
    total = x if plus is None else torch.empty_like(x)
    out = torch.empty_like(x)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    scale = torch.empty(rows, dtype=torch.float32)
    _library().norm_forward(
        x.data_ptr(), address(plus), weight.data_ptr(), rows, width, eps,
        torch.get_num_threads(), total.data_ptr(), out.data_ptr(), scale.data_ptr(),
    )  # fmt: skip
    return total, out, scale


def norm_gradients(
    x: Tensor, weight: Tensor, scale: Tensor, grad_output: Tensor, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, added to `plus`, and of the weight, in float32."""
    grad_x, width, threads = torch.empty_like(x), x.shape[-1], torch.get_num_threads()
    shares = torch.empty(threads, width, dtype=torch.float32)
    _library().norm_backward(
        x.data_ptr(), weight.data_ptr(), scale.data_ptr(), grad_output.data_ptr(), address(plus),
        len(scale), width, threads, grad_x.data_ptr(), shares.data_ptr(),
    )  # fmt: skip
    return grad_x, shares.sum(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotary positions of x [B, L, heads, d] by cos and sin [B or 1, L, 1, d]."""
    out, (heads, d) = torch.empty_like(x), x.shape[2:]
    rows, period = x.shape[0] * x.shape[1], cos.numel() // d
    _library().rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, d, period, back,
        torch.get_num_threads(), out.data_ptr(),
    )  # fmt: skip
    return out


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    out = torch.empty_like(gate)
    _library().silu_product(
        gate.data_ptr(), up.data_ptr(), gate.numel(), torch.get_num_threads(), out.data_ptr()
    )
    return out


def silu_product_gradients(
    gate: Tensor, up: Tensor, grad_output: Tensor, *, product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate, of up (over `grad_output`); with `product` silu(gate) · up."""
    grad_gate = torch.empty_like(gate)
    products = torch.empty_like(gate) if product else None
    _library().silu_product_backward(
        gate.data_ptr(), up.data_ptr(), grad_output.data_ptr(), gate.numel(),
        torch.get_num_threads(), grad_gate.data_ptr(), grad_output.data_ptr(), address(products),
    )  # fmt: skip
    return grad_gate, grad_output, products


def scatter_rows(x: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Write rows of x [N, W] at `index` [N] (long, all different) of [T, W] that is 0 elsewhere."""
    out = x.new_empty(tokens, x.shape[1])
    _library().scatter_rows(
        x.data_ptr(), index.data_ptr(), *x.shape, tokens, torch.get_num_threads(), out.data_ptr()
    )
    return out


def column_sums(x: Tensor) -> Tensor:
    """Sum over the rows of x [R, W], to [W], in float32 where the loops compute it."""
    if not takes(x):
        return x.sum(0)
    threads = torch.get_num_threads()
    shares = torch.empty(threads, x.shape[1], dtype=torch.float32)
    _library().column_sums(x.data_ptr(), *x.shape, threads, shares.data_ptr())
    return shares.sum(0)


def head_statistics(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool, squares: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return statistics of softmax(logits [N, V] / temperature), float32 [N] each.

    Log-probs of `targets` [N], logs of sums of exponentials, entropies if `entropy`, Σ p² if
    `squares`.
    """
    rows, size = logits.shape
    log_probs, sums = (torch.empty(rows, dtype=torch.float32) for _ in range(2))
    entropies, sums_of_squares = (
        torch.empty_like(sums) if needed else None for needed in (entropy, squares)
    )
    _library().head_statistics(
        logits.data_ptr(), targets.data_ptr(), rows, size, 1 / temperature,
        torch.get_num_threads(), log_probs.data_ptr(), sums.data_ptr(),
        address(entropies), address(sums_of_squares),
    )  # fmt: skip
    return log_probs, sums, entropies, sums_of_squares


def head_gradients(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    grad_log_probs: Tensor,
    temperature: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the gradients of logits [N, V] by those of log-probs.

    `entropy` has entropies and their gradients; all contiguous float32 [N].
    """
    (entropies, grad_entropy), out = entropy or (None, None), torch.empty_like(logits)
    _library().head_gradients(
        logits.data_ptr(), targets.data_ptr(), sums.data_ptr(), grad_log_probs.data_ptr(),
        address(entropies), address(grad_entropy), *logits.shape, 1 / temperature,
        torch.get_num_threads(), out.data_ptr(),
    )  # fmt: skip
    return out


class AdamSettings(ctypes.Structure):
    """The settings of a step of AdamW: `factor` is of the gradients, corrections 1 − beta^step."""

    _names = ("factor", "rate", "beta1", "beta2", "eps", "decay", "correction1", "correction2")
    _fields_ = [(name, c_double) for name in _names]


class _Trained(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("gradient", "master", "m", "v", "working")),
        ("count", c_int64),
    ]


def adamw(settings: AdamSettings, tensors: Sequence[tuple[Tensor, ...]]) -> None:
    """Update float32 masters, their moments, and their bfloat16 weights, by a step of AdamW.

    `tensors`: (gradient, master, m, v, working) of each, all contiguous.
    """
    records = (_Trained * len(tensors))()
    for index, parts in enumerate(tensors):
        records[index] = _Trained(*(part.data_ptr() for part in parts), parts[0].numel())
    count = sum(gradient.numel() for gradient, *_ in tensors)
    threads = torch.get_num_threads() if count >= _NUMBERS_OF_TWO else 1
    _library().adamw(ctypes.byref(settings), records, len(records), threads)


def _library() -> ctypes.CDLL:
    functions = library()
    assert functions is not None  # `takes` was asked
    return functions


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


STEP = 16  # widths of inputs are multiples of it; those of outputs that are rotated, too
_LARGEST = 1 << 26  # elements of a matrix; the threads' sums of its gradient are float32

_MLP = (
    *("x", "gate", "up", "down", "gated", "raised", "out", "grad_output"),
    *("grad_gate", "grad_up", "grad_down", "residual"),
)
_AFFINE = ("weight", "bias", "out", "grad_output", "grad_weight", "grad_bias")


class _Mlp(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in _MLP),
        *((name, c_int64) for name in ("rows", "hidden", "inner", "threads")),
    ]


class _Affine(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in _AFFINE), ("width", c_int64), ("rotated", c_int64)]


class _Linears(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "grad_x", "parts", "cos", "sin")),
        *((name, c_int64) for name in ("count", "rows", "in", "threads", "period", "d")),
    ]


class Rotary(NamedTuple):
    """The cos and sin [B or 1, L, 1, d] of positions, and how many outputs are rotated."""

    cos: Tensor
    sin: Tensor
    outputs: int


def takes_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
) -> bool:
    """Whether `linears`, `mlp` and their gradients compute with these."""
    tensors = [bias for bias in biases if bias is not None]
    fit = all(w.shape[1] % STEP == 0 and w.numel() <= _LARGEST for w in weights)
    return fit and takes(x, *weights, *tensors)


def choose_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
) -> Choice | None:
    """Choose between `linears` with its gradients and the library; None: `linears` can't."""
    if not takes_products(x, weights, biases):
        return None
    sizes = (x.shape[-1], *(len(weight) for weight in weights))
    return choose("linears", x.numel() // x.shape[-1], sizes, partial(_run_linears, weights))


def compiles_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
) -> bool:
    """Whether `linears` and its gradients compute with these, and faster than the library."""
    choice = choose_linears(x, weights, biases)
    return choice is not None and choice.is_compiled


def _run_linears(weights: Sequence[Tensor], by_loops: bool, rows: int) -> object:
    """Compute the layers and all their gradients, to be timed."""
    x = weights[0].new_full((rows, weights[0].shape[1]), 0.5)
    if by_loops:
        outs = linears(x, weights, [None] * len(weights))
        needed = [True] * len(weights)
        return linear_gradients(
            x, weights, outs, to_x=True, to_weights=needed, to_biases=[False] * len(weights)
        )
    grad_x: Tensor | None = None
    for weight in weights:
        out = linear(x, weight)
        grad_x = input_gradient(out, weight, grad_x)
        weight_gradient(out, x)
    return grad_x


def choose_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor | None = None
) -> Choice | None:
    """Choose between `mlp` with its gradients and the library; None: `mlp` can't."""
    if not takes_products(x, [gate, up, down], [residual]):
        return None
    rows, sizes = x.numel() // x.shape[-1], (x.shape[-1], len(gate))
    return choose("mlp", rows, sizes, partial(_run_mlp, gate, up, down))


def _run_mlp(gate: Tensor, up: Tensor, down: Tensor, by_loops: bool, rows: int) -> object:
    """Compute the MLP and all its gradients, to be timed."""
    x = gate.new_full((rows, gate.shape[1]), 0.5)
    if by_loops:
        out, *kept = mlp(x, gate, up, down, keep=True)
        matrices, activations = [gate, up, down], [each for each in kept if each is not None]
        return mlp_gradients(matrices, x, activations, out, to_x=True, to_weights=True)
    gated, raised = linear(x, gate), linear(x, up)
    out = linear(silu_product(gated, raised), down)
    grad_product = input_gradient(out, down)
    grad_gated, grad_raised, product = silu_product_gradients(
        gated, raised, grad_product, product=True
    )
    assert product is not None
    weight_gradient(out, product)
    weight_gradient(grad_gated, x)
    weight_gradient(grad_raised, x)
    return input_gradient(grad_raised, up, input_gradient(grad_gated, gate))


def mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor | None = None, *, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return residual + down(silu(gate(x)) · up(x)) of rows x [n, H]; to `keep`: gate(x), up(x)."""
    out = torch.empty_like(x)
    gated, raised = (x.new_empty(len(x), len(gate)) if keep else None for _ in range(2))
    tensors = (x, gate, up, down, gated, raised, out, None, None, None, None, residual)
    _call("mlp_forward", _mlp_call(tensors))
    return out, gated, raised


def mlp_gradients(
    matrices: Sequence[Tensor],
    x: Tensor,
    activations: Sequence[Tensor],
    grad_output: Tensor,
    *,
    to_x: bool,
    to_weights: bool,
) -> list[Tensor | None]:
    """Return gradients of x and, in float32, three matrices; `activations` are gate(x), up(x)."""
    grad_x = torch.empty_like(x) if to_x else None
    gradients = [torch.empty_like(m, dtype=torch.float32) if to_weights else None for m in matrices]
    tensors = [x, *matrices, *activations, grad_x, grad_output, *gradients, None]
    _call("mlp_backward", _mlp_call(tensors))
    return [grad_x, *gradients]


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rotary: Rotary | None = None,
) -> tuple[Tensor, ...]:
    """Apply linear layers to rows x [n, in]; the first outputs get rotary positions."""
    outs = tuple(x.new_empty(len(x), len(weight)) for weight in weights)
    parts = [
        {"weight": weight, "bias": bias, "out": out}
        for weight, bias, out in zip(weights, biases, outs, strict=True)
    ]
    call, _parts = _linears_call(x, None, parts, rotary)
    _call("linears_forward", call)
    return outs


def linear_gradients(
    x: Tensor,
    weights: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    *,
    to_x: bool,
    to_weights: Sequence[bool],
    to_biases: Sequence[bool],
    rotary: Rotary | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of x and, in float32, of each weight and bias in turn."""
    grad_x = torch.empty_like(x) if to_x else None
    parts: list[dict[str, Tensor | None]] = []
    for weight, grad_out, weight_needed, bias_needed in zip(
        weights, grad_outputs, to_weights, to_biases, strict=True
    ):
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if weight_needed else None
        grad_bias = weight.new_empty(len(weight), dtype=torch.float32) if bias_needed else None
        given = {"weight": weight, "grad_output": grad_out}
        parts.append({**given, "grad_weight": grad_weight, "grad_bias": grad_bias})
    call, _parts = _linears_call(x, grad_x, parts, rotary)
    _call("linears_backward", call)
    return grad_x, [part[name] for part in parts for name in ("grad_weight", "grad_bias")]


def _mlp_call(tensors: Sequence[Tensor | None]) -> _Mlp:
    x, gate, *_ = tensors
    assert x is not None
    assert gate is not None
    return _Mlp(*map(address, tensors), *x.shape, len(gate), torch.get_num_threads())


def _linears_call(
    x: Tensor,
    grad_x: Tensor | None,
    parts: Sequence[dict[str, Tensor | None]],
    rotary: Rotary | None,
) -> tuple[_Linears, object]:
    """Build the call's arguments, and the object that must live as long as they do."""
    affines = (_Affine * len(parts))()
    for index, (part, affine) in enumerate(zip(parts, affines, strict=True)):
        for name, tensor in part.items():
            setattr(affine, name, address(tensor))
        affine.width = len(part["weight"])  # type: ignore[arg-type]
        affine.rotated = rotary is not None and index < rotary.outputs
    cos, sin, d = (None, None, 1) if rotary is None else (*rotary[:2], rotary.cos.shape[-1])
    return _Linears(
        address(x), address(grad_x), ctypes.addressof(affines), address(cos), address(sin),
        len(affines), *x.shape, torch.get_num_threads(), 1 if cos is None else cos.numel() // d, d,
    ), affines  # fmt: skip


def _call(name: str, argument: ctypes.Structure) -> None:
    if not getattr(_library(), name)(ctypes.byref(argument)):
        raise MemoryError("no memory for a layer: give micro-batches fewer tokens")


_LARGEST_STEP = 8  # log2 of what is between two sizes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] · weightᵀ [in, out] + bias [out]."""
    if _by_onednn(x, weight):
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` by oneDNN, on weights that are not packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def input_gradient(grad_output: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return grad_output [n, out] · weight [out, in] + plus [n, in]; it may write over `plus`."""
    if not _by_onednn(grad_output, weight):
        return grad_output @ weight if plus is None else plus.addmm_(grad_output, weight)
    if plus is None:
        return linear(grad_output, weight.t())
    binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary
    return binary(grad_output, plus, weight.t(), None, "add")


def weight_gradient(grad_output: Tensor, x: Tensor) -> Tensor:
    """Return grad_outputᵀ [out, n] · x [n, in]."""
    return linear(grad_output.t(), x.t())


def recurring_size(count: int) -> int:
    """Round `count` up by a few per cent, so that sizes that vary come again and again.

    oneDNN compiles a kernel for each new shape of a product: a millisecond, and up to a megabyte.
    """
    step = 1 << min(_LARGEST_STEP, max(4, count.bit_length() - 5))
    return -(-count // step) * step


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    both_float32 = left.dtype == right.dtype == torch.float32
    return both_float32 and left.device.type == "cpu" and left.numel() > 0 and mkl_is_slow()


def mkl_is_slow() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL, which PyTorch chooses."""
    if not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not _mkl_is_fast(torch.get_num_threads())


@cache
def _mkl_is_fast(threads: int) -> bool:
    def run(by_mkl: bool, rows: int) -> Tensor:
        x, weight = torch.ones(rows, 512), torch.ones(512, 512)
        return F.linear(x, weight) if by_mkl else onednn_linear(x, weight, None)

    return choose("float32", 512, (512, 512), run, ("MKL", "oneDNN")).name == "MKL"


@dataclass(frozen=True, slots=True)
class RowsRead:
    """The tokens of a packed sequence that are read; the others' outputs are left out."""

    index: Tensor  # [N] long; behind the first `count`, all of them different, any
    count: int

    @classmethod
    def at(cls, index: Tensor) -> Self:
        """Read the tokens at `index` [n], all different, and more up to a `recurring_size`."""
        missing = recurring_size(len(index)) - len(index)
        return cls(F.pad(index, (0, missing)), len(index))

    def of(self, x: Tensor) -> Tensor:
        """Take these rows of x [1, T, H]: [1, N, H]."""
        return _TakeRows.apply(x, self)

    def scatter(self, grad_output: Tensor, tokens: int) -> Tensor:
        """Return the gradients [T, H] of all tokens, from those [N, H] of the tokens read."""
        index, grad_output = self.index[: self.count], grad_output[: self.count]
        if takes(grad_output):
            return scatter_rows(grad_output, index, tokens)
        out = grad_output.new_zeros(tokens, grad_output.shape[1])
        return out.index_copy_(0, index, grad_output)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, read: RowsRead) -> Tensor:
        ctx.read, ctx.tokens = read, x.shape[1]
        return x[0].index_select(0, read.index)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.read.scatter(gradients[0][0], ctx.tokens)[None], None


class CompiledAdamW(torch.optim.AdamW):
    """Updates masters and, with them, the bfloat16 parameters that they are masters of."""

    def __init__(
        self,
        groups: Sequence[dict[str, object]],
        working: Mapping[Tensor, nn.Parameter],
        **options: Any,
    ) -> None:
        """Update the masters in `groups`; `working` has the parameter of each (`takes_masters`)."""
        super().__init__(groups, **options)
        self._working = working
        self.factor = 1.0  # of the next step's gradients

    @torch.no_grad()
    def step(self, closure: object = None) -> Any:
        """Update every master that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        by_step = defaultdict[float, list[tuple[Tensor, ...]]](list)
        masters, gradients, m, v, steps = (list[Tensor]() for _ in range(5))
        self._init_group(group, masters, gradients, m, v, [], steps)
        for master, gradient, *moments, step in zip(masters, gradients, m, v, steps, strict=True):
            step += 1
            working = local_tensor(self._working[master])
            updated = (gradient.float().contiguous(), master, *moments, working)
            by_step[float(step)].append(updated)
        beta1, beta2 = group["betas"]
        for count, tensors in by_step.items():
            settings = AdamSettings(
                self.factor, group["lr"], beta1, beta2, group["eps"], group["weight_decay"],
                1 - beta1**count, 1 - beta2**count,
            )  # fmt: skip
            adamw(settings, tensors)
        increment_version([self._working[master] for master in masters])


def takes_masters(working: Mapping[Tensor, nn.Parameter], count: int) -> bool:
    """Whether all `count` trained tensors are masters that the compiled pass can update."""
    return (
        len(working) == count
        and all(m.device.type == "cpu" and m.is_contiguous() for m in working)
        and all(p.numel() == 0 or takes(local_tensor(p)) for p in working.values())
        and library() is not None
    )
