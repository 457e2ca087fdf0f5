"""Weights of a server, sent or as folders."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer, Handler, connect, serving, status
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import build, make_prompts, reference_log_probs, train
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams
from engine.rollout.server import ServerEngine
from engine.rollout.server.weights import WeightFolders, checksum, find_tag, shapes
from engine.rollout.trainer_model import merged_weights
from engine.storage import weight_files

PROMPTS = make_prompts(2, seed=3)


PARAMS = SamplingParams(n=2, max_new_tokens=6, seed=5)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer(build("qwen2"))) as server:
        yield server


def reloads(fake: FakeServer) -> list[dict[str, Any]]:
    return [body for _, path, body in fake.seen if path == "/reload"]


def check_serves(engine: ServerEngine, model: nn.Module, version: int) -> None:
    """Assert that completions are of `model` and say so."""
    for c in engine.generate(PROMPTS, PARAMS):
        expected = reference_log_probs(model, PROMPTS[c.prompt_index], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
        assert c.policy_version == engine.policy_version == version


def test_each_version_is_brought_as_a_folder(fake: FakeServer, tmp_path: Path) -> None:
    model = build("qwen2")
    engine = connect(fake, model, weights_dir=str(tmp_path))
    for version in (1, 2, 5):
        train(model, steps=2)
        engine.update_weights(model, version)
        check_serves(engine, model, version)
    asked = reloads(fake)
    assert [body["version"] for body in asked] == [0, 1, 2, 5]
    assert [body["tag"].split("-")[1] for body in asked] == ["v0", "v1", "v2", "v5"]
    assert all(body["path"] == str(tmp_path / body["tag"]) for body in asked)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {asked[-2]["tag"], asked[-1]["tag"]}, "the one before may still be read"
    engine.close()
    assert {path.name for path in tmp_path.iterdir()} == kept, "the folder is the user's"


def test_a_folder_of_its_own_is_removed(fake: FakeServer) -> None:
    engine = connect(fake, build("qwen2"))
    folder = Path(reloads(fake)[0]["path"])
    assert folder.is_dir()
    engine.close()
    assert not folder.parent.exists()


def test_a_server_that_loads_slowly_is_waited_for(fake: FakeServer) -> None:
    model = build("qwen2")
    engine = connect(fake, model)
    fake.load_delay_s = 0.7
    train(model, steps=2)
    started = time.monotonic()
    engine.update_weights(model, 1)
    assert time.monotonic() - started >= 0.7
    check_serves(engine, model, 1)
    engine.close()


def test_a_server_that_never_loads_is_given_up_and_nothing_served(fake: FakeServer) -> None:
    model = build("qwen2")
    engine = connect(fake, model, timeout_s=3.0)
    fake.load_delay_s = 60.0
    train(model, steps=2)
    with pytest.raises(RolloutError, match=r"policy version 1: .*within rollout.server.timeout_s"):
        engine.update_weights(model, 1)
    with pytest.raises(RolloutError, match=r"can't serve: its update to policy version 1 failed"):
        engine.generate(PROMPTS, PARAMS)
    fake.load_delay_s = 0.0
    engine.update_weights(model, 1)
    check_serves(engine, model, 1)
    engine.close()


def test_a_reload_that_fails_stops_serving_until_one_succeeds(fake: FakeServer) -> None:
    model = build("qwen2")
    engine = connect(fake, model)
    fake.reload_fault = status(500, "no space on the device")
    train(model, steps=2)
    with pytest.raises(RolloutError, match=r"could not take policy version 1: .*no space on the"):
        engine.update_weights(model, 1)
    with pytest.raises(RolloutError, match="can't serve"):
        engine.generate(PROMPTS, PARAMS)
    fake.reload_fault = None
    engine.update_weights(model, 1)
    check_serves(engine, model, 1)
    engine.close()


def half_loaded(model: nn.Module) -> None:
    """The first half of the parameters as they should be, the others as they were before."""
    old = dict(build("qwen2").named_parameters())
    with torch.no_grad():
        for name, parameter in list(model.named_parameters())[13:]:
            parameter.copy_(old[name])


def test_a_mixture_under_the_right_tag_is_found(fake: FakeServer) -> None:
    model = build("qwen2")
    engine = connect(fake, model)
    fake.spoil = half_loaded
    train(model, steps=20)
    with pytest.raises(RolloutError, match=r"version 1: .*serves another model or other weights"):
        engine.update_weights(model, 1)
    with pytest.raises(RolloutError, match="can't serve"):
        engine.generate(PROMPTS, PARAMS)
    fake.spoil = lambda model: None
    engine.update_weights(model, 1)
    check_serves(engine, model, 1)
    engine.close()


def test_other_weights_than_were_brought_are_found_before_serving(fake: FakeServer) -> None:
    """A server that was restarted, or is a version behind."""
    model = build("qwen2")
    engine = connect(fake, model)
    train(model, steps=2)
    engine.update_weights(model, 1)
    asked = fake.count("/v1/completions")
    for fake.tag in ("", "policy-v0-0a1b2c3d"):
        said = f"says that it serves {fake.tag or 'no tag'} when a rollout of policy-v1-"
        with pytest.raises(RolloutError, match=said):
            engine.generate(PROMPTS, PARAMS)
    assert fake.count("/v1/completions") == asked
    engine.update_weights(model, 1)
    check_serves(engine, model, 1)
    engine.close()


def test_weights_that_change_during_a_rollout_cost_its_completions(fake: FakeServer) -> None:
    def other_weights(handler: Handler) -> bool:
        handler.fake.tag = "policy-v7-0a1b2c3d"
        return False

    engine = connect(fake, build("qwen2"))
    fake.faults = [other_weights]
    with pytest.raises(RolloutError, match=r"serves policy-v7-0a1b2c3d when .* ends.*dropped"):
        engine.generate(PROMPTS, PARAMS)
    engine.close()


def test_a_fixed_policy_says_that_it_is_one(fake: FakeServer) -> None:
    model = build("qwen2")
    engine = connect(fake, model, weights="none")
    check_serves(engine, model, 0)
    engine.update_weights(model, 0)
    with pytest.raises(RolloutError, match=r"weights are fixed .*policy is now at version 1"):
        engine.update_weights(model, 1)
    engine.close()
    engine = connect(fake, model, weights="none", allow_fixed_policy=True)
    before = engine.generate(PROMPTS, PARAMS)
    train(model, steps=2)
    engine.update_weights(model, 1)
    assert engine.generate(PROMPTS, PARAMS) == before
    assert engine.policy_version == 0, "completions name the weights that they are of"
    assert reloads(fake) == []
    engine.close()


def test_modules_keep_their_modes_when_weights_arrive(fake: FakeServer) -> None:
    model = build("qwen2").train()
    frozen: Any = model.get_submodule("model.layers.0")
    frozen.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    engine = connect(fake, model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    engine.close()


def _rank_that_makes_engines(url: str) -> tuple[int, int]:
    """How many groups there are before and after two engines; the last one's end before it."""
    torch.set_num_threads(1)
    model = build("qwen2")
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    for last in (False, True):
        engine = connect(FakeServer(model, url=url), model)
        torch.distributed.barrier()
        if last:
            torch.distributed.destroy_process_group(engine._servers._group)
        engine.close()
        engine.close()
    return before, len(groups)


