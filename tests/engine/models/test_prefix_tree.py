"""Rows as a tree: common beginnings come once, each token sees its own row, no number changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_engine import branches_batch, response_log_probs, shared_prompts_batch, tiny_model
from torch import Tensor

from engine.models import packed_attention
from engine.models import packing as alignment
from engine.models.packing import (
    apply_packing,
    pack_rows,
    prefix_tree,
    prefix_tree_batches,
    prompt_tree,
    same_prompts,
    worthwhile_tree,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def rows_of_few_tokens(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """Left-aligned ids [B, L], lengths and prompts' lengths; many begin alike."""
    token = st.integers(1, 2)
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=9))
    lengths = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    return ids, lengths, [draw(st.integers(1, length)) for length in lengths]


# That (1, 1, 2) and (1, 2) share a piece is due to the first two rows, of one prompt.
PIECE_OF_OTHER_ROWS = (
    torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 0]]),
    [1, 1, 3, 3, 2],
    [1, 1, 1, 2, 1],
)


@given(rows_of_few_tokens(), st.integers(1, 4))
def test_every_token_sees_its_row_and_common_beginnings_come_once(
    case: tuple[Tensor, list[int], list[int]], least: int
) -> None:
    ids, lengths, prompts = case
    tree = prefix_tree(ids, lengths, prompts, least)
    packed = pack_rows(ids, torch.tensor(lengths), tree=tree)
    size = packed.input_ids.numel()
    assert size == tree.size(lengths)
    seen: dict[int, list[int]] = {}
    for run in packed.segments.runs:
        before = [t for a, b in zip(run[:-2:2], run[1:-2:2], strict=True) for t in range(a, b)]
        for token in range(*run[-2:]):
            seen[token] = [*before, *range(run[-2], token + 1)]
    assert sorted(seen) == list(range(size))
    for row, length in enumerate(lengths):
        places = packed.places[row, :length]
        assert packed.input_ids[0, places].tolist() == ids[row, :length].tolist()
        assert packed.position_ids[0, places].tolist() == list(range(length))
        for column, token in enumerate(places.tolist()):
            assert seen[token] == places[: column + 1].tolist()
    beginnings = {
        tuple(row[: k + 1])
        for row, end in zip(ids.tolist(), lengths, strict=True)
        for k in range(end)
    }
    assert size == len(beginnings) if least == 1 else size >= len(beginnings)


@given(rows_of_few_tokens(), st.integers(1, 30))
@example(PIECE_OF_OTHER_ROWS, 4)
def test_batches_of_a_tree_stay_within_their_budget(
    case: tuple[Tensor, list[int], list[int]], budget: int
) -> None:
    ids, lengths, prompts = case
    tree = prefix_tree(ids, lengths, prompts, 2)
    batches = prefix_tree_batches(tree, ids, lengths, prompts, budget, least=2)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        own = prefix_tree(ids[batch], [lengths[i] for i in batch], [prompts[i] for i in batch], 2)
        assert len(batch) == 1 or own.size([lengths[i] for i in batch]) <= budget


def test_completions_of_one_turn_are_laid_out_as_before() -> None:
    seqs = alignment.left_align(shared_prompts_batch())
    assert seqs.lengths is not None
    assert seqs.prompts is not None
    prompts, lengths = seqs.prompts.tolist(), seqs.lengths.tolist()
    by_prompt = prompt_tree(same_prompts(seqs.input_ids, seqs.prompts), prompts)
    assert worthwhile_tree(seqs.input_ids, lengths, prompts, by_prompt) is None


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_branches_have_the_log_probs_and_gradients_of_padded_rows(family: str) -> None:
    batch, found, computed = branches_batch(), [], []
    weights = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(3))
    for packing in (False, True):
        model = tiny_model(family)
        if packing:
            apply_packing(model)
        model.base_model.get_input_embeddings().register_forward_hook(
            lambda module, args, out: computed.append(args[0].numel())
        )
        log_probs = response_log_probs(model, batch, 0.8)
        (log_probs * weights * batch["response_mask"]).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([log_probs.detach(), *grads])
    assert computed[1] < 0.45 * computed[0], "turns before are computed once"
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_blocks_are_the_attention_of_each_segment() -> None:
    seqs = alignment.left_align(branches_batch())
    assert seqs.lengths is not None
    assert seqs.prompts is not None
    tree = prefix_tree(seqs.input_ids, seqs.lengths.tolist(), seqs.prompts.tolist())
    segments = pack_rows(seqs.input_ids, seqs.lengths, tree=tree).segments
    assert max(map(len, segments.runs)) > 4, "a prefix of several parts"
    size = segments.runs[-1][-1]
    results = []
    for kernel in (packed_attention._by_block, packed_attention._by_segment):
        draw = torch.Generator().manual_seed(1)
        q, k, v = (
            torch.randn(1, heads, size, 8, generator=draw, dtype=torch.float64).requires_grad_()
            for heads in (4, 2, 2)
        )
        out = kernel(q, k, v, segments, 0.3)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
