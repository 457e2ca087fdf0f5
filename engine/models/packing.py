"""Rows as one sequence without padding, in which beginnings that rows share come once.

Every layer computes on real tokens only, and on a shared prompt once: of G completions R tokens
long of a prompt of P, P + G·R tokens in place of G·(P + R). Positions go on from the prompt, and
attention (`packed_attention`) keeps rows apart, so that outputs and gradients are those of padded
rows.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.batch import Batch
from engine.errors import ConfigError, DataError
from engine.kernels.attention import Run
from engine.kernels.training_ops import recurring_size
from engine.models.packed_attention import Segments, packed_attention
from engine.models.value_head import CriticModel

LEAST = 16  # tokens of a common beginning that is worth a piece of its own


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """B rows in an order in which those that begin alike are neighbours.

        P ─┬─ a ─┬─ r1          rows  P a r1,  P a b r2,  P c r3
           │     └─ b ── r2
           └─ c ── r3           each piece is computed once

    Row `order[i]` has its first `shared[i]` tokens in common, and computed, with the one before it.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    def size(self, lengths: Sequence[int]) -> int:
        """Count the tokens of the tree, of rows of those lengths."""
        return sum(lengths) - sum(self.shared)

    def pieces(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield each row in order, and its pieces after what it shares: (first, last token + 1)."""
        for i, (row, start) in enumerate(zip(self.order, self.shared, strict=True)):
            # Where later rows leave this one's tokens, until one has none of its own.
            depths = itertools.takewhile(start.__lt__, self.shared[i + 1 :])
            cuts = {start, *itertools.accumulate(depths, min, initial=lengths[row])}
            yield row, list(itertools.pairwise(sorted(cuts)))


def prompt_tree(groups: Sequence[Sequence[int]], prompts: Sequence[int]) -> PrefixTree:
    """Make the tree of groups of rows that share their prompts, of `prompts` [B] tokens, alone."""
    shared = [prompts[row] if i else 0 for group in groups for i, row in enumerate(group)]
    return PrefixTree(tuple(itertools.chain(*groups)), tuple(shared))


def prefix_tree(
    ids: Tensor, lengths: Sequence[int], prompts: Sequence[int], least: int = LEAST
) -> PrefixTree:
    """Make the tree of left-aligned rows `ids` [B, L] long of `lengths` [B] tokens each.

    They share prompts (of `prompts` [B] tokens), and other beginnings from `least` tokens on.
    """
    rows = [row[:end] for row, end in zip(ids.cpu().numpy(), lengths, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    alike = _common(ids.cpu().numpy(), lengths, order)
    return PrefixTree(tuple(order), tuple(_shared(order, alike, prompts, least)))


def prefix_tree_batches(
    tree: PrefixTree,
    ids: Tensor,
    lengths: Sequence[int],
    prompts: Sequence[int],
    max_tokens: int,
    least: int = LEAST,
) -> list[list[int]]:
    """Cut the rows of `prefix_tree(ids, lengths, prompts, least)` in batches, in the tree's order.

    Returns row numbers by batch, each of at most `max_tokens` tokens in the tree of its rows alone;
    a single row above that is a batch of its own.
    """
    alike = _common(ids.cpu().numpy(), lengths, tree.order)
    batches: list[list[int]] = []
    start = 0
    while start < len(tree.order):
        batches.append([])
        room, order = max_tokens, tree.order[start:]
        for row, shared in zip(order, _shared(order, alike[start:], prompts, least), strict=False):
            room -= lengths[row] - shared
            if batches[-1] and room < 0:
                break
            batches[-1].append(row)
        start += len(batches[-1])
    return batches


def _shared(
    order: Sequence[int], alike: Sequence[int], prompts: Sequence[int], least: int
) -> Iterator[int]:
    """Yield what each row shares with the one before it, which begins with `alike` same tokens."""
    if order:
        yield 0
    depths = [0]  # where the pieces of the row before end
    for (before, row), common in zip(itertools.pairwise(order), alike, strict=True):
        same = prompts[before] == prompts[row] <= common
        while depths[-1] > common:
            depths.pop()
        if common - depths[-1] >= least or (same and depths[-1] < prompts[row]):
            depths.append(common)
        yield depths[-1]


def _common(ids: np.ndarray, lengths: Sequence[int], order: Sequence[int]) -> list[int]:
    """Count the tokens that each row has in common with the one before it in the order."""
    ordered, ends = ids[list(order)], np.array(lengths)[list(order)]
    differ = ordered[1:] != ordered[:-1]
    first = np.where(differ.any(1), differ.argmax(1), ids.shape[1])
    return np.minimum(first, np.minimum(ends[1:], ends[:-1])).tolist()


Packing = bool | Literal["auto"]  # auto: where it saves enough
WORTHWHILE = 0.95  # of the padded positions; auto packs rows of no more tokens than that

_NAME = "hybridflyte_packed"  # transformers' name of `_attention`
_UNPACKED = "unpacked_config"  # an attention module's attribute: its configuration as it was
_MARK = "packing"  # an attribute of the body of a model that packing was applied to


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows as one sequence of T tokens."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long; columns of the padded rows
    places: Tensor  # [B, L] long; where each row's tokens lie, those of a shared prompt together
    segments: Segments  # which tokens see which

    def index(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return where tokens at `rows` [N] and `columns` [N] of the padded rows lie: [N] long."""
        return self.places[rows, columns]


def pack_rows(
    ids: Tensor,
    lengths: Sequence[int],
    tree: PrefixTree,
    multiple: int = 1,
    *,
    recurring: bool = False,
) -> PackedRows:
    """Pack left-aligned rows `ids` [B, L] of `lengths` [B] tokens each, padding last.

    What rows share in their `tree` is there once. A row of id 0 fills T up to a multiple of
    `multiple`; with `recurring`, to a `recurring_size` first.
    """
    width = ids.shape[1]
    firsts: list[int] = []  # of each piece, flat among `ids`
    runs: list[Run] = []
    path: list[tuple[int, int, int]] = []  # pieces before: a column's end, first and last + 1 here
    at = 0
    for (row, pieces), shared in zip(tree.pieces(lengths), tree.shared, strict=True):
        path = [piece for piece in path if piece[0] <= shared]
        for start, stop in pieces:
            firsts.append(row * width + start)
            runs.append((*_prefix(path, at), at, at + stop - start))
            path.append((stop, at, at := at + stop - start))
    counts = np.array([run[-1] - run[-2] for run in runs])
    ends = np.cumsum(counts)
    source = np.repeat(np.array(firsts) - ends + counts, counts) + np.arange(at)
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


def _prefix(path: Sequence[tuple[int, int, int]], at: int) -> list[int]:
    """Return first and last + 1 of the parts of a prefix, neighbours as one; `at` of none."""
    ends: list[int] = []
    for _, start, stop in path:
        if ends and ends[-1] == start:
            ends[-1] = stop
        else:
            ends += [start, stop]
    return ends or [at, at]


def same_prompts(ids: Tensor, prompts: Tensor) -> list[list[int]]:
    """Group rows of `ids` [B, L] by their first `prompts` [B] tokens, in order of first rows."""
    groups: dict[bytes, list[int]] = {}
    for row, (tokens, end) in enumerate(zip(ids.cpu().numpy(), prompts.tolist(), strict=True)):
        groups.setdefault(tokens[:end].tobytes(), []).append(row)
    return list(groups.values())


def worthwhile_tree(
    ids: Tensor, lengths: Sequence[int], prompts: Sequence[int], by_prompt: PrefixTree
) -> PrefixTree | None:
    """Return the tree of left-aligned rows where it is smaller than `by_prompt`, else None."""
    tree = prefix_tree(ids, lengths, prompts)
    return tree if tree.size(lengths) <= WORTHWHILE * by_prompt.size(lengths) else None


def is_worthwhile(packing: Packing, tokens: int, positions: int) -> bool:
    """Decide whether rows of `tokens` when packed and `positions` when padded are to be packed."""
    return packing is True or (packing == "auto" and tokens <= WORTHWHILE * positions)


def apply_packing(model: PreTrainedModel | CriticModel, packing: Packing = True) -> None:
    """Let `model`, in place, take packed rows by `packed_forward`; padded ones as before.

    Called again, it changes what `packing_of` tells. Apply Ulysses after it. Raises ConfigError
    where attention is not plain and causal.
    """
    names = ("is_causal", "layer_idx", "config")  # attributes that attention modules have
    attentions = [m for m in model.modules() if all(hasattr(m, name) for name in names)]
    config = model.config.get_text_config()
    kind, window = config._attn_implementation, getattr(config, "sliding_window", None)
    if (
        len(attentions) != config.num_hidden_layers
        or any(getattr(m, "sinks", None) is not None for m in attentions)
        or (kind != "sdpa" and not kind.startswith("flash"))
        or (kind == "sdpa" and any(getattr(m, "sliding_window", window) for m in attentions))
    ):
        raise ConfigError(
            f"the attention of this {config.model_type} model (attn_implementation={kind!r}) can't "
            "take packed rows: only plain causal attention by sdpa or flash_attention_2 does; "
            "leave packing off"
        )
    for attention in attentions:
        if hasattr(attention, _UNPACKED):
            continue
        changed = copy.copy(attention.config)
        changed._attn_implementation = _NAME  # type: ignore[union-attr]
        attention.__dict__ |= {_UNPACKED: attention.config, "config": changed}
    set_packing(model, packing)


def body_of(model: nn.Module) -> Any:
    """Return the decoder of a model or a critic; a pipeline stage is one itself."""
    return getattr(model, "base_model", model)


def set_packing(model: nn.Module, packing: Packing) -> None:
    """Say when `model`, which packing was applied to, is to be given packed rows."""
    body_of(model).__dict__[_MARK] = packing


def packing_of(model: nn.Module) -> Packing:
    """Return when a model or its body gets packed rows; False where packing wasn't applied."""
    return getattr(body_of(model), _MARK, False)


def packed_forward(module: nn.Module, rows: PackedRows, **options: object) -> Any:
    """Run `module`, a model or its body that packing was applied to: outputs of [1, T, …]."""
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
    """Compute attention [1, T, heads, d] of queries [1, heads, T, d]; the module's own without."""
    config = getattr(module, _UNPACKED)
    kernel, unpacked = ALL_ATTENTION_FUNCTIONS[config._attn_implementation], _Unpacked(module)
    if segments is None:
        return kernel(unpacked, query, key, value, attention_mask, **options)
    if config._attn_implementation.startswith("flash"):
        options |= {"cu_seq_lens_q": segments.starts, "cu_seq_lens_k": segments.key_starts}
        options |= {"max_length_q": segments.longest, "max_length_k": segments.longest_keys}
        return kernel(unpacked, query, *segments.with_prefixes(key, value), None, **options)
    scale, dropout = options["scaling"], options.get("dropout", 0.0)
    return packed_attention(query, key, value, segments, scale=scale, dropout=dropout), None


AttentionInterface.register(_NAME, _attention)


class _Unpacked:
    """An attention module with the configuration that it had."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.config = module, getattr(module, _UNPACKED)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def attends_packed(attention: Any) -> bool:
    """Tell whether the attention module, given segments, calls `packed_attention`."""
    if attention.config._attn_implementation != _NAME:
        return False
    return not getattr(attention, _UNPACKED)._attn_implementation.startswith("flash")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows from column 0 on, and where each response token's prediction is read.

    Padding comes last: causal attention alone keeps it out. `packed`: `input_ids` are [1, T], of
    rows laid out as one, and `positions` are columns of it.
    """

    input_ids: Tensor  # [B, L] long; row = prompt, response, padding
    rows: Tensor  # [N] long; row of each response token
    positions: Tensor  # [N] long; column whose output predicts that token
    targets: Tensor  # [N] long; the token itself
    columns: Tensor  # [N] long; its column in the batch's [B, R] fields
    lengths: Tensor | None = None  # [B] long; tokens of each row; None: a share of longer rows
    prompts: Tensor | None = None  # [B] long; how many of them are the prompt's
    packed: bool = False

    def states(self, hidden: Tensor) -> Tensor:
        """Select the outputs `[B, L, …]` that predict response tokens: `[N, …]`."""
        seqs = self.to(hidden.device)
        if self.packed:
            return hidden[0].index_select(0, seqs.positions)
        return hidden[seqs.rows, seqs.positions]

    def to(self, device: torch.device) -> Self:
        """Return the same on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: Any = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def left_align(batch: Batch) -> Sequences:
    """Drop the left padding of `input_ids` and list the N response tokens, whose mask is 1.

    Raises DataError for a row without a prompt: nothing would predict its first token.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    width = batch["responses"].shape[1]
    prompt_lengths = mask[:, : ids.shape[1] - width].sum(1)  # [B]
    if bool((prompt_lengths == 0).any()):
        row = int((prompt_lengths == 0).nonzero()[0, 0])
        raise DataError(f"row {row} of the batch has an empty prompt; give it at least one token")
    lengths = mask.sum(1)
    aligned = ids.gather(1, _sources(batch))
    present = mask[:, ids.shape[1] - width :]
    rows, columns = present.nonzero(as_tuple=True)
    positions = prompt_lengths[rows] + columns - 1
    targets = batch["responses"][rows, columns]
    return Sequences(aligned, rows, positions, targets, columns, lengths, prompt_lengths)


def left_align_tokens(batch: Batch, values: Tensor) -> Tensor:
    """Move `values` [B, P+R, F] of the tokens of `input_ids` to [B, L, F], as `left_align` does."""
    return values.take_along_dim(_sources(batch)[..., None], 1)


def restore_columns(batch: Batch, values: Tensor) -> Tensor:
    """Invert `left_align_tokens`: [B, L, F] as [B, P+R, F], 0 on padding."""
    mask = batch["attention_mask"].bool().cpu()
    out = values.new_zeros(*mask.shape, values.shape[2])
    present = torch.arange(values.shape[1]) < mask.sum(1)[:, None]
    out[mask] = values[present]
    return out


def _sources(batch: Batch) -> Tensor:
    """Return the column [B, L] of `input_ids` that moves to each column of the aligned rows."""
    mask = batch["attention_mask"].bool()
    start, length = mask.int().argmax(1), int(mask.sum(1).max())  # first real column, [B]
    columns = start[:, None] + torch.arange(length, device=mask.device)
    return columns.clamp(max=mask.shape[1] - 1)


def pack(
    model: nn.Module, seqs: Sequences, packing: Packing | None = None, multiple: int = 1
) -> PackedRows | None:
    """Pack the rows on the model's device, where the model is to be given them so; else None.

    The last token of a row predicts nothing, and is left out. `packing`: None is the model's own.
    """
    packing = packing_of(model) if packing is None else packing
    if not packing or seqs.lengths is None or seqs.prompts is None:
        return None
    lengths = torch.maximum(seqs.lengths - 1, seqs.prompts).tolist()
    prompts = seqs.prompts.tolist()
    by_prompt = prompt_tree(same_prompts(seqs.input_ids, seqs.prompts), prompts)
    tree = worthwhile_tree(seqs.input_ids, lengths, prompts, by_prompt) or by_prompt
    if not is_worthwhile(packing, tree.size(lengths), seqs.input_ids.numel()):
        return None
    device = next(model.parameters()).device
    ids, on_cpu = seqs.input_ids.to(device), device.type == "cpu"
    return pack_rows(ids, lengths, tree, multiple, recurring=on_cpu)
