"""The vocabulary head apart from its body, and what is read off its logits for each token.

From logits (`token_statistics`), or straight from hidden states a chunk of tokens at a time
(`chunked_statistics`). Logits that ranks share are for `vocab_parallel`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypedDict, TypeGuard, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from engine.algorithms.divergences import full_kl
from engine.algorithms.masked import at_least_float
from engine.errors import ConfigError
from engine.kernels import training_ops, triton_kernels
from engine.kernels.training_ops import input_gradient, linear, recurring_size, weight_gradient
from engine.storage.weight_files import MIXTURES

# Families whose logits depend on the body's outputs alone, and are what `vocabulary_head` gives.
_FAMILIES = {
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "olmo2", "smollm3", "starcoder2"),
    *MIXTURES,
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "glm4", "granite", "cohere", "cohere2"),
}

Head = Callable[[Tensor], Tensor]


def vocabulary_head(model: Any) -> Head | None:
    """Return what makes logits `[…, V]` of the body's outputs `[…, H]`; None for an unknown family.

    A scale or soft cap is part of it. `model` is a language model or its last pipeline stage; a
    head that tensor parallelism has split makes this rank's part of the logits.
    """
    config = model.config
    if config.model_type not in _FAMILIES:
        return None
    head: Head = model.get_output_embeddings()
    factor = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return head if factor == 1.0 and cap is None else partial(_changed_logits, head, factor, cap)


def require_vocabulary_head(model: Any) -> Head:
    """Return `vocabulary_head`; raise ConfigError for an unknown family."""
    head = vocabulary_head(model)
    if head is None:
        raise ConfigError(
            f"a model of type {model.config.model_type!r} can't have sequences shared by ranks: "
            "what becomes of its head's logits is not known; set sp to 1"
        )
    return head


def _changed_logits(head: Head, factor: float, cap: float | None, states: Tensor) -> Tensor:
    logits = head(states) * factor
    return logits if cap is None else torch.tanh(logits / cap) * cap


class StatisticsOptions(TypedDict, total=False):
    """What is computed of each token's distribution besides its log-prob; left out: no."""

    entropy: bool
    entropy_gradient: bool  # entropy has one; without, its graph is not kept
    sum_pi_squared: bool  # never with a gradient


class TokenStatistics(Protocol):
    """Statistics of softmax(logits / temperature) for each token, from this rank's logits.

    Takes logits `[N, V]` and targets `[N]`; returns float32 `[N]` by the names of TokenOutputs:
    `log_probs`, what the options ask for, and `full_kl` where `reference_logits [N, V]` are given,
    to which no gradient flows.
    """

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        reference_logits: Tensor | None = None,
        **options: Unpack[StatisticsOptions],
    ) -> dict[str, Tensor]: ...


def token_statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference_logits: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the statistics of logits over the whole vocabulary."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_softmax = logits.log_softmax(-1)
    out = {"log_probs": log_softmax.gather(1, targets[:, None]).squeeze(1)}
    spread = log_softmax if entropy_gradient else log_softmax.detach()
    if entropy:
        # Entries that can't be sampled (logit −inf) add 0, not NaN.
        out["entropy"] = -(spread.exp() * torch.where(spread > -torch.inf, spread, 0.0)).sum(-1)
    if sum_pi_squared:
        out["sum_pi_squared"] = spread.detach().exp().square().sum(-1)
    if reference_logits is not None:
        out["full_kl"] = full_kl(logits, reference_logits.float() / temperature)
    return out


_FEWEST_TOKENS = 256  # of a chunk, or its matrix product would be slow


def takes_chunks(head: object) -> TypeGuard[nn.Linear]:
    """Tell whether `head` is a plain linear layer: not split, quantised, adapted or with hooks."""
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return False
    weight: Tensor = head.weight
    unsharded = type(weight) is nn.Parameter and not isinstance(weight.data, DTensor)
    return unsharded and weight.is_floating_point()


