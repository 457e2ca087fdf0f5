"""Safetensors read box by box, whatever their dtype, and written a few tensors at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.storage import weight_files
from engine.storage.weight_files import WeightFiles, spread_sample, write_weights


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
