"""The vocabulary head apart from its body, and what is read off its logits for each token.

Log-prob, entropy, Σπ² and exact KL, from logits or straight from hidden states a chunk of
tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from engine.algorithms.divergences import full_kl
from engine.errors import ConfigError
from engine.kernels import training_ops, triton_kernels
from engine.kernels.training_ops import input_gradient, linear, recurring_size, weight_gradient
from engine.storage.weight_files import MIXTURES

# A language model's head apart from its body: logits of hidden states computed elsewhere.
#
# What some families do to logits after their head (a scale, a soft cap) is part of it here.

# Families whose logits depend on the body's outputs alone, and are what `vocabulary_head` gives.
_FAMILIES = {
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "olmo2", "smollm3", "starcoder2"),
    *MIXTURES,
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "glm4", "granite", "cohere", "cohere2"),
}

Head = Callable[[Tensor], Tensor]


def vocabulary_head(model: Any) -> Head | None:
    """What makes logits `[…, V]` of the body's outputs `[…, H]`; None for an unknown family.

    `model` is a language model or the last pipeline stage of one. Of a head that tensor parallelism
    has split it makes this rank's part of the logits.
    """
    config = model.config
    if config.model_type not in _FAMILIES:
        return None
    head: Head = model.get_output_embeddings()
    factor = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return head if factor == 1.0 and cap is None else _ChangedLogits(head, factor, cap)


def require_vocabulary_head(model: Any) -> Head:
    """`vocabulary_head`; raises ConfigError for an unknown family."""
    head = vocabulary_head(model)
    if head is None:
        raise ConfigError(
            f"a model of type {model.config.model_type!r} can't have sequences shared by ranks: "
            "what becomes of its head's logits is not known; set sp to 1"
        )
    return head


@dataclass(frozen=True, slots=True)
class _ChangedLogits:
    """A head whose logits are multiplied by `factor`, or kept within ± `cap` by tanh."""

    head: Head
    factor: float
    cap: float | None

    def __call__(self, states: Tensor) -> Tensor:
        logits = self.head(states) * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


# What is read off logits for each token: log-prob, entropy, Σπ² and the exact KL.
#
# The same off hidden states, without logits of a whole batch: `chunked_head`; off logits that
# ranks share: `engine.parallel.vocab_parallel`.


class TokenStatistics(Protocol):
    """Statistics of softmax(logits / temperature) for each token, from what this rank has of the
    logits.

    Takes logits `[N, V]` and targets `[N]`; returns float32 `[N]` by the names of TokenOutputs:
    `log_probs` always; `entropy` (with a gradient if `entropy_gradient`) and `sum_pi_squared`
    (never with one) where asked for; `full_kl` where `reference_logits [N, V]` are given, to which
    no gradient flows.
    """

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        reference_logits: Tensor | None = None,
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
    """The statistics of logits over the whole vocabulary."""
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


# Log-probs, entropy and Σπ² straight from hidden states: the vocabulary head, a chunk of tokens
# at a time.
#
# Logits [N, V] of a whole batch never exist, in the backward pass neither: it computes each
# chunk's again. Where all tokens fit in one chunk they are kept instead. On CUDA
# (`triton_kernels`), and in bfloat16 on the CPU (`cpu/head.h`), compiled loops read logits as
# they are. The same statistics of logits that are there: `token_statistics`.

_CPU_ELEMENTS = 1 << 24  # logits of a chunk
_DEVICE_ELEMENTS = 1 << 26
_KERNEL_ELEMENTS = 1 << 29  # where no float32 copies of them are made
_FEWEST_TOKENS = 256  # of a chunk, or its matrix product would be slow


def takes_chunks(head: object) -> TypeGuard[nn.Linear]:
    """Whether `chunked_statistics` computes what the module `head` does: a plain linear layer.

    Not one that is split over ranks, quantised, adapted, or has hooks.
    """
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return False
    weight: Tensor = head.weight
    own = type(weight) is nn.Parameter and not isinstance(weight.data, DTensor)
    return own and weight.is_floating_point()


def chunked_statistics(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    chunk_tokens: int = 0,
) -> dict[str, Tensor]:
    """Statistics `[N]` of softmax(head(hidden) / temperature), as of `TokenStatistics`.

    `hidden` [N, H] predicts `targets` [N]. Logits have the head's dtype, or autocast's; what
    follows is float32 (float64 for float64). The weight's gradient is summed over chunks in
    float32. `chunk_tokens`: 0 chooses by the vocabulary.
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
        elements = _CPU_ELEMENTS if kind == "cpu" else _DEVICE_ELEMENTS
        if triton_kernels.takes(hidden):
            elements = _KERNEL_ELEMENTS
        chunk_tokens = max(_FEWEST_TOKENS, elements // weight.shape[0])
    asked = _Asked(temperature, chunk_tokens, entropy, entropy_gradient, sum_pi_squared)
    log_probs, entropies, squares = _Head.apply(hidden, weight, bias, targets, asked)
    out = {"log_probs": log_probs}
    if entropy:
        out["entropy"] = entropies
    if sum_pi_squared:
        out["sum_pi_squared"] = squares
    return {name: value[:count] for name, value in out.items()}


@dataclass(frozen=True, slots=True)
class _Asked:
    temperature: float
    chunk_tokens: int
    entropy: bool
    entropy_gradient: bool
    sum_pi_squared: bool


class _Head(torch.autograd.Function):
    """Head and statistics. With z = logits / T, p = softmax(z) and H the entropy:

    ∂ log p_t / ∂z_v = 1[v = t] − p_v
    ∂ H / ∂z_v       = −p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        asked: _Asked,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = hidden.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs, sums, entropies, squares = (
            hidden.new_zeros(count, dtype=wide) for _ in range(4)
        )
        kept: Tensor | None = None
        for at in _chunks(count, asked.chunk_tokens):
            logits = _logits(hidden[at], weight, bias)
            log_probs[at], kept, *others = _statistics(logits, targets[at], asked)
            for whole, part in zip((sums, entropies, squares), others, strict=True):
                if part is not None:
                    whole[at] = part
        if count > asked.chunk_tokens:
            kept = None
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, sums, kept)
        ctx.asked = asked
        ctx.mark_non_differentiable(squares, *([] if asked.entropy_gradient else [entropies]))
        return log_probs, entropies, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, sums, kept = ctx.saved_tensors
        asked: _Asked = ctx.asked
        of_log_probs, of_entropy = (gradient.contiguous() for gradient in gradients[:2])
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        # Of two chunks or more, sums in float32.
        by_product = to_weight and _adds_products(hidden)
        asked_of_products = to_hidden, to_weight and not by_product, to_bias
        grad_weight = _zeros(weight, of_log_probs.dtype) if to_weight else None
        grad_bias = _zeros(bias, of_log_probs.dtype) if to_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for at in _chunks(hidden.shape[0], asked.chunk_tokens):
                read = kept
                if read is None:
                    read = _logits(hidden[at], weight, bias)
                    read = read if _is_compiled(read) else _log_softmax(read, asked)
                of_chunk = (of_log_probs[at], entropies[at], of_entropy[at])
                slope = _slope(
                    read, targets[at], sums[at], *of_chunk, asked, in_place=kept is None
                ).to(weight.dtype)
                if by_product and grad_weight is not None:
                    torch.addmm(
                        grad_weight, slope.t(), hidden[at],
                        out_dtype=grad_weight.dtype, out=grad_weight,
                    )  # fmt: skip
                of_hidden, *others = _gradients(slope, hidden[at], weight, asked_of_products)
                if grad_hidden is not None and of_hidden is not None:
                    grad_hidden[at] = of_hidden
                for whole, part in zip((grad_weight, grad_bias), others, strict=True):
                    if whole is not None and part is not None:
                        whole += part
        return (
            grad_hidden,
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if training_ops.takes_products(hidden, [weight], [bias]):
        [out] = training_ops.linears(hidden, [weight], [bias])
        return out
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden, weight, bias)


def _gradients(
    slope: Tensor, hidden: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Of hidden states, weight and bias, where they are wanted, by those of logits."""
    to_hidden, to_weight, to_bias = wanted
    if training_ops.takes_products(hidden, [weight], [slope]):
        of_hidden, others = training_ops.linear_gradients(
            hidden, [weight], [slope], to_x=to_hidden, to_weights=[to_weight], to_biases=[to_bias]
        )
        return of_hidden, *others
    return (
        input_gradient(slope, weight) if to_hidden else None,
        weight_gradient(slope, hidden) if to_weight else None,
        slope.sum(0, dtype=torch.promote_types(slope.dtype, torch.float32)) if to_bias else None,
    )


def _statistics(
    logits: Tensor, targets: Tensor, asked: _Asked
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log-probs [n]; what `_slope` reads [n, V]; and, where they are computed, [n] each: logs of
    sums of exponentials, entropies and Σ p²."""
    if training_ops.takes(logits):
        log_probs, sums, entropies, squares = training_ops.head_statistics(
            logits,
            targets,
            asked.temperature,
            entropy=asked.entropy,
            squares=asked.sum_pi_squared,
        )
        return log_probs, logits, sums, entropies, squares
    if triton_kernels.takes(logits):
        found = triton_kernels.statistics(logits, targets, asked.temperature)
        log_probs, sums, entropies, squares = found
        return log_probs, logits, sums, entropies, squares
    log_p = _log_softmax(logits, asked)
    entropies = squares = None
    if asked.entropy or asked.sum_pi_squared:
        p = log_p.exp()
        squares = p.square().sum(-1) if asked.sum_pi_squared else None
        entropies = p.mul_(_finite(log_p)).sum(-1).neg_() if asked.entropy else None
    return log_p.gather(1, targets[:, None]).squeeze(1), log_p, None, entropies, squares


def _slope(
    read: Tensor,
    targets: Tensor,
    sums: Tensor,
    of_log_probs: Tensor,
    entropies: Tensor,
    of_entropy: Tensor,
    asked: _Asked,
    *,
    in_place: bool,
) -> Tensor:
    """Gradients of logits [n, V], of what `_statistics` keeps of them.

    `in_place`: they may be written over it.
    """
    if training_ops.takes(read):
        entropy = (entropies, of_entropy) if asked.entropy_gradient else None
        return training_ops.head_gradients(
            read, targets, sums, of_log_probs, asked.temperature, entropy
        )
    if triton_kernels.takes(read):
        entropy = (entropies, of_entropy) if asked.entropy_gradient else None
        out = read if in_place else torch.empty_like(read)
        return triton_kernels.gradients(
            read, targets, sums, of_log_probs, asked.temperature, entropy, out
        )
    slope, terms = read.exp(), None
    if asked.entropy_gradient:
        terms = _finite(read).add_(entropies[:, None]).mul_(slope)
    slope.mul_(of_log_probs[:, None])
    if terms is not None:
        slope += terms.mul_(of_entropy[:, None])
    slope.neg_().scatter_add_(1, targets[:, None], of_log_probs[:, None])
    return slope.div_(asked.temperature)


def _is_compiled(logits: Tensor) -> bool:
    """Whether compiled loops read logits as they are."""
    return training_ops.takes(logits) or triton_kernels.takes(logits)


def _adds_products(hidden: Tensor) -> bool:
    """Whether a product of half precision can be added to a float32 sum as it is computed."""
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    return half and hidden.is_cuda and torch.version.cuda is not None


def _log_softmax(logits: Tensor, asked: _Asked) -> Tensor:
    """log softmax(logits / temperature) [n, V] in float32, or float64."""
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if asked.temperature != 1.0:
            logits.div_(asked.temperature)
        return logits.log_softmax(-1)


def _finite(log_p: Tensor) -> Tensor:
    """`log_p`, so that entries that can't be sampled (−inf) times their probability are 0."""
    return log_p.clamp_min(torch.finfo(log_p.dtype).min)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype)


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, start + size)
