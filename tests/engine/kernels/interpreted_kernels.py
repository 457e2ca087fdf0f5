"""Cases of `test_triton_kernels`: python interpreted_kernels.py NAME …, with TRITON_INTERPRET=1.

The interpreter cuts float32 off where a GPU rounds it to bfloat16.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from tiny_engine import tiny_model
from torch import Tensor, nn
from triton.runtime import interpreter

from engine.kernels import triton_kernels
from engine.models import fused, vocabulary_head
from engine.models.vocabulary_head import chunked_statistics
from engine.parallel.fsdp import checkpoint_activations
from engine.rollout.native.decoding_weights import RMSNorm, bind
from engine.rollout.native.llama_decoder import LlamaDecoder, _rms_norm
from engine.rollout.sampling import _invert_blocks, _sample_uncut

DTYPES = (torch.float32, torch.bfloat16)


def close(result: Tensor, expected: Tensor, tolerance: float) -> None:
    """No NaN, and a relative distance of at most `tolerance`."""
    expected = expected.double()
    distance = (result.double() - expected).norm() / expected.norm().clamp_min(1e-12)
    assert distance <= tolerance, float(distance)


def statistics() -> None:
    """Off logits among which some tokens can't be sampled, a whole block of them too.

    The entropy is a sum of 9,001 float32 products, whose order and rounding depend on the CPU.
    """
    for dtype in DTYPES:
        logits = torch.randn(4, 9001).mul(4).to(dtype)
        logits[1, 3], logits[2, :5000] = -torch.inf, -torch.inf
        targets = torch.tensor([4, 9000, 8000, 0])
        log_probs, sums, entropies, squares = triton_kernels.statistics(logits, targets, 0.7)
        scaled = logits.double() / 0.7
        expected_logs = scaled.log_softmax(-1)
        probs = expected_logs.exp()
        close(log_probs, expected_logs.gather(1, targets[:, None])[:, 0], 1e-5)
        close(entropies, -(probs * expected_logs.clamp_min(-1e9)).sum(-1), 1e-4)
        close(squares, probs.square().sum(-1), 1e-5)
        close(sums, scaled.logsumexp(-1), 1e-6)


def head() -> None:
    """Outputs and gradients in one chunk and in several, against torch's operations."""
    takes = triton_kernels.takes
    for dtype, tolerance in zip(DTYPES, (1e-4, 1e-2), strict=True):
        linear = nn.Linear(24, 5003, bias=True).to(dtype)
        hidden, targets = torch.randn(10, 24, dtype=dtype), torch.randint(0, 5003, (10,))
        above = torch.randn(2, 10)

        def run(kernels: bool, chunk: int, linear: Any = linear, hidden: Tensor = hidden,
                targets: Tensor = targets, above: Tensor = above) -> list[Tensor]:  # fmt: skip
            triton_kernels.takes = takes if kernels else lambda tensor: False
            linear.zero_grad()
            states = hidden.clone().requires_grad_()
            asked = {"entropy": True, "entropy_gradient": True, "sum_pi_squared": True}
            out = chunked_statistics(linear, states, targets, 0.7, chunk_tokens=chunk, **asked)
            loss = (out["log_probs"] * above[0]).sum() + (out["entropy"] * above[1]).sum()
            loss.backward()
            assert states.grad is not None
            return [*out.values(), states.grad, linear.weight.grad, linear.bias.grad]

        for chunk in (4, 16):
            vocabulary_head.training_ops.takes = lambda *tensors: False  # torch's operations
            for found, wanted in zip(run(True, chunk), run(False, chunk), strict=True):
                close(found, wanted, tolerance)
    triton_kernels.takes = takes


def add_norm() -> None:
    for dtype, tolerance in zip(DTYPES, (1e-6, 1e-2), strict=True):
        x, plus = torch.randn(2, 3, 5, 40, dtype=dtype)
        weight = torch.randn(40, dtype=dtype)
        total, normed = triton_kernels.add_norm(x, plus, weight, 1e-6)
        close(total, x + plus, tolerance)
        close(normed, _rms_norm(x + plus, RMSNorm(weight, 1e-6)), tolerance)
        close(triton_kernels.add_norm(x, None, weight, 1e-6)[1],
              _rms_norm(x, RMSNorm(weight, 1e-6)), tolerance)  # fmt: skip


