"""Process groups, and what of torch's insides is relied on."""

from __future__ import annotations

import inspect
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, stage
from torch.distributed.tensor.placement_types import _StridedShard

from engine.errors import WorkerError
from engine.parallel.layout import AXES, Layout
from engine.parallel.pipeline_parallel import _ScheduledStage
from engine.parallel.process_groups import Ranks, init_process_group

CHOICES = [("dp", "fsdp"), ("fsdp", "sp"), ("tp",), ("pp",), AXES]


def members(layout: Layout) -> list[tuple[list[int], int, int]]:
    """For each choice of axes: who this rank sums with, its number among them, and the largest of
    their ranks."""
    ranks, found = Ranks.form(layout), []
    for axes in CHOICES:
        mine = torch.zeros(layout.world_size)
        mine[ranks.rank] = 1
        together = ranks.sum_over(mine, axes)
        assert mine.sum() == 1  # what went in is as it was
        who = together.nonzero().flatten().tolist()
        found.append((who, ranks.index(*axes), ranks.max_over(ranks.rank, axes)))
    return found


@pytest.mark.parametrize("layout", [Layout(fsdp=2, tp=2), Layout(pp=2, dp=2), Layout(dp=2, sp=2)])
def test_groups_are_those_of_the_layout(layout: Layout) -> None:
    for rank, found in enumerate(run_ranks(4, members, layout)):
        for axes, (who, index, largest) in zip(CHOICES, found, strict=True):
            assert who == next(group for group in layout.groups(*axes) if rank in group)
            assert who[index] == rank
            assert largest == max(who)


def test_a_rank_alone_needs_no_process_group() -> None:
    ranks = Ranks.form(Layout())
    assert ranks.group("tp", "dp") is None
    assert ranks.sum_over(torch.tensor(3.0), ["dp"]) == 3
    assert ranks.max_over(7, ["dp"]) == 7


def test_ranks_that_have_not_met_are_named() -> None:
    with pytest.raises(WorkerError, match="fsdp=2 needs 2 ranks, 1 have met"):
        Ranks.form(Layout(fsdp=2))


def test_a_rank_that_never_comes_ends_the_wait() -> None:
    with pytest.raises(WorkerError, match=r"could not meet the others at 127\.0\.0\.1:\d+ within"):
        init_process_group("127.0.0.1:29617", 0, 2, rendezvous_s=1.0)


DEADLINE_S = 2.0


def waits_alone(address: str, axes: tuple[str, ...]) -> tuple[float, str]:
    """Rank 0 sums over `axes`, all others are alive and stay away: its seconds and the error."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    init_process_group(address, rank, world_size, 60.0, DEADLINE_S)
    ranks = Ranks.form(Layout(dp=2, fsdp=2))
    group = ranks.group(*axes)  # all ranks make the group
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["rank 0 is done"], timedelta(seconds=30))
        return 0.0, ""
    assert group is not None
    started = time.perf_counter()
    try:
        ranks.sum_over(torch.ones(1), axes)
        text = ""
    except RuntimeError as error:
        text = str(error)
    seconds = time.perf_counter() - started
    store.set("rank 0 is done", "")
    return seconds, text


@pytest.mark.parametrize("axes", [("dp",), ("fsdp",), ("dp", "fsdp")])
def test_every_group_has_the_deadline_that_the_ranks_joined_with(axes: tuple[str, ...]) -> None:
    """Torch gives a mesh's groups its own 30 minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    seconds, text = run_ranks(4, waits_alone, address, axes)[0]
    assert "imed out" in text
    assert DEADLINE_S / 2 < seconds < 20


CHECKED = "2.13"


ADVICE = (
    f"engine/parallel was written against torch {CHECKED}: compare what it overrides and calls "
    "there with this torch, run `pytest -m '' tests/engine/parallel`, then change this test"
)


SCHEDULE = "self stage n_microbatches loss_fn args_chunk_spec kwargs_chunk_spec "


PARAMETERS: list[tuple[Any, str]] = [  # functions, and the names of their parameters
    (DeviceMesh._concatenate, "device_mesh_list"),
    (DeviceMesh._flatten, "self mesh_dim_name backend_override"),
    (FSDPModule.set_gradient_divide_factor, "self factor"),
    (FSDPModule.set_force_sum_reduction_for_comms, "self enable"),
    (
        FSDPModule.set_reduce_scatter_unused_params,
        "self reduce_scatter_unused_params recurse",
    ),
    (FSDPModule.reset_iter_state, "self"),
    (AsyncCollectiveTensor.wait, "self"),
    (_StridedShard.__init__, "self dim split_factor sf"),
    (dist.distributed_c10d._get_default_group, ""),
    (dist.distributed_c10d._set_pg_timeout, "timeout group"),
    (Schedule1F1B.__init__, SCHEDULE + "output_merge_spec scale_grads"),
    (ScheduleGPipe.__init__, SCHEDULE + "output_merge_spec scale_grads"),
    (PipelineStage.clear_runtime_states, "self"),
    (stage._RecvInfo.__init__, "self input_name source buffer tensor_meta is_root_arg"),
]


OVERRIDDEN = [
    name
    for name, one in vars(_ScheduledStage).items()
    if inspect.isfunction(one) and hasattr(PipelineStage, name)
]


ATTRIBUTES = "_runtime_validate args_recv_info grad_recv_info fwd_cache bwd_cache has_backward"


def test_the_version_of_torch_is_the_one_that_was_checked() -> None:
    assert torch.__version__.startswith(f"{CHECKED}."), f"torch is {torch.__version__}; {ADVICE}"


@pytest.mark.parametrize(
    ("function", "names"), PARAMETERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_functions_take_the_parameters_that_they_are_given(function: Any, names: str) -> None:
    found = list(inspect.signature(function).parameters)
    assert found == names.split(), f"{function.__qualname__} takes {found}; {ADVICE}"


@pytest.mark.parametrize("name", [n for n in OVERRIDDEN if not n.startswith("__")])
def test_overridden_methods_of_a_stage_have_torch_s_parameters(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (_ScheduledStage, PipelineStage))
    assert list(ours.parameters) == list(theirs.parameters), f"PipelineStage.{name}: {ADVICE}"


@pytest.mark.parametrize("name", ATTRIBUTES.split())
def test_a_stage_has_the_attributes_that_are_read_and_set(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(stage), f"PipelineStage has no {name}; {ADVICE}"


def test_every_method_that_must_be_torch_s_is_overridden() -> None:
    assert {
        "forward_one_chunk",
        "backward_one_chunk",
        "get_fwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_recv_ops",
        "get_bwd_send_ops",
        "perform_reduce_grad",
        "_post_metadata_inference_cleanup",
    } <= set(OVERRIDDEN), ADVICE
