"""Tensors on their way through shared memory: bit-exact, aligned, apart; no room is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RolloutError
from engine.rollout.vllm.engine_weights import BucketEntry, SharedBuffer, bucket_entry

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(
    st.tuples(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])),
    max_size=8,
)


@given(tensors, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_tensors_come_out_as_they_went_in(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype
) -> None:
    sent = [torch.randint(0, 200, shape).to(kind) for shape, kind in kinds]
    entries: list[BucketEntry] = []
    end = 0
    for index, tensor in enumerate(sent):
        entries.append(bucket_entry(str(index), tensor, dtype, end))
        assert entries[-1].start >= end
        assert entries[-1].start % 64 == 0
        end = entries[-1].start + entries[-1].nbytes
    writer = SharedBuffer.create(max(end, 1))
    reader = SharedBuffer(writer.path, writer.size)
    writer.unlink()
    assert not Path(writer.path).exists()
    for piece, tensor in zip(entries, sent, strict=True):
        writer.write(piece, tensor)
    read = dict(reader.read(entries))
    assert list(read) == [piece.name for piece in entries]
    for tensor, got in zip(sent, read.values(), strict=True):
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_no_room_is_an_error_that_names_the_way_out() -> None:
    """A file in memory without room for its pages would end whoever writes to it (SIGBUS)."""
    before = set(Path("/dev/shm").glob("hybridflyte-weights-*"))
    with pytest.raises(RolloutError, match=r"no room for 1073741824 MB.*lower bucket_mb"):
        SharedBuffer.create(1 << 50)
    assert set(Path("/dev/shm").glob("hybridflyte-weights-*")) <= before
