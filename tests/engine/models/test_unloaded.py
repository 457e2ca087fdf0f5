"""A model without storage is the one that transformers loads, but for its weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from thorough import and_slow
from tiny_engine import tiny_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from engine.config import LoRAConfig
from engine.errors import ModelError
from engine.models import (
    UnloadedModel,
    adapter_parameters,
    create_critic_model,
    load_model,
    load_policy_model,
    open_critic_model,
    open_model,
    open_policy_model,
)
from engine.models.lora import save_adapter
from engine.models.value_head import load_classifier
from engine.parallel.module_shards import named_tensors
from engine.runtime.apply_layout import load_shards
from engine.runtime.train_state import weights_fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "rotary tables that are scaled": ("llama", {"rope_parameters": SCALED}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "a tied head": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", {}),
    "gpt2": ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}),
}


def random_model(name: str) -> PreTrainedModel:
    family, changes = MODELS[name]
    shape = {} if family == "gpt2" else SHAPE
    config = AutoConfig.for_model(family, **(shape | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def filled(source: Any) -> nn.Module:
    assert isinstance(source, UnloadedModel)
    assert all(p.is_meta for p in source.module.parameters())
    load_shards(source.module, source, CPU, CPU)
    module: nn.Module = source.module
    return module


def same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(mine) == list(theirs)  # tied ones once
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
        assert mine[name].dtype == tensor.dtype
        assert mine[name].requires_grad == tensor.requires_grad
    ours, others = dict(one.named_buffers()), dict(other.named_buffers())
    assert list(ours) == list(others)
    for name, buffer in others.items():
        assert torch.equal(ours[name], buffer), name
    assert list(named_tensors(one)) == list(named_tensors(other))
    assert {n: m.training for n, m in one.named_modules()} == {
        n: m.training for n, m in other.named_modules()
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_filled_it_is_what_transformers_loads(tmp_path: Path, name: str, dtype: str) -> None:
    model = random_model(name)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole, source = load_model(tmp_path, dtype), open_model(tmp_path, dtype)
    assert weights_fingerprint(source) == weights_fingerprint(whole)
    found: Any = filled(source)
    same(found, whole)
    assert type(found) is type(whole)
    assert found.config.to_dict() == whole.config.to_dict()
    assert found.generation_config.to_dict() == whole.generation_config.to_dict()
    assert found.name_or_path == whole.name_or_path
    ids = torch.arange(3, 11)[None]
    assert torch.equal(found(ids).logits, whole(ids).logits)


@pytest.mark.parametrize(
    ("name", "dtype"),
    and_slow(
        [("llama", "float32"), ("a tied head", "bfloat16"), ("gpt2", "float32")],
        [("llama", "bfloat16"), ("a tied head", "float32"), ("gpt2", "bfloat16")],
    ),
)
def test_adapters_come_with_their_values(tmp_path: Path, name: str, dtype: str) -> None:
    base, adapter, lora = tmp_path / "base", tmp_path / "adapter", LoRAConfig(rank=2, dropout=0.1)
    random_model(name).save_pretrained(base)
    whole = load_policy_model(base, dtype, lora, seed=3)
    source = open_policy_model(base, dtype, lora, seed=3)
    assert weights_fingerprint(source) == weights_fingerprint(whole)
    same(filled(source), whole)
    for parameter in adapter_parameters(whole).values():
        torch.nn.init.normal_(parameter)
    save_adapter(whole, adapter)
    again = LoRAConfig(from_folder=True)
    same(filled(open_policy_model(adapter, dtype, again)), load_policy_model(adapter, dtype, again))
    found = filled(open_critic_model(base, dtype, lora, seed=3))
    same(found, create_critic_model(load_model(base, dtype), lora, seed=3).eval())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_critic_starts_from_the_backbone(tmp_path: Path, family: str, dtype: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    same(
        filled(open_critic_model(tmp_path, dtype)),
        create_critic_model(load_model(tmp_path, dtype)).eval(),
    )


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_critic_starts_from_a_reward_model_with_its_head(tmp_path: Path, family: str) -> None:
    config = tiny_model(family).config
    config.num_labels, config.pad_token_id = 1, 0
    scorer = AutoModelForSequenceClassification.from_config(config).eval()
    scorer.save_pretrained(tmp_path)
    whole = create_critic_model(load_classifier(tmp_path, "float32")).eval()
    found: Any = filled(open_critic_model(tmp_path, "float32"))
    same(found, whole)
    ids = torch.arange(3, 11)[None]
    torch.testing.assert_close(found(ids)[:, -1:], scorer(ids).logits)
    lora: Any = filled(open_critic_model(tmp_path, "float32", LoRAConfig(rank=2)))
    torch.testing.assert_close(lora(ids)[:, -1:], scorer(ids).logits)


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def test_names_of_the_backbone_alone_are_known(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, without_prefix)
    same(filled(open_model(tmp_path)), load_model(tmp_path))


def to_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def both_ends(folder: Path) -> None:
    """A tied model's file that has the head too, as torch's own would."""
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})


@pytest.mark.parametrize("change", [to_pickle, both_ends])
def test_what_can_t_be_read_in_slices_is_loaded_whole(
    tiny_folder: Path, tmp_path: Path, change: Any
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    change(folder)
    whole = open_model(folder)
    assert isinstance(whole, PreTrainedModel)
    same(whole, load_model(tiny_folder))
    lora = LoRAConfig(rank=2)
    same(open_policy_model(folder, "float32", lora), load_policy_model(folder, "float32", lora))
    if importlib.util.find_spec("bitsandbytes") is not None:
        lora = LoRAConfig(rank=2, quantize="int8")
        same(open_policy_model(folder, "float32", lora), load_policy_model(folder, "float32", lora))


def test_refusals_are_those_of_a_model_loaded_whole(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    rewrite(folder, lambda t: {n: v for n, v in t.items() if "layers.1.mlp" not in n})
    with pytest.raises(ModelError, match="lacks 3 of the model's weights"):
        open_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard of"}))
    with pytest.raises(ModelError, match="can't be loaded as a causal language model"):
        open_model(folder)
