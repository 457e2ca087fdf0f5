"""Rows of mixed lengths as one row without padding, and attention that keeps them apart.

Every layer then computes on real tokens only. On CUDA in half precision attention is torch's
variable-length flash kernel; elsewhere (CPU, ROCm, float32) each sequence is attended to by itself,
with the same numbers. Which rows go together, and what is read off the outputs, are the callers'
matter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import ConfigError, DataError
from engine.models.critic import CriticModel

_NAME = "hybridflyte_packed"  # transformers' name of `_attention`
_OWN = "unpacked_config"  # an attention module's attribute: its configuration as it was
_MARK = "takes_packed_rows"  # an attribute of the body of a model that packing was applied to


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows, end to end: T tokens in all."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long; from 0 in each row
    starts: Tensor  # [B + 1] int32; where each row begins, and T
    longest: int  # tokens of the longest row

    def index(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Where the tokens at `rows` [N] and `columns` [N] of the padded rows lie: [N] long."""
        return self.starts[rows].long() + columns

    def unpack(self, packed: Tensor, width: int) -> Tensor:
        """[1, T, …] → [B, width, …], zeros where a row has no token."""
        lengths = self.starts.diff()
        present = torch.arange(width, device=packed.device) < lengths[:, None]  # [B, width]
        out = packed.new_zeros(*present.shape, *packed.shape[2:])
        return out.masked_scatter(present.view(*present.shape, *[1] * (out.ndim - 2)), packed[0])


def pack_rows(ids: Tensor, lengths: Tensor) -> PackedRows:
    """Pack left-aligned rows `ids` [B, L] of `lengths` [B] tokens each, padding last.

    Raises DataError for a row without tokens.
    """
    longest = int(lengths.max())
    if int(lengths.min()) < 1 or longest > ids.shape[1]:
        raise DataError(
            f"rows to pack have {int(lengths.min())} to {longest} tokens in {ids.shape[1]} "
            "columns; give each row at least one token, and none more than there are columns"
        )
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    present = columns < lengths[:, None]
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return PackedRows(ids[present][None], columns[present][None], starts, longest)


def apply_packing(model: PreTrainedModel | CriticModel) -> None:
    """Let `model`, in place, take packed rows by `packed_forward`; padded ones as before.

    Other models stay as they are, and so does one that it was applied to. Raises ConfigError where
    attention is not plain and causal. It goes with FSDP, TP and adapters, not with `apply_ulysses`.
    """
    found = [m for m in model.modules() if _is_attention(m)]
    config = model.config.get_text_config()
    kind, window = config._attn_implementation, getattr(config, "sliding_window", None)
    if (
        len(found) != config.num_hidden_layers
        or any(getattr(m, "sinks", None) is not None for m in found)
        or (kind != "sdpa" and not kind.startswith("flash"))
        or (kind == "sdpa" and any(getattr(m, "sliding_window", window) for m in found))
    ):
        raise ConfigError(
            f"the attention of this {config.model_type} model (attn_implementation={kind!r}) can't "
            "take packed rows: only plain causal attention by sdpa or flash_attention_2 does; "
            "leave packing off"
        )
    for attention in found:
        if hasattr(attention, _OWN):
            continue
        ours = copy.copy(attention.config)
        ours._attn_implementation = _NAME  # type: ignore[union-attr]
        attention.__dict__ |= {_OWN: attention.config, "config": ours}
    model.base_model.__dict__[_MARK] = True


def takes_packed_rows(model: Any) -> bool:
    """Whether packing was applied to `model` (or to the model whose body it is)."""
    return bool(getattr(getattr(model, "base_model", model), _MARK, False))


def packed_forward(module: nn.Module, rows: PackedRows) -> Any:
    """What `module`, a model or its body, gives for packed rows: outputs of [1, T, …].

    After `apply_packing` only.
    """
    return module(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        # Of four dimensions it is taken as it is; else transformers would write out T × T.
        attention_mask=rows.input_ids.new_zeros(1, 1, 1, 1),
        use_cache=False,
        cu_seq_lens_q=rows.starts,
        cu_seq_lens_k=rows.starts,
        max_length_q=rows.longest,
        max_length_k=rows.longest,
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attention [1, T, heads, d] of queries [1, heads, T, d], each to those before it in its row.

    Without rows' starts it is the module's own attention.
    """
    config = getattr(module, _OWN)
    starts: Tensor | None = options.get("cu_seq_lens_q")
    kernel: Any = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    if starts is None:
        return kernel(_Unpacked(module, config), query, key, value, attention_mask, **options)
    if config._attn_implementation.startswith("flash"):
        return kernel(_Unpacked(module, config), query, key, value, None, **options)
    query, key, value = _cast(query, key, value)
    scale, dropout = options["scaling"], options.get("dropout", 0.0)
    grouped = query.shape[1] != key.shape[1]
    if _has_kernel(query) and not dropout:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [T, heads, d]
        longest = options["max_length_q"]
        out: Any = varlen_attn(
            q, k, v, starts, starts, longest, longest,
            scale=scale, window_size=(-1, 0), enable_gqa=grouped,
        )  # fmt: skip
        return out[None], None
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b],
            dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped,
        )
        for a, b in pairwise(starts.tolist())
    ]  # fmt: skip
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


class _Unpacked:
    """An attention module with the configuration that it had."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self._module, self.config = module, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, in its dtype, as torch's own attention does; rotated q and k come wider."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _has_kernel(query: Tensor) -> bool:
    """Whether torch's variable-length attention computes this."""
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _is_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("is_causal", "layer_idx", "config"))
