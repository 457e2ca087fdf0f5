"""What engine/parallel uses of torch beyond its documented interface: a new torch fails here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, stage
from torch.distributed.tensor.placement_types import _StridedShard

from engine.parallel.pipeline_parallel import _ScheduledStage

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
