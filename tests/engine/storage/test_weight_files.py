"""A model's safetensors files: slices, parts, and experts' matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.storage import weight_files
from engine.storage.weight_files import (
    WeightFiles,
    file_tensors,
    spread_sample,
    stack_experts,
    write_weights,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("files")
    tensors = {
        "matrix": torch.randn(11, 7, generator=draw),
        "cube": torch.randn(4, 5, 3, generator=draw),
        "vector": torch.randn(9, generator=draw).bfloat16(),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, folder / "all.safetensors")
    return folder / "all.safetensors"


@given(data=st.data())
def test_a_box_is_that_of_the_tensor(saved: Path, data: st.DataObject) -> None:
    files, whole = WeightFiles([saved]), load_file(saved)
    name = data.draw(st.sampled_from(sorted(whole)))
    start, size = [], []
    for length in whole[name].shape:
        begin = data.draw(st.integers(0, length - 1))
        start.append(begin)
        size.append(data.draw(st.integers(1, length - begin)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    found = torch.empty(size, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "BUCKET_BYTES", data.draw(st.sampled_from([1, 60, 1 << 20])))
        files.read(name, start, found)
    box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    assert torch.equal(found, whole[name][box].to(dtype))
    assert files.shapes[name] == tuple(whole[name].shape)
    assert torch.equal(files.sample(name), spread_sample(whole[name]))


@pytest.mark.parametrize("file_bytes", [1 << 20, 200])
def test_what_is_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path, file_bytes: int
) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", file_bytes)
    whole = load_file(saved)
    write_weights(iter(whole.items()), tmp_path)
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert (len(paths) > 1) == (file_bytes == 200)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (len(paths) > 1)
    files = WeightFiles(paths)
    assert files.shapes.keys() == whole.keys()
    for name, tensor in whole.items():
        found = torch.empty_like(tensor)
        files.read(name, (0,) * tensor.dim(), found)
        assert torch.equal(found, tensor)


E, W, H = 3, 4, 5


@pytest.mark.parametrize(
    ("model_type", "block", "names"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_any_box_of_a_stack_is_read(
    tmp_path: Path, model_type: str, block: str, names: tuple[str, str, str]
) -> None:
    up, down = torch.randn(E, 2 * W, H), torch.randn(E, H, W)
    router = torch.randn(E, H)
    own = "model.layers.0.mlp"
    module = {
        f"{own}.experts.gate_up_proj": up,
        f"{own}.experts.down_proj": down,
        f"{own}.gate.weight": router,
        "lm_head.weight": torch.randn(7, H),
    }
    cut = dict(file_tensors(model_type, module.items()))
    there = f"model.layers.0.{block}"
    assert torch.equal(cut[f"{there}.experts.1.{names[1]}.weight"], up[1, W:])
    assert torch.equal(cut[f"{there}.experts.2.{names[2]}.weight"], down[2])
    assert cut.keys() == {
        *(f"{there}.experts.{e}.{name}.weight" for e in range(E) for name in names),
        f"{there}.gate.weight",
        "lm_head.weight",
    }
    save_file({name: t.contiguous() for name, t in cut.items()}, tmp_path / "a.safetensors")
    files = WeightFiles([tmp_path / "a.safetensors"])
    stack_experts(files, model_type, module)
    for name, tensor in module.items():
        assert files.shapes[name] == tuple(tensor.shape)
        got = torch.empty_like(tensor)
        files.read(name, (0,) * tensor.dim(), got)
        assert torch.equal(got, tensor)
    for start, size in (
        ((1, 0, 0), (2, 2 * W, H)),
        ((0, W - 1, 2), (E, 3, 2)),
        ((2, 5, 0), (1, 3, H)),
    ):
        got = torch.empty(size)
        files.read(f"{own}.experts.gate_up_proj", start, got)
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        assert torch.equal(got, up[box])


def test_other_models_keep_their_names(tmp_path: Path) -> None:
    named = [("model.layers.0.mlp.gate_up_proj.weight", torch.zeros(2, 2)), ("head", torch.ones(1))]
    assert [name for name, _ in file_tensors("phi3", named)] == [name for name, _ in named]
