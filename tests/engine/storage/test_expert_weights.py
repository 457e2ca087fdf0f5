"""Experts' matrices: a module's tensors are read from files' matrices, and written as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.storage.weight_files import WeightFiles, file_tensors, stack_experts

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
