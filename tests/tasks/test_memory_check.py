"""What can't fit a profile's GPUs is refused in `plan`, with what would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import LoRAConfig, ParallelConfig, load_config, parse_config
from engine.config.pipeline import PipelineConfig
from engine.errors import PlacementError
from engine.parallel.layout import Layout
from engine.planner import Candidate
from engine.planner.memory import estimate, usable_bytes
from engine.planner.resources import GIB
from engine.stages.profiles import PROFILES, apply_profile, check_memory, cluster, read_profile
from engine.trainers.auto_placement import sft_memory, sft_workload, workload

SHAPES: dict[str, dict[str, Any]] = {
    "7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def folder(tmp_path: Path, size: str) -> str:
    shape = SHAPES[size] | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


def documented(path: str, profile: str, **model: Any) -> PipelineConfig:
    """`rlhf_full --model PATH --profile PROFILE`."""
    values = load_config("preset:full").model_dump(exclude_unset=True)
    values["model"] = {"path": path, **model}
    return apply_profile(parse_config(values), PROFILES[profile])


@pytest.mark.parametrize("profile", ["8xA100", "2x8xH100"])
def test_the_preset_for_7b_fits_eight_gpus(tmp_path: Path, profile: str) -> None:
    values = load_config("preset:gsm8k-7b-8gpu").model_dump()
    values["model"]["path"] = folder(tmp_path, "7B")
    check_memory(apply_profile(parse_config(values), PROFILES[profile]), PROFILES[profile])


def test_7b_fits_two_nodes_of_eight_80_gb_gpus_in_every_stage(tmp_path: Path) -> None:
    path = folder(tmp_path, "7B")
    config = documented(path, "2x8xH100")
    check_memory(config, PROFILES["2x8xH100"])
    there = cluster(PROFILES["2x8xH100"]).machines[0]
    assert there.gpu_memory == 80 * GIB
    rl = config.rl
    assert Layout.of(rl.actor.parallel) == Layout(dp=2, fsdp=8)
    work = workload(
        rl,
        model_path=path,
        lora=LoRAConfig(),
        dtype="bfloat16",
        max_response_length=config.data.max_response_length,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
    )
    candidate = Candidate(
        Layout.of(rl.actor.parallel),
        rl.rollout.tensor_parallel_size,
        rl.actor.max_tokens_per_micro_batch,
        activation_checkpointing=rl.actor.parallel.activation_checkpointing,
    )
    assert not config.sft.skip
    warm = sft_workload(
        config.sft,
        model_path=path,
        lora=LoRAConfig(),
        dtype="bfloat16",
        max_response_length=config.data.max_response_length,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
    )
    tokens = config.sft.max_tokens_per_micro_batch
    for memory in (
        estimate(work, candidate, gpu=True),
        sft_memory(warm, config.sft.parallel, tokens),
    ):
        assert memory.peak <= usable_bytes(there.gpu_memory), memory
        assert memory.host <= usable_bytes(there.memory // there.gpus), memory


def with_sft(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return config.model_copy(update={"sft": config.sft.model_copy(update=changes)})


def test_a_warm_start_that_can_t_fit_is_refused_with_the_layout_that_would(tmp_path: Path) -> None:
    machines = PROFILES["2x8xH100"]
    config = documented(folder(tmp_path, "7B"), machines.name)
    copies = ParallelConfig(dp=16)
    said = (
        r"with sft.parallel dp=16 a GPU keeps 1\d\d GiB .* has 80; sft.parallel dp=4 fsdp=4 would"
    )
    with pytest.raises(PlacementError, match=said):
        check_memory(with_sft(config, parallel=copies), machines)
    adapters = documented(folder(tmp_path, "7B"), machines.name, lora={"rank": 16})
    check_memory(with_sft(adapters, parallel=copies), machines)
    large = with_sft(documented(folder(tmp_path, "70B"), machines.name), parallel=copies)
    said = r"sft.parallel fsdp=16 activation_checkpointing=true offload_optimizer=true would"
    with pytest.raises(PlacementError, match=said):
        check_memory(large, machines)
    few = read_profile("{base: 8xA100, gpus: 2, cpus: 22}")
    with pytest.raises(PlacementError, match=r"sft can't fit: .* no fsdp layout of 2 GPUs would"):
        check_memory(with_sft(large, parallel=ParallelConfig(dp=2)), few)


def test_what_can_t_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    large = with_sft(documented(folder(tmp_path, "70B"), "2x8xH100"), skip=True)
    with pytest.raises(PlacementError) as refused:
        check_memory(large, PROFILES["2x8xH100"])
    said = str(refused.value)
    assert "rl can't fit: with rl.actor.parallel dp=2 fsdp=8 a GPU keeps" in said
    assert "\n" not in said
    print(said)


def test_an_evaluation_that_can_t_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    machines = PROFILES["2x8xH100"]
    large = documented(folder(tmp_path, "70B"), machines.name)
    check_memory(large, machines, trains=False)  # on four of a machine's GPUs
    pairs = large.evaluate.model_copy(update={"parallel": ParallelConfig(dp=8)})
    said = (
        r"evaluate.parallel dp=8 a GPU keeps 131 GiB .* has 80; evaluate.parallel dp=2 tp=4 would"
    )
    with pytest.raises(PlacementError, match=said):
        check_memory(large.model_copy(update={"evaluate": pairs}), machines, trains=False)
    small = read_profile("{cpus: 8, memory_gib: 64, gpus: 2, accelerator: A10G}")
    with pytest.raises(PlacementError, match=r"evaluate can't fit: .* 131 GiB .* 2 GPUs of 24"):
        check_memory(large, small, trains=False)


def test_what_is_not_known_is_let_through(tmp_path: Path) -> None:
    path = folder(tmp_path, "70B")
    config = parse_config({"model": {"path": path}})
    for profile in ("laptop", "one-gpu"):
        check_memory(config, PROFILES[profile])
    check_memory(parse_config({}), PROFILES["2x8xH100"])  # a model from scratch


def test_a_gpu_kind_of_one_s_own_is_counted_with(tmp_path: Path) -> None:
    """A kind that the table has not, and one that it has otherwise."""
    sizes = "{cpus: 64, memory_gib: 500, gpus: 4, accelerator: %s}"
    config = parse_config({"model": {"path": folder(tmp_path, "7B")}, "sft": {"skip": True}})
    unknown = read_profile(sizes % "L20")
    check_memory(apply_profile(config, unknown), unknown)  # nobody knows its memory
    small = {"memory_gib": 12, "tflops": 119, "memory_gbs": 864}
    for kind in ("L20", "H100"):
        values = {"rl": {"trainer": {"gpu_kinds": {kind: small}}}}
        values |= config.model_dump(include={"model": {"path"}, "sft": {"skip"}})
        machines = read_profile(sizes % kind)
        with pytest.raises(PlacementError, match=r"rl can't fit: .* and has 12"):
            check_memory(apply_profile(parse_config(values), machines), machines)
