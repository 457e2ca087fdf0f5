"""Ulysses sequence parallelism (arXiv:2309.14509): one sequence's tokens shared by the `sp` ranks.

Every rank runs all layers on its own stretch of tokens. Only attention needs the others': one
all-to-all turns "my tokens, all heads" into "all tokens, my heads", and another one back. Here is
that attention, and how tokens are split before the model and brought together after it.

Gradients. Every `sp` rank computes the same whole loss and calls `backward()` on it, unscaled.
`sum_tokens` gives each rank the gradient of its own tokens, once. So the sum of a parameter's
gradients over `dp`, `fsdp` and `sp` is the gradient on one rank, for every parameter that is used
BEFORE it. What comes after it is computed by all `sp` ranks alike, and a parameter there would
count `sp` times: apply the head to a rank's own tokens (`local_tokens`) and sum the log-probs. That
also shards the logits, the largest of all activations.
"""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import ConfigError, WorkerError
from engine.parallel.pipeline_parallel import PipelineStage
from engine.parallel.process_groups import Ranks

_NAME = "hybridflyte_ulysses"  # transformers' name of `_attention`
_SHARE = "sequence_share"  # an attention module's attribute
_LOCAL = "local_config"  # another: its configuration as it was, with what each rank computes


def apply_ulysses(model: nn.Module, ranks: Ranks) -> None:
    """Let `model`'s attention, in place, see the tokens of all `sp` ranks.

    It is a language model, a critic, or a pipeline stage of either, and takes what `split_tokens`
    gives from then on. Call it after the heads are sharded over `tp`. One `sp` rank: nothing
    happens. Raises ConfigError for a model whose attention can't be shared by these ranks.
    """
    group = ranks.group("sp")
    if group is None:
        return
    names = ("is_causal", "layer_idx", "config")  # attributes that attention modules have
    attentions = [m for m in model.modules() if all(hasattr(m, name) for name in names)]
    _check_model(model, attentions, ranks)
    share = _Share(group, ranks.size("sp"), ranks.index("sp"))
    for attention in attentions:  # the model keeps its configuration: its masks don't change
        local_config: Any = attention.config
        config = copy.copy(local_config)
        config._attn_implementation = _NAME
        attention.__dict__ |= {"config": config, _SHARE: share, _LOCAL: local_config}


def split_tokens(ids: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return this rank's stretch of `ids` [B, L] and its positions, both [B, L' / sp] long.

    L is filled up, to the next multiple L' of `sp` · `tp`, with id 0: rows start at column 0, so
    causal attention keeps padding out, and tp may share out a rank's stretch once more.
    """
    size, index, tp = ranks.size("sp"), ranks.index("sp"), ranks.size("tp")
    length = math.ceil(ids.shape[1] / (size * tp)) * tp
    padded = nn.functional.pad(ids, (0, length * size - ids.shape[1]))
    start = index * length
    positions = torch.arange(start, start + length, device=ids.device).expand(len(ids), length)
    return padded[:, start : start + length].contiguous(), positions.contiguous()


def split_packed(ids: Tensor, positions: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return this rank's stretch of packed rows, and its positions, both [1, T / sp] long.

    `ids` and `positions` are [1, T]; `sp` · `tp` divides T.
    """
    length = ids.shape[1] // ranks.size("sp")
    start = ranks.index("sp") * length
    return ids[:, start : start + length], positions[:, start : start + length]


