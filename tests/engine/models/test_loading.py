"""Loading models: folders, threads, overrides, weights that are not there yet."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from thorough import and_slow
from tiny_engine import TINY_MODEL, tiny_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
)

from engine.config import LoRAConfig
from engine.config.training import OptimConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, ModelError, StorageError
from engine.models import (
    UnloadedModel,
    adapter_parameters,
    build_model,
    check_context,
    check_vocabulary,
    create_critic_model,
    high_learning_rate,
    load_model,
    load_policy_model,
    open_critic_model,
    open_model,
    open_policy_model,
    require_model_folder,
    save_model,
    vocabulary_and_context,
)
from engine.models.loading import check_overrides, link_model
from engine.models.lora import save_adapter
from engine.models.value_head import load_classifier
from engine.parallel.module_shards import named_tensors
from engine.runtime.apply_layout import load_shards
from engine.runtime.train_state import weights_fingerprint


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.mark.usefixtures("one_thread")
def test_saved_model_loads_in_transformers_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    save_model(model, tokenizer, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("one_thread")
def test_tokenizer_splits_words_the_same_beside_a_model(tiny_folder: Path, tmp_path: Path) -> None:
    """AutoTokenizer would give a folder with a Qwen2 config another splitting of words."""
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.save_pretrained(tmp_path)  # without a model beside it
    alone = load_tokenizer(tmp_path)
    text = "12+34 = 46\n#### 46 what's up"
    assert tokenizer(text)["input_ids"] == alone(text)["input_ids"]
    assert tokenizer.get_vocab() == alone.get_vocab()
    assert tokenizer.backend_tokenizer.to_str() == alone.backend_tokenizer.to_str()


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_bfloat16_weights_keep_exact_rotary_frequencies(tiny_folder: Path) -> None:
    config = TINY_MODEL.model_copy(update={"dtype": "bfloat16"})
    model = build_model(config, load_tokenizer(tiny_folder), 0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert {p.dtype for p in load_model(tiny_folder, "bfloat16").parameters()} == {torch.bfloat16}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("remove", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights")],
)
def test_incomplete_folder(copy: Path, remove: str, message: str) -> None:
    (copy / remove).unlink()
    with pytest.raises(ModelError, match=message):
        load_model(copy)


@pytest.mark.usefixtures("one_thread")
def test_missing_folder_and_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        require_model_folder(tmp_path / "nowhere")
    require_model_folder("owner/name")


@pytest.mark.usefixtures("one_thread")
def test_cut_weights_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(copy)


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this ran",)


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_weights_of_only_a_part_are_not_filled_with_noise(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of .*'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(copy)


@pytest.mark.usefixtures("one_thread")
def test_index_that_names_a_missing_shard(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks the weight files \['model-2.safetensors'\]"):
        load_model(copy)


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_a_base_that_lacks_a_shard_is_named_as_one(copy: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(copy)}))
    with pytest.raises(ModelError, match=rf"the base of path='{adapter}'='{copy}' lacks the weig"):
        require_model_folder(adapter, "path")


@pytest.mark.usefixtures("one_thread")
def test_another_dtype_is_the_setting_s_fault(tiny_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.dtype='float64' is unknown; choose one of \['bfloat16', 'float16"
    ):
        load_model(tiny_folder, "float64")


@pytest.mark.usefixtures("one_thread")
def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(copy)
    with pytest.raises(ModelError, match="no configuration that can be read"):
        vocabulary_and_context(copy)


@pytest.mark.usefixtures("one_thread")
def test_saving_onto_a_file_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="it is a file"):
        save_model(load_model(tiny_folder), load_tokenizer(tiny_folder), tmp_path / "taken")


@pytest.mark.usefixtures("one_thread")
def test_a_rate_for_a_small_new_model_is_too_high_for_a_pretrained_one(tmp_path: Path) -> None:
    small = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    small.save_pretrained(tmp_path / "small")
    small.vocab_size = 1 << 20  # 67M elements in the embedding
    small.save_pretrained(tmp_path / "large")
    rate, none, adapters = OptimConfig(lr=5e-4), LoRAConfig(), LoRAConfig(rank=8)
    warning = high_learning_rate(tmp_path / "large", rate, none)
    assert re.match(
        r"optim.lr=0.0005 .* the 134M pretrained parameters of .*1e-6 to 1e-5$", warning
    )
    assert not high_learning_rate(tmp_path / "small", rate, none)
    assert not high_learning_rate(tmp_path / "large", rate, adapters)
    assert not high_learning_rate(tmp_path / "large", OptimConfig(lr=1e-4), none)
    assert not high_learning_rate(tmp_path / "large", OptimConfig(lr=0.1, optimizer="SGD"), none)
    warning = high_learning_rate(tmp_path / "large", OptimConfig(lr=2e-3), adapters)
    assert warning.endswith("set it to 1e-5 to 2e-4 for adapters")


def test_vocabulary_and_context_checks(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    size, context = vocabulary_and_context(tiny_folder)
    assert (size, context) == (len(tokenizer), 64)
    check_vocabulary(size, tokenizer, "here")
    with pytest.raises(
        ModelError,
        match=f"with id {size - 1}, but the model in here has an embedding of {size - 1}",
    ):
        check_vocabulary(size - 1, tokenizer, "here")
    check_context(40, 24, context)
    with pytest.raises(ModelError, match=r"40 tokens and data.max_response_length=25"):
        check_context(40, 25, context)


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("load", [load_model, vocabulary_and_context, load_tokenizer])
def test_code_of_a_model_folder_is_never_run(
    folder_with_code: Path, tmp_path: Path, load: Callable[[Path], object]
) -> None:
    with pytest.raises(ModelError, match=r"code of its own, which is never run; give a .* itself"):
        load(folder_with_code)
    assert not (tmp_path / "code-was-run").exists()


THREADS = 4


@pytest.mark.usefixtures("one_thread")
def test_threads_that_load_leave_each_other_alone(tiny_folder: Path) -> None:
    wanted = {name: load_model(tiny_folder, name) for name in ("float32", "bfloat16")}
    together = threading.Barrier(THREADS)

    def load(index: int) -> list[tuple[str, PreTrainedModel]]:
        together.wait(60)
        names = ["float32", "bfloat16"] * 6
        return [(name, load_model(tiny_folder, name)) for name in names[index % 2 :]]

    with ThreadPoolExecutor(THREADS) as pool:
        for loaded in pool.map(load, range(THREADS)):
            for name, model in loaded:
                for ours, theirs in zip(
                    model.state_dict().values(), wanted[name].state_dict().values(), strict=True
                ):
                    assert ours.dtype == theirs.dtype
                    assert torch.equal(ours, theirs)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", ["adapters", "weights"])
def test_threads_draw_alone_and_give_the_generator_back(tiny_folder: Path, part: str) -> None:
    lora, tokenizer = LoRAConfig(rank=4), load_tokenizer(tiny_folder)

    def draw() -> dict[str, Tensor]:
        if part == "weights":
            return build_model(TINY_MODEL, tokenizer, 3).state_dict()
        return load_policy_model(tiny_folder, "float32", lora, 3).state_dict()

    expected = draw()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    together = threading.Barrier(THREADS)

    def draw_often(index: int) -> list[dict[str, Tensor]]:
        together.wait(60)
        return [draw() for _ in range(4)]

    with ThreadPoolExecutor(THREADS) as pool:
        for drawn in itertools.chain(*pool.map(draw_often, range(THREADS))):
            assert all(torch.equal(drawn[name], tensor) for name, tensor in expected.items())
    assert torch.equal(torch.get_rng_state(), before)


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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_critic_starts_from_the_backbone(tmp_path: Path, family: str, dtype: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    same(
        filled(open_critic_model(tmp_path, dtype)),
        create_critic_model(load_model(tmp_path, dtype)).eval(),
    )


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_refusals_are_those_of_a_model_loaded_whole(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    rewrite(folder, lambda t: {n: v for n, v in t.items() if "layers.1.mlp" not in n})
    with pytest.raises(ModelError, match="lacks 3 of the model's weights"):
        open_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard of"}))
    with pytest.raises(ModelError, match="can't be loaded as a causal language model"):
        open_model(folder)


def test_the_linked_model_is_the_same_with_the_changed_value(
    tiny_folder: Path, tmp_path: Path
) -> None:
    changes = check_overrides(
        str(tiny_folder), {"model_config": {"rms_norm_eps": 0.5}, "rope_theta": "7e1"}
    )
    link_model(str(tiny_folder), changes, tmp_path / "model")
    before, after = load_model(tiny_folder), load_model(tmp_path / "model")
    assert after.config.rms_norm_eps == 0.5
    assert after.config.rope_parameters["rope_theta"] == 70.0
    assert all(map(torch.equal, before.parameters(), after.parameters()))
    assert (tmp_path / "model" / "tokenizer.json").is_symlink()
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(before(ids).logits, after(ids).logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_droput": 0.1}, "is no key of a qwen2 .* did you mean attention_dropout?"),
        ({"attention_dropout": 0.1}, "without dropout; leave it out or set 0.0"),
        ({"intermediate_size": 64}, "changes the layout of the weights, first model"),
        ({"num_hidden_layers": 1}, "gives no model: "),
        ({"num_attention_heads": 3}, "leave out what sizes the model|gives no model"),
        ({"hidden_act": "nonsense"}, "gives no model"),
    ],
)
def test_what_can_t_be_overridden_is_one_sentence(
    tiny_folder: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_overrides(str(tiny_folder), changes)
    assert "\n" not in str(caught.value)


def test_kernels_cost_a_note(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check_overrides(str(tiny_folder), {"attn_implementation": "eager"}) == {}
    assert "attn_implementation has no effect here" in caplog.text
