"""The policy as a folder: whole or absent, named by its content, readable by transformers."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import build, train
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.errors import RolloutError
from engine.rollout.server.weights import WeightFolders, checksum, find_tag, shapes
from engine.rollout.trainer_model import merged_weights
from engine.storage import weight_files

IDS = torch.tensor([[3, 14, 15, 9, 26]])


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(input_ids=IDS).logits
    return result


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # tied and untied heads
@pytest.mark.parametrize("shard_bytes", [4 << 30, 50_000])
def test_transformers_loads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, shard_bytes: int
) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", shard_bytes)
    model = build(family)
    train(model, steps=1)
    path = WeightFolders(str(tmp_path)).write(merged_weights(model), model, 3)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shard_bytes == 50_000)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path)), logits(model))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes(path) == expected


def test_adapters_are_merged(tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = build("qwen2")
    before = logits(model)
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.peft_config = {"default": LoraConfig(r=4)}
    path = WeightFolders(str(tmp_path)).write(merged_weights(model), build("qwen2"), 1)
    loaded = logits(AutoModelForCausalLM.from_pretrained(path))
    assert torch.allclose(loaded, logits(model), atol=1e-5)
    assert float((loaded - before).abs().max()) > 0.1


def test_a_tag_names_version_and_content(tmp_path: Path) -> None:
    folders, model = WeightFolders(str(tmp_path)), build("qwen2")
    first = folders.write(merged_weights(model), model, 1)
    assert folders.write(merged_weights(model), model, 1) == first
    later = folders.write(merged_weights(model), model, 2)
    assert later.name.rpartition("-")[2] == first.name.rpartition("-")[2] == checksum(first)
    train(model, steps=1)
    moved = folders.write(merged_weights(model), model, 2)
    assert moved.name != later.name
    assert find_tag(f'{{"id": "{moved}"}}') == moved.name


def test_a_folder_that_a_crash_tore_is_written_again(tmp_path: Path) -> None:
    folders, model = WeightFolders(str(tmp_path)), build("qwen2")
    path = folders.write(merged_weights(model), model, 1)
    (path / "model.safetensors").write_bytes(b"")
    assert folders.write(merged_weights(model), model, 1) == path
    assert path.name.endswith(checksum(path))


def test_a_disk_that_fills_up_is_an_error_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes, of which writes fail just as on a full disk."""
    folders, model = WeightFolders(str(tmp_path)), build("qwen2")
    before = folders.write(merged_weights(model), model, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RolloutError, match=r"version 4 could not be written to .*File too la"):
            folders.write(merged_weights(model), model, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [before]
    assert folders.write(merged_weights(model), model, 4).is_dir(), "once there is space again"


def test_weights_that_end_in_the_middle_leave_nothing(tmp_path: Path) -> None:
    def torn() -> Iterator[tuple[str, Tensor]]:
        yield from list(merged_weights(model))[:3]
        raise OSError(5, "Input/output error")

    model = build("qwen2")
    with pytest.raises(RolloutError, match=r"version 4 could not be written to .*Input/output"):
        WeightFolders(str(tmp_path)).write(torn(), model, 4)
    assert list(tmp_path.iterdir()) == []


def test_what_earlier_runs_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    model = build("qwen2")
    ours = tmp_path / "weights"
    for run in range(3):
        folders = WeightFolders(str(ours))
        for version in range(3):
            train(model, steps=1)
            latest = folders.write(merged_weights(model), model, 10 * run + version)
            os.utime(latest, ns=(0, run * 10 + version))
    torn = Path(tempfile.mkdtemp(prefix=".writing-", dir=ours))  # as a crash leaves it
    (torn / "model-00001.safetensors").write_bytes(b"x")
    kept = {path.name for path in ours.iterdir() if path.name.startswith("policy-v")}
    assert {name.split("-")[1] for name in kept} == {"v21", "v22"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [".writing-notes", "policy-v1", "policy-v1-0a1b2c3d-mine", "checkpoint"]
    for name in others:
        (ours / name).mkdir()
    (ours / "policy-v1-0a1b2c3d").write_text("a file")
    (ours / "policy-v2-0a1b2c3d").symlink_to(elsewhere)
    WeightFolders(str(ours))
    assert torn.is_dir(), "a rank that writes nothing removes nothing"
    train(model, steps=1)
    new = WeightFolders(str(ours)).write(merged_weights(model), model, 30)
    (before,) = (name for name in kept if name.startswith("policy-v22-"))
    links = ["policy-v1-0a1b2c3d", "policy-v2-0a1b2c3d"]
    assert {path.name for path in ours.iterdir()} == {new.name, before, *others, *links}
    assert elsewhere.is_dir()


def test_a_version_that_an_earlier_run_wrote_is_the_newest_when_written_again(
    tmp_path: Path,
) -> None:
    model = build("qwen2")
    first = WeightFolders(str(tmp_path)).write(merged_weights(model), model, 1)
    resumed = WeightFolders(str(tmp_path))
    assert resumed.write(merged_weights(model), model, 1) == first
    train(model, steps=1)
    second = resumed.write(merged_weights(model), model, 2)
    assert set(tmp_path.iterdir()) == {first, second}


def test_a_folder_that_can_t_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RolloutError, match=r"rollout.server.weights_dir='.*file/in' can't be used"):
        WeightFolders(str(tmp_path / "file" / "in"))


def test_others_can_read_it(tmp_path: Path) -> None:
    """The server may run as another user."""
    model = build("qwen2")
    path = WeightFolders(str(tmp_path)).write(merged_weights(model), model, 0)
    assert path.stat().st_mode & 0o755 == 0o755
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}
    own = WeightFolders("")
    assert own.root.stat().st_mode & 0o777 == 0o755
    own.close()


@given(st.text(max_size=40), st.integers(0, 10**9), st.binary(min_size=4, max_size=4), st.text())
def test_one_tag_is_found_in_any_answer(before: str, version: int, sum_: bytes, after: str) -> None:
    tag = f"policy-v{version}-{sum_.hex()}"
    assert find_tag(f"{before} {tag} {after}") == tag
    assert find_tag(f"{tag} {tag}") == tag
    assert find_tag(f"{tag} policy-v{version + 1}-{sum_.hex()}") is None
    assert find_tag(before.replace("policy-v", "")) is None
