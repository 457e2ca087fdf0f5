"""Model folders: round trips, and refusals that name the folder and what it lacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import TINY_MODEL, tiny_model
from transformers import AutoModelForCausalLM

from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, ModelError, StorageError
from engine.models import (
    build_model,
    check_context,
    check_vocabulary,
    create_critic_model,
    load_model,
    require_model_folder,
    save_model,
    vocabulary_and_context,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def test_saved_model_loads_in_transformers_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    save_model(model, tokenizer, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_tokenizer_splits_words_the_same_beside_a_model(tiny_folder: Path, tmp_path: Path) -> None:
    """AutoTokenizer would give a folder with a Qwen2 config another splitting of words."""
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.save_pretrained(tmp_path)  # without a model beside it
    alone = load_tokenizer(tmp_path)
    text = "12+34 = 46\n#### 46 what's up"
    assert tokenizer(text)["input_ids"] == alone(text)["input_ids"]
    assert tokenizer.get_vocab() == alone.get_vocab()
    assert tokenizer.backend_tokenizer.to_str() == alone.backend_tokenizer.to_str()


def test_weights_are_drawn_from_the_seed_alone(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (build_model(TINY_MODEL, tokenizer, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    assert first.get_input_embeddings().weight is first.get_output_embeddings().weight
    assert first.config.vocab_size == len(tokenizer)


def test_bfloat16_weights_keep_exact_rotary_frequencies(tiny_folder: Path) -> None:
    config = TINY_MODEL.model_copy(update={"dtype": "bfloat16"})
    model = build_model(config, load_tokenizer(tiny_folder), 0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert {p.dtype for p in load_model(tiny_folder, "bfloat16").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("remove", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights")],
)
def test_incomplete_folder(copy: Path, remove: str, message: str) -> None:
    (copy / remove).unlink()
    with pytest.raises(ModelError, match=message):
        load_model(copy)


def test_missing_folder_and_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        require_model_folder(tmp_path / "nowhere")
    require_model_folder("owner/name")


def test_cut_weights_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(copy)


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this ran",)


def test_a_pickle_of_tensors_loads_and_one_with_code_is_refused(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    load_model(copy)
    torch.save(tensors | {"more": Code()}, copy / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"could run code.*give the model's .safetensors"
    ) as caught:
        load_model(copy)
    assert "weights_only" not in str(caught.value)
    assert "this ran" not in capfd.readouterr().out


def test_weights_of_only_a_part_are_not_filled_with_noise(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of .*'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(copy)


def test_index_that_names_a_missing_shard(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks the weight files \['model-2.safetensors'\]"):
        load_model(copy)


@pytest.mark.parametrize(
    "text",
    ['{"weight_map": {"a": "mod', "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}'],
)
def test_an_index_that_is_not_whole(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        ModelError,
        match=rf"reward.model='{copy}' has a model.safetensors.index.json that can't be read",
    ):
        require_model_folder(copy, "reward.model")


def test_a_base_that_lacks_a_shard_is_named_as_one(copy: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(copy)}))
    with pytest.raises(ModelError, match=rf"the base of path='{adapter}'='{copy}' lacks the weig"):
        require_model_folder(adapter, "path")


def test_another_dtype_is_the_setting_s_fault(tiny_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.dtype='float64' is unknown; choose one of \['bfloat16', 'float16"
    ):
        load_model(tiny_folder, "float64")


def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(copy)
    with pytest.raises(ModelError, match="no configuration that can be read"):
        vocabulary_and_context(copy)


def test_saving_onto_a_file_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="it is a file"):
        save_model(load_model(tiny_folder), load_tokenizer(tiny_folder), tmp_path / "taken")


def test_vocabulary_and_context_checks(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    size, context = vocabulary_and_context(tiny_folder)
    assert (size, context) == (len(tokenizer), 64)
    check_vocabulary(size, tokenizer, "here")
    with pytest.raises(ModelError, match=f"{size} tokens but the model in here"):
        check_vocabulary(size - 1, tokenizer, "here")
    check_context(40, 24, context)
    with pytest.raises(ModelError, match=r"40 tokens and data.max_response_length=25"):
        check_context(40, 25, context)


def test_critic_is_a_copy_that_starts_at_zero() -> None:
    policy = tiny_model("qwen2").requires_grad_(False)
    critic = create_critic_model(policy)
    values = critic(torch.tensor([[5, 6, 7]]))
    assert values.shape == (1, 3)
    assert values.eq(0).all()
    before = policy.get_input_embeddings().weight.clone()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)
    assert torch.equal(policy.get_input_embeddings().weight, before)
    assert all(p.requires_grad for p in critic.parameters())
    assert not any(p.requires_grad for p in policy.parameters())
    assert sum(p.numel() for p in critic.parameters()) == policy.num_parameters() + 32 + 1


@pytest.fixture
def folder_with_code(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose own Python code leaves a file behind; the terminal would say yes."""
    code = f"open({str(tmp_path / 'code-was-run')!r}, 'w')\nclass Own: pass\n"
    (copy / "own.py").write_text(code)
    kinds = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": kinds}
    (copy / "config.json").write_text(json.dumps(config))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return copy


@pytest.mark.parametrize("load", [load_model, vocabulary_and_context, load_tokenizer])
def test_code_of_a_model_folder_is_never_run(
    folder_with_code: Path, tmp_path: Path, load: Callable[[Path], object]
) -> None:
    with pytest.raises(ModelError, match=r"code of its own, which is never run; give a .* itself"):
        load(folder_with_code)
    assert not (tmp_path / "code-was-run").exists()
