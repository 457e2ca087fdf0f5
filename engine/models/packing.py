"""Rows as one sequence without padding, in which a prompt that several rows share comes once.

Every layer then computes on real tokens only, and on a shared prompt once: of G completions R
tokens long of a prompt of P, P + G·R tokens in place of G·(P + R). Rows that share no prompt are
groups of one, laid end to end. Positions go on from the prompt, and attention
(`packed_attention`) keeps rows apart, so that outputs and gradients are those of padded rows. Which
rows go together, and what is read off the outputs, are the callers' matter.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import ConfigError, DataError
from engine.models.critic import CriticModel
from engine.models.packed_attention import Segments, packed_attention
from engine.models.prefix_tree import PrefixTree, prefix_tree, prompt_tree
from engine.models.products import recurring_size
from engine.models.row_attention import Run

Packing = bool | Literal["auto"]  # auto: where it saves enough
WORTHWHILE = 0.95  # of the padded positions; auto packs rows of no more tokens than that

_NAME = "hybridflyte_packed"  # transformers' name of `_attention`
_OWN = "unpacked_config"  # an attention module's attribute: its configuration as it was
_MARK = "packing"  # an attribute of the body of a model that packing was applied to


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows as one sequence of T tokens."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long; columns of the padded rows
    places: Tensor  # [B, L] long; where each row's tokens lie, those of a shared prompt together
    segments: Segments  # which tokens see which

    def index(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Where the tokens at `rows` [N] and `columns` [N] of the padded rows lie: [N] long."""
        return self.places[rows, columns]


def pack_rows(
    ids: Tensor,
    lengths: Tensor,
    prompts: Tensor | None = None,
    multiple: int = 1,
    *,
    tree: PrefixTree | None = None,
    recurring: bool = False,
) -> PackedRows:
    """Pack left-aligned rows `ids` [B, L] of `lengths` [B] tokens each, padding last.

    Rows whose first `prompts` [B] tokens are the same have those in common (None: no row has), or,
    with a `tree` of these rows, whatever they share in it. A row of id 0 fills T up to a multiple
    of `multiple`; with `recurring`, to a `recurring_size` first. Raises DataError for a row without
    tokens, or with fewer than its prompt's.
    """
    ends, width = lengths.tolist(), ids.shape[1]
    if min(ends) < 1 or max(ends) > width:
        raise DataError(
            f"rows to pack have {min(ends)} to {max(ends)} tokens in {width} "
            "columns; give each row at least one token, and none more than there are columns"
        )
    if prompts is not None and bool((prompts > lengths).any()):
        raise DataError("a row to pack is shorter than its prompt; give the whole prompt")
    if tree is None:
        alone = [[row] for row in range(len(ids))]
        groups = alone if prompts is None else same_prompts(ids, prompts)
        tree = prompt_tree(groups, ends if prompts is None else prompts.tolist())
    firsts: list[int] = []  # of each piece, flat among `ids`
    runs: list[Run] = []
    path: list[tuple[int, int, int]] = []  # pieces before: a column's end, first and last + 1 here
    at = 0
    for (row, pieces), shared in zip(tree.pieces(ends), tree.shared, strict=True):
        path = [piece for piece in path if piece[0] <= shared]
        for start, stop in pieces:
            firsts.append(row * width + start)
            runs.append((*_prefix(path, at), at, at + stop - start))
            path.append((stop, at, at := at + stop - start))
    source = _ranges(firsts, [run[-1] - run[-2] for run in runs])
    places = np.zeros(ids.shape, dtype=np.int64)
    places.reshape(-1)[source] = np.arange(at)
    for (before, row), shared in zip(itertools.pairwise(tree.order), tree.shared[1:], strict=True):
        places[row, :shared] = places[before, :shared]
    flat = torch.from_numpy(source).to(ids.device)
    tokens, positions = ids.flatten()[flat], flat % width
    size = recurring_size(at) if recurring else at
    if missing := size + -size % multiple - at:
        runs.append((at, at, at, at + missing))
        tokens = F.pad(tokens, (0, missing))
        positions = torch.cat([positions, torch.arange(missing, device=ids.device)])
    return PackedRows(
        tokens[None],
        positions[None],
        torch.from_numpy(places).to(ids.device),
        Segments.of_runs(runs, ids.device),
    )


