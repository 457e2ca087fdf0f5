"""State dicts to files and back, and the state of random number generators."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.format import read_state, write_state
from engine.checkpoint.state_dict import (
    CpuStager,
    device_states,
    extract_tensors,
    insert_tensors,
    process_rng,
    safetensors_bytes,
    set_process_rng,
)
from engine.errors import CheckpointError, DivergedError
from engine.storage.folder import Folder

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) - draw(st.integers(0, 9))
    tensor = numbers.to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False)
state_dicts = st.dictionaries(
    st.text(alphabet="abc/.$", min_size=1, max_size=2),
    st.recursive(
        plain | tensors(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=2), inner)
        ),
        max_leaves=8,
    ),
    max_size=3,
)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other
        assert type(one) is type(other)


@given(state_dicts)
def test_a_tree_comes_back_bit_for_bit(tree: dict[str, Any]) -> None:
    values, groups = CpuStager().stage(tree)
    loaded = {}
    for group, content in groups.items():
        data = b"".join(bytes(chunk) for chunk in safetensors_bytes(content, {"format": "pt"}))
        loaded[group] = safetensors.torch.load(data)
    assert_equal(insert_tensors(json.loads(json.dumps(values)), loaded), tree)


def test_files_are_mapped_by_the_library_in_mixed_widths(tmp_path: Path) -> None:
    tree = {
        "part": {str(d): torch.ones(3, dtype=d) for d in reversed(DTYPES)},
        "x": torch.tensor(2.5),
        "pair": (1, 2.5),
    }
    folder = Folder(tmp_path)
    written = write_state(folder, "actor-00000-of-00001", *extract_tensors(tree))
    assert written.tensor_bytes == 3 * (8 + 4 + 2 + 2 + 8 + 4 + 2 + 1 + 1 + 1) + 4
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {name: file.size for name, file in written.files.items()}
    got = read_state(folder, "actor-00000-of-00001", written.files).state_dict()
    assert_equal(got, tree | {"pair": [1, 2.5]})
    direct = safetensors.torch.load_file(tmp_path / "actor-00000-of-00001.part.safetensors")
    part: dict[str, torch.Tensor] = tree["part"]  # type: ignore[assignment]
    assert_equal(direct, {f"actor.rank0.part.{name}": t for name, t in part.items()})


def test_a_stager_keeps_its_values_and_its_memory() -> None:
    live, stager = {"m": {"w": torch.zeros(8)}, "n": 1}, CpuStager()
    _, first = stager.stage(live)
    place = first["m"]["w"].data_ptr()
    live["m"]["w"] += 1  # type: ignore[index]
    assert first["m"]["w"].tolist() == [0.0] * 8
    _, second = stager.stage(live)
    assert second["m"]["w"].tolist() == [1.0] * 8
    assert second["m"]["w"].data_ptr() == place
    _, third = stager.stage({"m": {"w": torch.zeros(9)}})
    assert third["m"]["w"].shape == (9,)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": {"b": object()}}, r"state a\.b is a object, which a checkpoint can't hold"),
        ({"a": {1: 2}}, r"state a is a dict.*string keys"),
        ({"a": {"$tensor": 2}}, r"state a is a dict"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, r"state a has dtype torch\.complex64"),
        ({"a": {"b.c": torch.zeros(1), "b": {"c": torch.zeros(1)}}}, r"state a\.b\.c is there tw"),
    ],
)
def test_what_can_t_be_held_is_named(tree: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        extract_tensors(tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_copied(dtype: torch.dtype, value: float) -> None:
    weight = torch.ones(7, dtype=dtype)
    weight[3] = value
    with pytest.raises(DivergedError, match=r"^head\.weight has values that are not finite: train"):
        CpuStager().stage({"model": {"wte.weight": torch.ones(2), "head.weight": weight}})
    CpuStager().stage({"best": {"score": weight}})  # a state that holds no weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_large_weights_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    largest = (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max
    weight = torch.full((9,), largest, dtype=dtype)
    _, groups = CpuStager().stage({"model": {"weight": weight}})
    assert torch.equal(groups["model"]["weight"], weight)


def test_fewer_devices_take_the_first_states_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = [torch.full((16,), i, dtype=torch.uint8) for i in range(3)]
    with caplog.at_level(logging.WARNING):
        chosen = device_states(saved, 2)
    assert [int(state[0]) for state in chosen] == [0, 1]
    assert "generators of 3 GPUs and this process sees 2" in caplog.text
    chosen[0].zero_().add_(7)
    assert int(saved[0][0]) == 0, "the checkpoint's own are left alone"


@pytest.mark.parametrize("devices", [2, 4])
def test_as_many_devices_or_more_take_over_all(
    devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved = [torch.full((16,), i, dtype=torch.uint8) for i in range(2)]
    with caplog.at_level(logging.WARNING):
        assert [int(state[0]) for state in device_states(saved, devices)] == [0, 1]
    assert caplog.text == ""


def test_a_checkpoint_of_a_process_with_more_gpus_than_any_machine_has_is_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = process_rng()
    wanted = torch.rand(3)
    here = state.get("cuda", [])
    spare = [torch.zeros(16, dtype=torch.uint8)] * 2
    with caplog.at_level(logging.WARNING):
        set_process_rng(state | {"cuda": [*here, *spare]})
    assert torch.equal(torch.rand(3), wanted)
    assert "the others are left out" in caplog.text
