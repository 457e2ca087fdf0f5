"""Deltas of tensors: what comes out is the new version, bit for bit, and no dearer than it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import weight_transfer
from engine.errors import WeightSyncError
from engine.weight_transfer import DeltaChunk

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
POOL = ThreadPoolExecutor(2)
INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
HEADER = weight_transfer.pack([DeltaChunk(0, 0, 1, 1, np.empty(0, np.uint8))]).numel() - 8


def bits(tensor: Tensor) -> np.ndarray:
    return weight_transfer.integer_view(tensor).numpy()


def through(old: Tensor, new: Tensor) -> tuple[Tensor, list[DeltaChunk], int]:
    """`old` with the delta on it, as it came over the wire; the chunks, and their bytes."""
    sent = weight_transfer.pack(list(weight_transfer.encode(0, bits(old), bits(new), POOL)))
    chunks = list(weight_transfer.unpack(sent.clone()))
    target = old.clone()
    weight_transfer.apply_delta(chunks, [weight_transfer.integer_view(target)], POOL)
    return target, chunks, sent.numel()


@st.composite
def versions(draw: Any) -> tuple[Tensor, Tensor]:
    """Two versions of one tensor: any bits, of which few, most or all change by little or much."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.sampled_from([0, 1, 7, 8, 300, 3000]))
    seed = draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.97, 1.0]))
    steps = draw(st.sampled_from([1, 127, 128, 129, 32767, 32768, 2**31 - 1, 2**63 - 1]))
    some_far = draw(st.booleans())
    random = np.random.default_rng(seed)
    if dtype is torch.bool:
        old = torch.from_numpy(random.random(size) < 0.5)
        return old, old ^ torch.from_numpy(random.random(size) < share)
    kind = INTEGERS[dtype.itemsize]
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    was = random.integers(least, most, size, kind, endpoint=True)
    by = random.integers(max(-steps, least), min(steps, most), size, kind, endpoint=True)
    if some_far:
        far = random.random(size) < 0.01
        by[far] = random.integers(least, most, int(far.sum()), kind, endpoint=True)
    by[random.random(size) >= share] = 0
    with np.errstate(over="ignore"):
        now = was + by
    return torch.from_numpy(was).view(dtype), torch.from_numpy(now).view(dtype)


@given(versions())
def test_any_bits_come_out_as_they_went_in(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    found, chunks, size = through(old, new)
    assert np.array_equal(bits(found), bits(new))
    assert (not chunks) == np.array_equal(bits(old), bits(new))
    assert size <= 8 + HEADER * len(chunks) + new.nbytes, "never dearer than the tensor itself"


def test_special_numbers_keep_their_bits() -> None:
    quiet = torch.tensor([0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32)
    numbers = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 1.0, -1.0])
    values = torch.cat([quiet.view(torch.float32), numbers])
    for shift in range(1, len(values)):
        other = values.roll(shift)
        found, _, _ = through(values, other)
        assert np.array_equal(bits(found), bits(other))
    found, chunks, _ = through(torch.zeros(4), -torch.zeros(4))
    assert chunks
    assert np.signbit(found.numpy()).all()
    assert not through(quiet.view(torch.float32), quiet.view(torch.float32))[1], "a NaN is itself"


@pytest.mark.parametrize(
    ("share", "bytes_a_number"), [(0.002, 0.01), (0.05, 0.105), (0.4, 0.53), (1, 1.0)]
)
def test_few_and_small_changes_take_few_bytes(share: float, bytes_a_number: float) -> None:
    count = 100_000
    draw = torch.Generator().manual_seed(0)
    old = torch.randn(count, generator=draw).bfloat16()
    moved = torch.rand(count, generator=draw) < share
    new = (old.view(torch.int16) + moved.to(torch.int16)).view(torch.bfloat16)
    found, [_], size = through(old, new)
    assert torch.equal(found, new)
    assert size <= count * bytes_a_number + HEADER + 8


def test_unrelated_numbers_are_no_larger_than_they_are() -> None:
    old, new = torch.randn(5000), torch.randn(5000) * 1e9
    found, [_], size = through(old, new)
    assert torch.equal(found, new)
    assert size <= new.nbytes + HEADER + 8


def test_large_tensors_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "CHUNK", 64)
    old = torch.randn(1000)
    new = old.clone()
    new[[3, 63, 64, 200, 999]] *= 1.0001
    found, chunks, _ = through(old, new)
    assert torch.equal(found, new)
    assert [chunk.start for chunk in chunks] == [0, 64, 192, 960]
    assert chunks[-1].count == 1000 - 960


@pytest.mark.parametrize("cut", [0, 5, 8, 20, -1])
def test_a_delta_that_ends_too_early_or_late_is_refused(cut: int) -> None:
    old, new = torch.zeros(100), torch.ones(100)
    sent = weight_transfer.pack(list(weight_transfer.encode(0, bits(old), bits(new), POOL)))
    with pytest.raises(WeightSyncError, match="a delta of"):
        list(weight_transfer.unpack(sent[:cut]))
    with pytest.raises(WeightSyncError, match="a delta of"):
        list(weight_transfer.unpack(torch.cat([sent, sent[:1]])))


@pytest.mark.gpu
@given(versions())
def test_tensors_on_a_gpu_come_out_alike(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    chunks = list(weight_transfer.encode(0, bits(old), bits(new), POOL))
    target = old.cuda()
    weight_transfer.apply_delta(chunks, [weight_transfer.integer_view(target)], POOL)
    assert np.array_equal(bits(target.cpu()), bits(new))