def test_a_closed_engine_leaves_no_group_but_the_default_one(fake: FakeServer) -> None:
    """Also one that is closed after its group."""
    assert run_ranks(2, _rank_that_makes_engines, fake.url) == [(1, 1), (1, 1)]


def _rank(url: str, folder: str) -> tuple[list[Any], str]:
    """One of two ranks: three versions, the last of which the server refuses to load."""
    torch.set_num_threads(1)
    model = build("qwen2")
    engine = connect(FakeServer(model, url=url), model, weights_dir=folder)
    train(model, steps=2)
    engine.update_weights(model, 1)
    done = engine.generate(PROMPTS, PARAMS)
    torch.distributed.barrier()  # rank 0's next folder is not this rollout's
    train(model, steps=2)
    with pytest.raises(RolloutError) as failure:
        engine.update_weights(model, 2)
    engine.close()
    return done, str(failure.value)


def test_ranks_bring_weights_once_and_fail_together(fake: FakeServer, tmp_path: Path) -> None:

    def third_is_refused(handler: Handler) -> bool:
        if handler.fake.count("/reload") <= 2:
            return False
        return status(507, "full")(handler)

    fake.reload_fault = third_is_refused
    (first, why), (second, also) = run_ranks(2, _rank, fake.url, str(tmp_path))
    assert [body["version"] for body in reloads(fake)][:2] == [0, 1]
    assert first == second, "the same prompt numbers draw the same on every rank"
    assert why == also
    assert "could not take policy version 2" in why
    assert "full" in why


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