def rotate_and_store() -> None:
    """Into the columns of its slots, and nowhere else."""
    for dtype in DTYPES:
        q, k, v = (torch.randn(3, heads, 12, dtype=dtype) for heads in (4, 2, 2))
        angle = torch.randn(9, 6).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        signed = torch.cat((-sin[:, :6], sin[:, 6:]), 1)
        positions, columns = torch.tensor([0, 8, 4]), torch.tensor([2, 0, 1])
        storage = torch.full((2, 5, 2, 7, 12), 7.0, dtype=dtype)  # [2, slots, kv_heads, T, d]
        wanted = storage.clone()

        def rotated(x: Tensor, cos: Tensor = cos, signed: Tensor = signed,
                    positions: Tensor = positions) -> Tensor:  # fmt: skip
            return (x * cos[positions][:, None]).addcmul_(x.roll(6, -1), signed[positions][:, None])

        wanted[0, [0, 1, 2], :, columns] = rotated(k)
        wanted[1, [0, 1, 2], :, columns] = v
        expected = rotated(q)
        found = triton_kernels.rotate_and_store(
            q, k, v, (cos, signed), positions, (storage[0], storage[1]), columns
        )
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        close(found, expected, tolerance)
        close(storage, wanted, tolerance)
        assert (storage == 7.0).equal(wanted == 7.0)


def silu_product() -> None:
    for dtype, tolerance in zip(DTYPES, (1e-6, 1e-2), strict=True):
        gate, up = torch.randn(2, 7, 300, dtype=dtype)
        wanted = F.silu(gate).mul_(up)
        close(triton_kernels.silu_product(gate, up), wanted, tolerance)


def decoder() -> None:
    """Steps of a decoder, with a cache of whole sequences and with shared prompts."""
    for family in ("llama", "qwen2"):
        weights = bind(tiny_model(family))
        for n in (1, 2):
            found = []
            for fuses in (False, True):
                with torch.inference_mode():
                    one = LlamaDecoder(weights, 2, n, 5, 6)
                    one._fuses, one._cpu_step = fuses, None
                    prefilled = one.prefill([[5, 6, 7, 8, 9], [5, 6, 9]][: 3 - n])
                    which = torch.zeros(2, dtype=torch.long) if n == 2 else torch.arange(2)
                    slots = torch.arange(2)
                    one.insert(prefilled, which, slots, torch.zeros(0, dtype=torch.long))
                    lengths = prefilled.lengths[which]
                    for column in range(3):
                        tokens = torch.tensor([7 + column, 11])
                        columns = torch.full((2,), column)
                        found.append(one.decode(tokens, lengths + column, columns).clone())
            for plain, fused_step in zip(found[:3], found[3:], strict=True):
                close(fused_step, plain, 1e-5)


def sampling() -> None:
    noise = torch.rand(64)
    for dtype in DTYPES:
        logits = torch.randn(64, 5003).mul(3).to(dtype)
        logits[3, :4500], logits[5, 7] = -torch.inf, torch.nan
        found, log_probs = _sample_uncut(logits, noise, 0.7)
        probs = (logits.float() / 0.7).softmax(-1)
        index, wanted = _invert_blocks(probs, noise)
        assert log_probs[5].isnan()
        rows = torch.arange(64) != 5
        assert (found == index[:, 0])[rows].float().mean() > 0.96  # but for rounding
        same = (found == index[:, 0]) & rows
        close(log_probs[same], wanted[same], 1e-4)
        assert (probs[rows].gather(1, found[rows, None]) > 0).all()


@triton.jit
def rsqrt(x):
    """The library's own is not there to interpret."""
    return 1.0 / tl.sqrt(x)


def liger() -> None:
    """Computes in float32: the interpreter's bfloat16 is not a GPU's."""
    import liger_kernel.ops.rms_norm as rms

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:  # the compiler passes them as tensors
        if not isinstance(argument, float):
            return convert(argument)
        value = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(value, tl.float32)

    interpreter._implicit_cvt, rms.rsqrt = with_floats, rsqrt
    for family in ("llama", "qwen2"):
        model = tiny_model(family)
        ids = torch.randint(0, 16, (2, 7))

        def run(model: Any = model, ids: Tensor = ids) -> list[Tensor]:
            model.zero_grad()
            logits = model(ids, use_cache=False).logits
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
            return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

        plain = run()
        for part in fused._parts(list(model.model.layers), model.model):
            fused._fuse(part, torch.device("cuda"))
        found = run()
        for mine, wanted in zip(found, plain, strict=True):
            close(mine, wanted, 1e-5)
        checkpoint_activations(list(model.model.layers), "selective")
        assert all(map(torch.equal, run(), found)), "what is kept was written over"


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        globals()[name]()
