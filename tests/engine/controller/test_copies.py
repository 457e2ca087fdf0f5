"""A batch between two roles on Ray is copied into the object store, and read where it lies."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probe_worker import Probe

from engine.batch import Batch
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_batch_of_64_mib_is_copied_once() -> None:
    placement = Placement((Pool(("maker",), cpus=0.5), Pool(("taker",), cpus=0.5)))
    with launch(placement, [RoleSpec("maker", Probe), RoleSpec("taker", Probe)]) as roles:
        made = roles.maker.make(64)
        where, size, total = roles.taker.where(made).result()
    assert size == 64 << 20
    assert total == pytest.approx(64 * (1 << 18))
    assert "/dev/shm" in where or "plasma" in where


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@given(dtype=st.sampled_from(DTYPES), rows=st.integers(1, 4), stride=st.integers(1, 3))
def test_what_travels_arrives_as_it_was(dtype: torch.dtype, rows: int, stride: int) -> None:
    values = (torch.arange(rows * 6).reshape(rows, 6) % 5)[:, ::stride].to(dtype)
    batch = Batch({"x": values, "y": torch.rand(rows)}, {"c": [{"a": i} for i in range(rows)]})
    back = pickle.loads(pickle.dumps(batch, protocol=5))
    assert back.names == batch.names
    for name in batch.names:
        assert back[name].dtype == batch[name].dtype
        assert torch.equal(back[name], batch[name])
    assert list(back.columns["c"]) == list(batch.columns["c"])