def chunked_statistics(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    chunk_tokens: int = 0,
    **options: Unpack[StatisticsOptions],
) -> dict[str, Tensor]:
    """Compute statistics `[N]` of softmax(head(hidden) / temperature), as `TokenStatistics`.

    Logits [N, V] of a whole batch never exist: the backward pass computes each chunk's again,
    unless all tokens fit in one. `hidden` [N, H] predicts `targets` [N]. Logits have the head's
    dtype, or autocast's; what follows, and the sum of the weight's gradient, is float32 (float64
    for float64). `chunk_tokens`: 0 chooses by the vocabulary.
    """
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    count = hidden.shape[0]
    if kind == "cpu" and (missing := recurring_size(count) - count):
        hidden, targets = F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing))
    if not chunk_tokens:
        elements = 1 << 24 if kind == "cpu" else 1 << 26  # logits of a chunk
        if triton_kernels.takes(hidden):  # no float32 copies of them are made
            elements = 1 << 29
        chunk_tokens = max(_FEWEST_TOKENS, elements // weight.shape[0])
    request = _Request(temperature, chunk_tokens, **options)
    log_probs, entropies, squares = _Head.apply(hidden, weight, bias, targets, request)
    out = {"log_probs": log_probs}
    if request.entropy:
        out["entropy"] = entropies
    if request.sum_pi_squared:
        out["sum_pi_squared"] = squares
    return {name: value[:count] for name, value in out.items()}


@dataclass(frozen=True, slots=True)
class _Request:
    temperature: float
    chunk_tokens: int
    entropy: bool = False
    entropy_gradient: bool = False
    sum_pi_squared: bool = False


class _Head(torch.autograd.Function):
    """Head and statistics; their gradients are those in `vocab_parallel._Statistics`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        request: _Request,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = hidden.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        zeros = [hidden.new_zeros(count, dtype=wide) for _ in range(4)]
        log_probs, sums, entropies, squares = zeros
        saved: Tensor | None = None  # what the backward pass reads of a single chunk
        for at in _chunks(count, request.chunk_tokens):
            logits = _logits(hidden[at], weight, bias)
            log_probs[at], saved, *others = _statistics(logits, targets[at], request)
            for total, part in zip((sums, entropies, squares), others, strict=True):
                if part is not None:
                    total[at] = part
        if count > request.chunk_tokens:
            saved = None
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, sums, saved)
        ctx.request = request
        ctx.mark_non_differentiable(squares, *([] if request.entropy_gradient else [entropies]))
        return log_probs, entropies, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, sums, saved = ctx.saved_tensors
        request: _Request = ctx.request
        grad_log_probs, grad_entropy = (gradient.contiguous() for gradient in gradients[:2])
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        # A product of half precision can be added to a float32 sum as it is computed.
        by_product = (
            to_weight
            and hidden.dtype in (torch.bfloat16, torch.float16)
            and hidden.is_cuda
            and torch.version.cuda is not None
        )
        needed = to_hidden, to_weight and not by_product, to_bias
        wide = grad_log_probs.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if to_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for at in _chunks(hidden.shape[0], request.chunk_tokens):
                read = saved
                if read is None:
                    read = _logits(hidden[at], weight, bias)
                    if not (training_ops.takes(read) or triton_kernels.takes(read)):
                        read = _log_softmax(read, request)
                chunk = (grad_log_probs[at], entropies[at], grad_entropy[at])
                grad_logits = _logits_gradient(
                    read, targets[at], sums[at], *chunk, request, in_place=saved is None
                ).to(weight.dtype)
                if by_product and grad_weight is not None:
                    torch.addmm(
                        grad_weight, grad_logits.t(), hidden[at],
                        out_dtype=grad_weight.dtype, out=grad_weight,
                    )  # fmt: skip
                part, *others = _gradients(grad_logits, hidden[at], weight, needed)
                if grad_hidden is not None and part is not None:
                    grad_hidden[at] = part
                for total, part in zip((grad_weight, grad_bias), others, strict=True):
                    if total is not None and part is not None:
                        total += part
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if training_ops.compiles_linears(hidden, [weight], [bias]):
        [out] = training_ops.linears(hidden, [weight], [bias])
        return out
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden, weight, bias)


def _gradients(
    grad_logits: Tensor, hidden: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of hidden states, weight and bias, where they are needed."""
    to_hidden, to_weight, to_bias = needed
    if training_ops.compiles_linears(hidden, [weight], [grad_logits]):
        to_others: dict[str, Any] = {"to_weights": [to_weight], "to_biases": [to_bias]}
        grad_hidden, others = training_ops.linear_gradients(
            hidden, [weight], [grad_logits], to_x=to_hidden, **to_others
        )
        return grad_hidden, *others
    wide = torch.promote_types(grad_logits.dtype, torch.float32)
    return (
        input_gradient(grad_logits, weight) if to_hidden else None,
        weight_gradient(grad_logits, hidden) if to_weight else None,
        grad_logits.sum(0, dtype=wide) if to_bias else None,
    )


def _statistics(
    logits: Tensor, targets: Tensor, request: _Request
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return log-probs [n], what `_logits_gradient` reads, logs of sums, entropies and Σ p² [n]."""
    tokens = (logits, targets, request.temperature)
    if training_ops.takes(logits):
        log_probs, sums, entropies, squares = training_ops.head_statistics(
            *tokens, entropy=request.entropy, squares=request.sum_pi_squared
        )
        return log_probs, logits, sums, entropies, squares
    if triton_kernels.takes(logits):
        log_probs, sums, entropies, squares = triton_kernels.statistics(*tokens)
        return log_probs, logits, sums, entropies, squares
    log_p = _log_softmax(logits, request)
    entropies = squares = None
    if request.entropy or request.sum_pi_squared:
        p = log_p.exp()
        squares = p.square().sum(-1) if request.sum_pi_squared else None
        entropies = p.mul_(_finite(log_p)).sum(-1).neg_() if request.entropy else None
    return log_p.gather(1, targets[:, None]).squeeze(1), log_p, None, entropies, squares


def _logits_gradient(
    read: Tensor,
    targets: Tensor,
    sums: Tensor,
    grad_log_probs: Tensor,
    entropies: Tensor,
    grad_entropy: Tensor,
    request: _Request,
    *,
    in_place: bool,
) -> Tensor:
    """Compute gradients of logits [n, V], `in_place` over `read`, which `_statistics` returned."""
    entropy = (entropies, grad_entropy) if request.entropy_gradient else None
    numbers = targets, sums, grad_log_probs, request.temperature, entropy
    if training_ops.takes(read):
        return training_ops.head_gradients(read, *numbers)
    if triton_kernels.takes(read):
        out = read if in_place else torch.empty_like(read)
        return triton_kernels.gradients(read, *numbers, out)
    gradient, terms = read.exp(), None
    if request.entropy_gradient:
        terms = _finite(read).add_(entropies[:, None]).mul_(gradient)
    gradient.mul_(grad_log_probs[:, None])
    if terms is not None:
        gradient += terms.mul_(grad_entropy[:, None])
    gradient.neg_().scatter_add_(1, targets[:, None], grad_log_probs[:, None])
    return gradient.div_(request.temperature)


def _log_softmax(logits: Tensor, request: _Request) -> Tensor:
    """Return log softmax(logits / temperature) [n, V] in float32, or float64."""
    with torch.autocast(logits.device.type, enabled=False):
        logits = at_least_float(logits)
        if request.temperature != 1.0:
            logits.div_(request.temperature)
        return logits.log_softmax(-1)


def _finite(log_p: Tensor) -> Tensor:
    """Return `log_p` so that entries that can't be sampled (−inf) times their probability are 0."""
    return log_p.clamp_min(torch.finfo(log_p.dtype).min)


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, start + size)
