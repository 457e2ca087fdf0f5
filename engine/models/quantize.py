"""QLoRA's base (Dettmers et al., arXiv:2305.14314): frozen matrices stored in 4 or 8 bits.

A base is read and packed a matrix at a time, so that no process has it dense. Of bitsandbytes no
layers are used: on CPU its 4-bit one rewrites its storage in evaluation mode, and its 8-bit one
rounds activations too. Here a matrix is made dense for each product and forgotten, so trainer,
rollout and saved model compute with the same numbers.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import ConfigError, first_line
from engine.storage.weight_files import WeightFiles

NF4, INT8 = "nf4", "int8"
_BLOCK, _STATISTICS_BLOCK = 64, 256  # values that share a scale, scales that share one of theirs
_LARGEST_ERROR = 0.2  # of a random matrix, relative; nf4 has 0.09


class PackedWeight(nn.Parameter):
    """Integers that stand for a matrix; a class of its own, as they can be neither cut nor cast."""


class QuantizedLinear(nn.Linear):
    """A frozen linear whose weight `[out, in]` is packed; `dense()` is what it computes with.

    nf4: 4-bit normal floats in blocks of 64, scales in 8 bits (double quantisation), 4.13 bits a
    value. int8: 8-bit integers with one float32 scale a row.
    """

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind = kind
        self.dense_dtype = linear.weight.dtype
        packed, statistics = _pack(linear.weight.detach(), kind)
        self.weight = PackedWeight(packed, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.requires_grad_(False)
        for name, tensor in statistics.items():
            self.register_buffer(name, tensor)

    def dense(self) -> Tensor:
        """Return the weight `[out, in]` in the dtype that it had, a new tensor."""
        import bitsandbytes.functional as bnb

        module: Any = self  # whose buffers are tensors
        if self.kind == INT8:
            dense = bnb.int8_vectorwise_dequant(self.weight.data, _floats(module.scales))
            return dense.to(self.dense_dtype)
        outer = bnb.QuantState(
            absmax=_floats(module.scales_of_scales),
            code=_code_of_scales(str(module.scales.device)),
            blocksize=_STATISTICS_BLOCK,
            dtype=torch.float32,
        )
        state = bnb.QuantState(
            absmax=module.scales,
            # Flat, as it was packed: of a matrix, bitsandbytes' kernel for CPUs with AVX-512 (0.50)
            # begins new blocks in each row, silently wrong where in_features is no multiple of one.
            shape=torch.Size((self.out_features * self.in_features,)),
            dtype=self.dense_dtype,
            blocksize=_BLOCK,
            quant_type=NF4,
            offset=_floats(module.mean_scale),
            state2=outer,
        )
        flat = bnb.dequantize_4bit(self.weight.data, state)
        return flat.view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


def quantize_linears(
    model: PreTrainedModel, kind: str, fill: Callable[[str, nn.Linear], None] | None = None
) -> None:
    """Replace `model`'s linears but the head, in place, by QuantizedLinear; before adapters.

    `fill(name, linear)` gives a linear of a model on the meta device its weight, which is packed
    next. Raises ConfigError where the library, the device or the model can't.
    """
    device = next(model.parameters()).device
    check_quantization(kind, "cpu" if device.type == "meta" else device)
    head = model.get_output_embeddings()
    count = 0
    for path in [path for path, _ in model.named_modules()]:  # no list that keeps what is replaced
        linear = model.get_submodule(path)
        if type(linear) is nn.Linear and linear is not head:
            if fill is not None:
                fill(path, linear)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, QuantizedLinear(linear, kind))
            count += 1
    if not count:
        raise ConfigError(
            f"model.lora.quantize={kind!r}: a {type(model).__name__} has no plain linear modules; "
            "leave it empty"
        )
    model.requires_grad_(False)


def check_quantization(kind: str, device: torch.device | str = "cpu") -> None:
    """Raise ConfigError unless bitsandbytes is here, and packs and unpacks rightly on `device`."""
    rows = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    rows *= 4.0 ** torch.arange(6)[:, None]  # a scale of another block shows
    probe = nn.Linear(96, 6, bias=False)
    probe.weight = nn.Parameter(rows)
    try:
        dense = QuantizedLinear(probe.to(device), kind).dense().cpu()
    except ImportError as error:
        raise ConfigError(
            f"model.lora.quantize={kind!r} needs bitsandbytes ({error}); install "
            "hybridflyte[qlora], or leave it empty"
        ) from error
    except RuntimeError as error:  # a device that torch, or the library, wasn't built for
        raise ConfigError(
            f"model.lora.quantize={kind!r}: bitsandbytes can't quantise on {device} "
            f"({first_line(error)}); leave it empty, or use cuda or cpu"
        ) from error
    error_share = float((dense - rows).norm() / rows.norm())
    if not error_share < _LARGEST_ERROR:
        raise ConfigError(
            f"model.lora.quantize={kind!r}: what this bitsandbytes restores on {device} is off by "
            f"{error_share:.0%} of a matrix; install another version of it, or leave it empty"
        )


def _pack(weight: Tensor, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return packed values, and the scales to unpack them with."""
    import bitsandbytes.functional as bnb

    if kind == INT8:
        values, scales, _ = bnb.int8_vectorwise_quant(weight.half())  # all that its kernel takes
        return values, {"scales": _bits(scales)}
    packed, state = bnb.quantize_4bit(
        weight.contiguous(), blocksize=_BLOCK, compress_statistics=True, quant_type=NF4
    )
    return packed, {
        "scales": state.absmax,
        "scales_of_scales": _bits(state.state2.absmax),
        "mean_scale": _bits(state.offset),
    }


@lru_cache
def _code_of_scales(device: str) -> Tensor:
    import bitsandbytes.functional as bnb

    return bnb.create_dynamic_map().to(device)


def _bits(scales: Tensor) -> Tensor:
    return scales.float().view(torch.int32)  # casting a model to bfloat16 must not round them


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


class _Product(torch.autograd.Function):
    """Compute x · Wᵀ of a packed W, unpacked again for the gradient of x, not stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: QuantizedLinear) -> Tensor:
        ctx.module, ctx.dtype = module, x.dtype
        return F.linear(x, module.dense().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return (grad @ ctx.module.dense().to(grad.dtype)).to(ctx.dtype), None


@torch.no_grad()
def load_packed(
    module: PreTrainedModel, files: WeightFiles, names: Mapping[str, str], kind: str
) -> PreTrainedModel:
    """Fill `module`, which is on the meta device, in place; linears but the head are packed.

    `names` are the files' for its parameters and persistent buffers. Raises as `quantize_linears`.
    """

    def read(name: str, tensor: Tensor) -> Tensor:
        value = torch.empty_like(tensor, device="cpu")
        files.read(names[name], (0,) * value.dim(), value)
        return value

    def fill(name: str, linear: nn.Linear) -> None:
        linear.weight = nn.Parameter(read(f"{name}.weight", linear.weight), requires_grad=False)

    quantize_linears(module, kind, fill)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # what is tied stays so
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            continue
        if id(tensor) not in made:
            value = read(name, tensor)
            weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = tensor, nn.Parameter(value, requires_grad=False) if weight else value
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, made[id(tensor)][1])
    return module
