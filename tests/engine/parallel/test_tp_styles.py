"""Styles of sharded modules, and what ranks communicate between them, on real gloo ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from engine.parallel.tensor_parallel import (
    TOKENS,
    Style,
    copy_to_ranks,
    gather_tokens,
    pad_tokens,
    redistribute,
    replicated,
    row_parallel,
    vocabulary_parallel,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_ranks() -> tuple[DeviceMesh, int]:
    mesh = init_device_mesh("cpu", (2,))
    return mesh, mesh.get_local_rank()


def sharded(module: nn.Module, mesh: DeviceMesh, style: Style) -> Any:
    """A copy of `module` in this style, of the same class."""
    found = copy.deepcopy(module)
    style(found, mesh)
    assert type(found) is type(module)
    return found


def moved() -> None:
    """Values and gradients of every way of moving activations."""
    mesh, rank = two_ranks()
    tokens = draw(2, 6, 3)
    mine = tokens[:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
    weights = draw(2, 6, 3, seed=1)
    (redistribute(mine, mesh, TOKENS, Replicate()) * weights).sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, weights[:, 3 * rank : 3 * rank + 3])

    mine.grad = None  # each rank reads all tokens and does something else with them
    whole = gather_tokens(mine, mesh)
    assert torch.equal(whole, tokens)
    (whole * (1 + 9 * rank)).sum().backward()
    torch.testing.assert_close(mine.grad, torch.full((2, 3, 3), 11.0))

    same = tokens.clone().requires_grad_()
    (copy_to_ranks(same, mesh) * (1 + 9 * rank)).sum().backward()
    torch.testing.assert_close(same.grad, torch.full((2, 6, 3), 11.0))

    term = (tokens * (1 + rank)).requires_grad_()
    total = redistribute(term, mesh, Partial(), Replicate())
    torch.testing.assert_close(total, 3 * tokens)
    (total * weights).sum().backward()
    torch.testing.assert_close(term.grad, weights)

    term = (tokens * (1 + rank)).requires_grad_()
    share = redistribute(term, mesh, Partial(), TOKENS)
    torch.testing.assert_close(share, 3 * tokens[:, 3 * rank : 3 * rank + 3])
    (share * weights[:, 3 * rank : 3 * rank + 3]).sum().backward()
    torch.testing.assert_close(term.grad, weights)


def test_moving_activations_and_their_gradients() -> None:
    run_ranks(2, moved)


def padded() -> list[tuple[int, ...]]:
    mesh, _ = two_ranks()
    five, four = draw(2, 5, 3), draw(2, 4, 3)
    found = pad_tokens(five, mesh)
    assert torch.equal(found[:, :5], five)
    assert not found[:, 5:].any()
    assert pad_tokens(four, mesh) is four
    return [tuple(found.shape)]


def test_padding_until_ranks_divide_the_tokens() -> None:
    assert run_ranks(2, padded) == [[(2, 6, 3)]] * 2


def row_linear(shard_tokens: bool, bias: bool) -> None:
    """Against the whole module: 5 tokens, so that one rank's shard is padded."""
    mesh, rank = two_ranks()
    whole: Any = nn.Linear(6, 4, bias=bias)
    whole.weight.data = draw(4, 6, seed=2)
    if bias:
        whole.bias.data = draw(4, seed=3)
    x, weights = draw(2, 5, 6).requires_grad_(), draw(2, 5, 4, seed=1)
    expected = whole(x)
    (expected * weights).sum().backward()
    split = sharded(whole, mesh, row_parallel(shard_tokens))
    columns = slice(3 * rank, 3 * rank + 3)
    mine = x.detach()[..., columns].clone().requires_grad_()
    got = split(mine)
    if shard_tokens:
        assert got.shape == (2, 3, 4)
        got = redistribute(got, mesh, TOKENS, Replicate())[:, :5]
    torch.testing.assert_close(got, expected)
    (got * weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, x.grad[..., columns])
    torch.testing.assert_close(split.weight.grad.to_local(), whole.weight.grad[:, columns])
    if bias:
        torch.testing.assert_close(split.bias.grad.full_tensor(), whole.bias.grad)


@pytest.mark.parametrize("shard_tokens", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_matrix_split_by_columns(shard_tokens: bool, bias: bool) -> None:
    run_ranks(2, row_linear, shard_tokens, bias)


def embedding(padding: int | None) -> None:
    """A table of 7 rows: 4 on the first rank, 3 on the second."""
    mesh, rank = two_ranks()
    whole: Any = nn.Embedding(7, 3, padding_idx=padding)
    whole.weight.data = draw(7, 3, seed=2)  # the padding row too, so that it is looked up
    ids = torch.tensor([[0, 6, 3, 4], [5, 5, 1, 3]])
    weights = draw(2, 4, 3, seed=1)
    (whole(ids) * weights).sum().backward()
    split = sharded(whole, mesh, vocabulary_parallel())
    got = split(ids)
    torch.testing.assert_close(got, whole(ids))
    (got * weights).sum().backward()
    rows = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(split.weight.grad.to_local(), whole.weight.grad[rows])


@pytest.mark.parametrize("padding", [None, 3, 5])
def test_a_table_split_by_rows(padding: int | None) -> None:
    run_ranks(2, embedding, padding)


def local_norm(sum_gradients: bool) -> None:
    """A norm whose ranks see different tokens, or the same ones."""
    mesh, rank = two_ranks()
    whole = nn.LayerNorm(3)
    split = sharded(whole, mesh, replicated(sum_gradients))
    x = draw(2, 4, 3)
    whole(x).square().sum().backward()
    split(x[rank : rank + 1] if sum_gradients else x).square().sum().backward()
    for name in ("weight", "bias"):
        gradient = getattr(split, name).grad
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), getattr(whole, name).grad)
    try:
        split(torch.ones(2, 5))  # another width
    except RuntimeError:
        assert isinstance(split.weight.data, DTensor)  # as before the pass that failed
    else:
        raise AssertionError("a norm of 3 took 5")


@pytest.mark.parametrize("sum_gradients", [True, False])
def test_replicated_parameters_compute_with_local_parts(sum_gradients: bool) -> None:
    run_ranks(2, local_norm, sum_gradients)
