"""`model.dtype`: what auto is where, what contradicts it, and weights that don't depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_engine import TINY_MODEL, write_tiny_folder

from engine.config import RLConfig
from engine.errors import ConfigError
from engine.models import load_model, resolve_dtype, saved_dtype
from engine.trainers.auto_placement import model_dtype


@pytest.fixture(params=["amx", "avx512_bf16", "neither"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine without a GPU whose processor has these instructions for bfloat16."""
    kind = str(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: kind == "amx")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: kind == "avx512_bf16")
    return kind


def test_auto_is_what_the_hardware_computes_in(instructions: str) -> None:
    wanted = "float32" if instructions == "neither" else "bfloat16"
    assert resolve_dtype("auto", 96) == wanted
    assert resolve_dtype("auto", 4096, compute_dtype="bfloat16") == wanted
    assert resolve_dtype("auto", 4096, gpu=True) == "bfloat16"  # in another machine
    assert resolve_dtype("auto", 32) == "float32"
    assert resolve_dtype("auto", 4096, compute_dtype="float32") == "float32"
    for dtype in ("float32", "bfloat16", "float16"):
        assert resolve_dtype(dtype, 96) == dtype


def test_auto_asks_the_device_that_the_actor_gets(
    tmp_path: Path, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4}
    folder = write_tiny_folder(tmp_path, TINY_MODEL.model_copy(update=shape))
    own = "float32" if instructions == "neither" else "bfloat16"

    def chosen(**trainer: object) -> str:
        return model_dtype("auto", folder, RLConfig.model_validate({"trainer": trainer}))

    assert chosen(placement="ray") == chosen(placement="local") == own
    gpus = {"roles": ["actor", "rollout", "reference"], "gpus": 1.0}
    assert chosen(pools=[gpus, {"roles": ["reward"]}]) == "bfloat16"
    assert chosen(pools=[gpus | {"gpus": 0.0}, {"roles": ["reward"], "gpus": 1.0}]) == own


def test_reduced_weights_are_computed_with_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"compute_dtype=float32 with model\.dtype=bfloat16"):
        resolve_dtype("bfloat16", 512, compute_dtype="float32")
    with pytest.raises(ConfigError, match=r"compute_dtype=bfloat16 with model\.dtype=float16"):
        resolve_dtype("float16", 512, compute_dtype="bfloat16")
    assert resolve_dtype("bfloat16", 512, compute_dtype="bfloat16") == "bfloat16"
    assert resolve_dtype("float32", 512, compute_dtype="bfloat16") == "float32"
    with pytest.raises(ConfigError, match=r"model\.dtype='half' is unknown; choose auto or"):
        resolve_dtype("half", 512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_from_scratch_is_the_float32_one_rounded(tmp_path: Path, dtype: str) -> None:
    exact = load_model(write_tiny_folder(tmp_path / "exact"))
    reduced = TINY_MODEL.model_copy(update={"dtype": dtype})
    folder = write_tiny_folder(tmp_path / "reduced", reduced)
    assert (saved_dtype(tmp_path / "exact"), saved_dtype(folder)) == ("float32", dtype)
    for name, parameter in load_model(folder, dtype).named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).to(getattr(torch, dtype)))