def _ranges(firsts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Ranges of those many numbers from each of `firsts` on, one behind the other."""
    ends = np.cumsum(counts)
    return np.repeat(np.array(firsts) - ends + counts, counts) + np.arange(ends[-1])


def _prefix(path: Sequence[tuple[int, int, int]], at: int) -> list[int]:
    """First and last + 1 of the parts of a prefix, neighbours as one; an empty one `at`."""
    ends: list[int] = []
    for _, start, stop in path:
        if ends and ends[-1] == start:
            ends[-1] = stop
        else:
            ends += [start, stop]
    return ends or [at, at]


def same_prompts(ids: Tensor, prompts: Tensor) -> list[list[int]]:
    """Rows of `ids` [B, L] in groups whose first `prompts` [B] tokens are the same.

    Groups come in the order of their first rows.
    """
    groups: dict[bytes, list[int]] = {}
    for row, (tokens, end) in enumerate(zip(ids.cpu().numpy(), prompts.tolist(), strict=True)):
        groups.setdefault(tokens[:end].tobytes(), []).append(row)
    return list(groups.values())


def worthwhile_tree(
    ids: Tensor, lengths: Sequence[int], prompts: Sequence[int], by_prompt: PrefixTree
) -> PrefixTree | None:
    """The tree of left-aligned rows, where it has fewer tokens than `by_prompt`, their prompts'.

    So has one of an episode's branches, and of prompts with a long beginning in common.
    """
    tree = prefix_tree(ids, lengths, prompts)
    return tree if tree.size(lengths) <= WORTHWHILE * by_prompt.size(lengths) else None


def is_worthwhile(packing: Packing, tokens: int, positions: int) -> bool:
    """Whether rows of so many tokens, packed, and `positions`, padded, are to be packed."""
    return packing is True or (packing == "auto" and tokens <= WORTHWHILE * positions)


def apply_packing(model: PreTrainedModel | CriticModel, packing: Packing = True) -> None:
    """Let `model`, in place, take packed rows by `packed_forward`; padded ones as before.

    Other models stay as they are, and so does one that it was applied to, but for `packing`, which
    `packing_of` tells from then on. Raises ConfigError where attention is not plain and causal. It
    goes with FSDP, TP and adapters, and with `apply_ulysses` after it.
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
    set_packing(model, packing)


def set_packing(model: nn.Module, packing: Packing) -> None:
    """Say when `model`, which packing was applied to, is to be given packed rows."""
    getattr(model, "base_model", model).__dict__[_MARK] = packing


def packing_of(model: nn.Module) -> Packing:
    """When `model` (or the model whose body it is) is to be given packed rows.

    False for one that packing was not applied to.
    """
    found: Packing = getattr(getattr(model, "base_model", model), _MARK, False)
    return found


def packed_forward(module: nn.Module, rows: PackedRows, **options: object) -> Any:
    """What `module`, a model or its body, gives for packed rows: outputs of [1, T, …].

    After `apply_packing` only. `options` are more arguments of its own.
    """
    return module(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        # Of four dimensions it is taken as it is; else transformers would write out T × T.
        attention_mask=rows.input_ids.new_zeros(1, 1, 1, 1),
        use_cache=False,
        segments=rows.segments,
        **options,
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention [1, T, heads, d] of queries [1, heads, T, d] over `segments`.

    Without segments it is the module's own attention.
    """
    config = getattr(module, _OWN)
    kernel = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    if segments is None:
        return kernel(_Unpacked(module, config), query, key, value, attention_mask, **options)
    if config._attn_implementation.startswith("flash"):
        starts = {"cu_seq_lens_q": segments.starts, "cu_seq_lens_k": segments.key_starts}
        most = {"max_length_q": segments.longest, "max_length_k": segments.longest_keys}
        seen = segments.with_prefixes(key, value)
        return kernel(_Unpacked(module, config), query, *seen, None, **starts, **most, **options)
    scale, dropout = options["scaling"], options.get("dropout", 0.0)
    return packed_attention(query, key, value, segments, scale=scale, dropout=dropout), None


AttentionInterface.register(_NAME, _attention)


class _Unpacked:
    """An attention module with the configuration that it had."""

    def __init__(self, module: nn.Module, config: PretrainedConfig) -> None:
        self._module, self.config = module, config

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def attends_packed(attention: Any) -> bool:
    """Whether the attention module, given segments, calls `packed_attention`."""
    if attention.config._attn_implementation != _NAME:
        return False
    return not getattr(attention, _OWN)._attn_implementation.startswith("flash")


def _is_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("is_causal", "layer_idx", "config"))
