"""Statistics over vocabulary shards are those of the whole vocabulary, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import and_slow
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.algorithms.divergences import full_kl
from engine.models.vocabulary_head import token_statistics
from engine.parallel import vocab_parallel as vocab
from engine.parallel.vocab_parallel import VocabParallelStatistics, vocabulary_bounds

GRADIENTS = ("log_probs", "entropy", "full_kl")


@given(vocabulary=st.integers(1, 300), shards=st.integers(1, 9))
def test_bounds_are_the_chunks_of_a_sharded_tensor(vocabulary: int, shards: int) -> None:
    chunks = list(torch.arange(vocabulary).chunk(shards))
    chunks += [torch.empty(0)] * (shards - len(chunks))
    for index, chunk in enumerate(chunks):
        start, stop = vocabulary_bounds(vocabulary, shards, index)
        assert torch.equal(torch.arange(start, stop), chunk.long())


def whole(
    logits: Tensor, targets: Tensor, temperature: float, reference: Tensor | None
) -> dict[str, Tensor]:
    """The statistics of whole rows, in float64."""
    logits = logits.double()
    log_probs = (logits / temperature).log_softmax(-1)
    out = {
        "log_probs": log_probs.gather(1, targets[:, None])[:, 0],
        "entropy": -(log_probs.exp() * log_probs.clamp_min(-1e300)).sum(-1),
        "sum_pi_squared": log_probs.exp().square().sum(-1),
    }
    if reference is not None:
        out["full_kl"] = full_kl(logits, reference.double(), temperature=temperature)
    return out


def draw_case(data: Any) -> dict[str, Any]:
    tokens, entries = data.draw(st.integers(0, 25)), data.draw(st.integers(1, 70))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    scale = data.draw(st.sampled_from([0.1, 3.0, 30.0]))
    targets = torch.randint(entries, (tokens,), generator=draw)
    logits = (torch.randn(tokens, entries, generator=draw) * scale).to(dtype)
    reference = (torch.randn(tokens, entries, generator=draw) * scale).to(dtype)
    if data.draw(st.booleans()):  # entries that neither can sample, never the target
        never = torch.rand(tokens, entries, generator=draw) < 0.3
        never[torch.arange(tokens), targets] = False
        logits, reference = (x.masked_fill(never, -torch.inf) for x in (logits, reference))
    return {
        "logits": logits,
        "reference": reference if data.draw(st.booleans()) else None,
        "targets": targets,
        "temperature": data.draw(st.sampled_from([1.0, 0.6, 1.7])),
        "weights": torch.randn(3, tokens, generator=draw, dtype=torch.float64),
        "padding": data.draw(st.integers(0, 3)),
    }


def check_case(case: dict[str, Any], mesh: DeviceMesh) -> None:
    """This rank's shard of a case against the whole; all ranks come here with the same case."""
    logits, reference = case["logits"], case["reference"]
    shard = VocabParallelStatistics.of(logits.shape[1], mesh)

    def local(x: Tensor | None) -> Tensor | None:
        """This shard's columns, and some of padding after them."""
        if x is None:
            return None
        waste = torch.full((x.shape[0], case["padding"]), 99.0, dtype=x.dtype)
        return torch.cat([x[:, shard.start : shard.stop], waste], 1)

    ours, theirs = local(logits), logits.double().requires_grad_()
    assert ours is not None
    ours.requires_grad_()
    got = shard(
        ours,
        case["targets"],
        case["temperature"],
        entropy=True,
        entropy_gradient=True,
        sum_pi_squared=True,
        reference_logits=local(reference),
    )
    wanted = whole(theirs, case["targets"], case["temperature"], reference)
    assert got.keys() == wanted.keys()
    tight = logits.dtype == torch.float64
    for name, value in got.items():
        assert value.dtype == (torch.float64 if tight else torch.float32)
        close(value, wanted[name], 1e-10 if tight else 2e-5)
    (mine,) = torch.autograd.grad(mixture(got, case["weights"]), ours)
    (full,) = torch.autograd.grad(mixture(wanted, case["weights"]), theirs)
    width = shard.stop - shard.start
    assert mine.dtype == logits.dtype
    assert mine[:, width:].eq(0).all()
    tolerance = 1e-10 if tight else 1e-4 if logits.dtype == torch.float32 else 3e-2
    close(mine[:, :width], full[:, shard.start : shard.stop], tolerance)


def mixture(statistics: dict[str, Tensor], weights: Tensor) -> Tensor:
    """A loss that pulls differently at each token by all statistics that have a gradient."""
    named = [(name, w) for name, w in zip(GRADIENTS, weights, strict=True) if name in statistics]
    return torch.stack([(statistics[name] * w).sum() for name, w in named]).sum()


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)


def many_cases() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    vocab._CHUNK_TOKENS = 7  # so that rows are cut

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def every_rank_draws_the_same(data: Any) -> None:
        check_case(draw_case(data), mesh)

    try:
        every_rank_draws_the_same()
    finally:
        vocab._CHUNK_TOKENS = 512


@pytest.mark.parametrize("ranks", and_slow([1, 2], [4]))
def test_shards_together_give_the_whole_vocabularys_statistics(ranks: int) -> None:
    run_ranks(ranks, many_cases)


def traffic() -> tuple[list[int], int, int]:
    """Elements in each collective of a forward pass, collectives in the backward, tokens."""
    tokens, entries = 600, 4000
    shard = VocabParallelStatistics.of(entries, init_device_mesh("cpu", (2,)))
    logits = torch.randn(tokens, shard.stop - shard.start, requires_grad=True)
    targets = torch.randint(entries, (tokens,), generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    others = ("all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast")
    saved = {name: getattr(dist, name) for name in others}
    try:
        dist.all_reduce = counting
        for name in others:
            setattr(dist, name, None)  # calling it fails
        out = shard(logits, targets, 1.0, entropy=True, entropy_gradient=True)
        forward = list(sizes)
        (out["log_probs"] + out["entropy"]).sum().backward()
    finally:
        dist.all_reduce = all_reduce
        for name, function in saved.items():
            setattr(dist, name, function)
    return forward, len(sizes) - len(forward), tokens


def test_a_few_numbers_a_token_travel_and_none_in_backward() -> None:
    for forward, in_backward, tokens in run_ranks(2, traffic):
        assert in_backward == 0
        assert sum(forward) <= 8 * tokens


def test_what_was_not_asked_for_is_not_there() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=draw).requires_grad_()
    targets = torch.tensor([0, 8, 3, 3])
    shard = VocabParallelStatistics(0, 9, None)
    assert shard(logits, targets, 1.0).keys() == {"log_probs"}
    ours = shard(logits, targets, 0.5, entropy=True, sum_pi_squared=True)
    plain = token_statistics(logits, targets, 0.5, entropy=True, sum_pi_squared=True)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-6)
        assert ours[name].requires_grad == value.requires_grad
    (ours["log_probs"] + ours["entropy"]).sum().backward()
    gradient = logits.grad
    (only,) = torch.autograd.grad(plain["log_probs"].sum(), logits)
    torch.testing.assert_close(gradient, only)  # entropy gave none
