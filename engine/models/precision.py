"""The dtype of a model's weights in training and rollout: `model.dtype`, and what `auto` is."""

from __future__ import annotations

import torch

from engine.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MIN_HIDDEN_SIZE = 96  # the narrowest whose learning was compared, see docs/precision.md


def computes_in_bfloat16(*, gpu: bool) -> bool:
    """Whether a GPU, or this machine's CPU, multiplies bfloat16 matrices in hardware.

    A GPU of another machine is taken to.
    """
    if gpu:
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def resolve_dtype(
    dtype: str, hidden_size: int, *, gpu: bool | None = None, compute_dtype: str = ""
) -> str:
    """The dtype that `model.dtype` stands for; a dtype itself stays.

    `auto` is bfloat16 for a model of `MIN_HIDDEN_SIZE` or wider where `computes_in_bfloat16`, else
    float32; float32 also where `compute_dtype` asks for it. `gpu`: where the model will be; None:
    on this process's device. Raises ConfigError for an unknown dtype, and for reduced weights with
    another `compute_dtype`.
    """
    if dtype == "auto":
        gpu = torch.cuda.is_available() if gpu is None else gpu
        faster = compute_dtype != "float32" and computes_in_bfloat16(gpu=gpu)
        return "bfloat16" if faster and hidden_size >= MIN_HIDDEN_SIZE else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype={dtype!r} is unknown; choose auto or one of {[*DTYPES]}")
    if dtype != "float32" and compute_dtype not in ("", dtype):
        raise ConfigError(
            f"actor.parallel.compute_dtype={compute_dtype} with model.dtype={dtype}: weights are "
            f"computed with as they are stored; leave compute_dtype out, or set model.dtype=float32"
        )
    return dtype