def local_tokens(positions: Tensor, length: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Find the tokens on this rank, of those at columns `positions` [N] of whole rows.

    Each rank has `length` columns. Returns their indices in `positions` [M] and their columns in
    this rank's stretch [M]; every token is one rank's, and M may be 0.
    """
    start = ranks.index("sp") * length
    mine = ((positions >= start) & (positions < start + length)).nonzero().squeeze(1)
    return mine, positions[mine] - start


def sum_tokens(values: Tensor, ranks: Ranks) -> Tensor:
    """Sum `values` over `sp`, 0 where a token isn't a rank's own; gradients stay as they are."""
    group = ranks.group("sp")
    if group is None:
        return values
    return _Merge.apply(values, group)


class _Share:
    """What an attention module must know of its ranks. Copies of a module share it."""

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        self.group, self.size, self.index = group, size, index
        self._seen: weakref.ref[Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> _Share:
        return self  # process groups can't be copied

    def check(self, query: Tensor, key: Tensor, mask: object, positions: Tensor | None) -> None:
        """Raise WorkerError for inputs that are not a stretch of left-aligned rows."""
        if mask is not None or key.shape[2] != query.shape[2]:
            raise WorkerError(
                f"a model shared by sp={self.size} ranks got an attention mask or a cache; give it "
                "whole left-aligned rows, split by split_tokens, and use_cache=False"
            )
        if positions is None or (self._seen is not None and self._seen() is positions):
            return
        first, expected = int(positions[0, 0]), self.index * query.shape[2]
        if first != expected:
            raise WorkerError(
                f"rank {self.index} of sp={self.size} got tokens from position {first}, its own "
                f"start at {expected}; pass on both results of split_tokens"
            )
        self._seen = weakref.ref(positions)  # once a pass: reading it waits for the device


class _LocalHeads:
    """An attention module as the kernel sees it: with this rank's heads only."""

    def __init__(self, module: nn.Module, config: PretrainedConfig, groups: int) -> None:
        self._module, self.config, self.num_key_value_groups = module, config, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from queries [B, heads, L/sp, d] to all tokens before them → [B, L/sp, heads, d]."""
    share: _Share = getattr(module, _SHARE)
    positions = options.pop("position_ids", None)
    if "segments" not in options:  # packed rows have positions of their own
        share.check(query, key, attention_mask, positions)
    size = share.size
    repeats = math.lcm(key.shape[1], size) // key.shape[1]  # each rank needs whole kv heads
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    heads, kv_heads = query.shape[1] // size, key.shape[1] // size
    parts = [t.unflatten(1, (size, -1)) for t in (query, key, value)]  # [B, sp, h, L/sp, d] each
    sent = torch.cat(parts, 2).movedim(1, 0).contiguous()
    received = _Exchange.apply(sent, share.group)  # [sp, B, h, L/sp, d]; 0: whose tokens
    all_tokens = received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, h, L, d]
    query, key, value = all_tokens.split([heads, kv_heads, kv_heads], 1)
    config = getattr(module, _LOCAL)
    kernel = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    local = _LocalHeads(module, config, heads // kv_heads)
    out: Tensor = kernel(local, query, key, value, None, **options)[0]  # [B, L, h, d]
    sent = out.unflatten(1, (size, -1)).movedim(1, 0).contiguous()  # [sp, B, L/sp, h, d]
    received = _Exchange.apply(sent, share.group)  # 0: whose heads
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3), None


AttentionInterface.register(_NAME, _attention)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts along dimension 0: result i is what rank i has for this one."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0].contiguous(), ctx.group), None  # an exchange undoes itself


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Merge(torch.autograd.Function):
    """A sum over ranks whose gradient is that of each of its terms."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _check_model(model: Any, attentions: list[nn.Module], ranks: Ranks) -> None:
    """Raise ConfigError for attention that is not plain, or not divisible."""
    config = model.config.get_text_config()
    across, kind = ranks.size("sp", "tp"), config._attn_implementation
    layers = len(model.layers) if isinstance(model, PipelineStage) else config.num_hidden_layers
    sinks = any(getattr(module, "sinks", None) is not None for module in attentions)
    window = getattr(config, "sliding_window", None)  # Mistral's layers have it from there
    windows = any(getattr(module, "sliding_window", window) for module in attentions)
    problem = ""
    if config.num_attention_heads % across:
        heads = config.num_attention_heads
        problem = f"sp · tp = {across} does not divide the {heads} attention heads; use a divisor"
    elif len(attentions) != layers or sinks:
        problem = "its attention is not that of a plain decoder; use sp=1, and tp or fsdp"
    elif kind != "sdpa" and not kind.startswith("flash"):
        problem = f"attn_implementation={kind!r} needs a mask of all tokens; use 'sdpa'"
    elif windows and kind == "sdpa":
        problem = (
            "sliding-window attention by sdpa needs a mask of all tokens; use "
            "attn_implementation='flash_attention_2', or sp=1"
        )
    if problem:
        raise ConfigError(f"sp={ranks.size('sp')} with a {config.model_type} model: {problem}")
