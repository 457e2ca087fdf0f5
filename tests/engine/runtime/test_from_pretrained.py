"""`HybridActor.from_pretrained`: any causal LM folder; what is refused before weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import tiny_model
from transformers import AutoModelForCausalLM

from engine import HybridActor
from engine.errors import ConfigError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_actor_from_a_folder_is_saved_as_any_model(tiny_folder: Path, tmp_path: Path) -> None:
    actor = HybridActor.from_pretrained(
        tiny_folder, hybrid_config={"tp_size": 1, "fsdp_sharding": "HYBRID_SHARD"}
    )
    encoded = actor.tokenizer(["2+3=", "11+"], padding=True, return_tensors="pt")
    found = actor.generate(**encoded, max_new_tokens=6)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert torch.equal(found, plain.generate(**encoded, max_new_tokens=6))
    actor.save_pretrained(tmp_path)
    again = HybridActor.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.tokenizer is None
    assert next(again.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tp": 2}, r"no key 'tp'; its keys are dp_size, fsdp_size, tp_size, train_tp_size"),
        ({"tp_size": 0}, "tp_size=0"),
        ({"tp_size": 4, "fsdp_sharding": "FULL_SHARD"}, "torchrun --nproc-per-node 4"),
        ({"tp_size": 2, "rollout_tp_size": 1}, "training's is train_tp_size"),
        ({"fsdp_sharding": "SOME"}, "fsdp_sharding='SOME'.*HYBRID_SHARD"),
        ({"train_tp_size": 2, "fsdp_size": 2}, "torchrun with 4 processes"),
        ({"dp_size": 2, "fsdp_sharding": "HYBRID_SHARD"}, "dp_size=2 needs 2 ranks"),
        ({"rollout_tp_size": 2}, "rollout_tp_size=2 needs 2 ranks"),
    ],
)
def test_a_wrong_hybrid_config_is_named(
    tiny_folder: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        HybridActor.from_pretrained(tiny_folder, hybrid_config=values)


def test_wrong_folders_are_refused_before_weights_are_read(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    tiny_model("qwen2").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"the tokenizer has .* embedding of 97"):
        HybridActor.from_pretrained(folder, tokenizer=tiny_folder)
    with pytest.raises(ModelError, match="can't be loaded"):
        HybridActor.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"rollout\.engine='vlm' is unknown"):
        HybridActor.from_pretrained(tiny_folder, rollout_engine="vlm")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'max_seqs'"):
        HybridActor.from_pretrained(tiny_folder, rollout_options={"max_seqs": 4})
    with pytest.raises(ConfigError, match="dtype='float64'"):
        HybridActor.from_pretrained(tiny_folder, dtype=torch.float64)
    with pytest.raises(ModelError, match="does not exist"):
        HybridActor.from_pretrained(tmp_path / "nowhere")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    cut = weights | {name: weights[name][:50].clone()}
    save_file(cut, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="can't be loaded"):
        HybridActor.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("world_size", "said"),
    [
        ("2", "WORLD_SIZE=2 and no RANK, MASTER_ADDR"),
        ("two", "WORLD_SIZE='two', which is no whole number"),
    ],
)
@pytest.mark.slow
def test_an_environment_that_is_not_whole_is_named(
    tiny_folder: Path, world_size: str, said: str
) -> None:
    """In a process of its own: a process group that is there already would be used."""
    program = f"from engine import HybridActor; HybridActor.from_pretrained({str(tiny_folder)!r})"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"WORLD_SIZE": world_size},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert said in done.stderr
