"""LoRA adapters, new and continued."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from tiny_engine import (
    completions_batch,
    outputs_with_kl,
    random_completions,
    response_log_probs,
    save_family,
    tiny_model,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from engine.config import LoRAConfig, OptimConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, ModelError
from engine.models import (
    BaseModelView,
    adapter_parameters,
    add_adapters,
    create_critic_model,
    has_adapters,
    load_model,
    load_policy_model,
    require_model_folder,
    resolve_lora,
    save_model,
    vocabulary_and_context,
)
from engine.models.lora import merged_copy
from engine.models.quantize import quantize_linears
from engine.rollout.native.decoding_weights import UnsupportedModel, bind
from engine.rollout.protocol import SamplingParams, create_engine
from engine.runtime.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


LORA = LoRAConfig(rank=4, alpha=8.0)


FAMILIES = ["qwen2", "llama", "gpt2"]


def adapted(model: PreTrainedModel, moved: float = 0.3, **changes: Any) -> PreTrainedModel:
    """`model` with adapters whose B is random and not 0."""
    add_adapters(model, LORA.model_copy(update=changes), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if ".lora_B." in name:
                parameter.normal_(0.0, moved, generator=draw)
    return model.eval()


@torch.no_grad()
def log_probs(model: PreTrainedModel | BaseModelView) -> Tensor:
    return response_log_probs(model, completions_batch(*random_completions(5)), 1.0)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_are_trained(family: str) -> None:
    model = tiny_model(family)
    before = log_probs(model)
    add_adapters(model, LORA, seed=0)
    model.eval()
    assert torch.equal(log_probs(model), before), "new adapters add nothing"
    start = copies(model)
    optimizer = Optimizer(model, OptimConfig(lr=1e-2), 3)
    for _ in range(3):
        batch = completions_batch(*random_completions(5))
        response_log_probs(model, batch, 1.0).sum().backward()
        assert optimizer.step() > 0
    own = set(adapter_parameters(model))
    assert len(own) == 2 * 2 * (4 if family == "gpt2" else 7)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == own
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, start[name]) == (name not in own), name


def test_adapters_follow_the_seed_alone_and_are_float32_beside_bfloat16() -> None:
    models = [tiny_model("qwen2").to(torch.bfloat16) for _ in range(3)]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    for model, seed in zip(models, (5, 5, 6), strict=True):
        add_adapters(model, LORA, seed)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = (adapter_parameters(model) for model in models)
    assert {p.dtype for p in first.values()} == {torch.float32}
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert models[0].get_input_embeddings().weight.dtype == torch.bfloat16
    assert log_probs(models[0].eval()).isfinite().all()


def test_targets_by_name_and_scale() -> None:
    model = adapted(tiny_model("qwen2"), target_modules=("q_proj", "up_proj"))
    modules = {name.split(".lora_")[0].split(".")[-1] for name in adapter_parameters(model)}
    assert modules == {"q_proj", "up_proj"}
    layer: Any = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 32)
    low = x @ layer.lora_A.default.weight.T @ layer.lora_B.default.weight.T
    torch.testing.assert_close(layer(x) - layer.base_layer(x), low * (8.0 / 4))


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"target_modules=\('q_pro',\) can't be adapted in a Qwen2"
    ):
        add_adapters(tiny_model("qwen2"), LORA.model_copy(update={"target_modules": ("q_pro",)}), 0)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_a_tied_matrix_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"target_modules=\['{target}'\].*one matrix"):
        add_adapters(tiny_model("qwen2"), LORA.model_copy(update={"target_modules": (target,)}), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_is_the_start_model_bit_for_bit_without_weights_of_its_own(family: str) -> None:
    start = log_probs(tiny_model(family))
    policy = adapted(tiny_model(family))
    count = sum(p.numel() for p in policy.parameters())
    base = BaseModelView(policy)
    ours = log_probs(policy)
    assert (ours - start).abs().max() > 0.01
    assert torch.equal(log_probs(base), start)
    assert torch.equal(log_probs(policy), ours)
    assert sum(p.numel() for p in policy.parameters()) == count
    with pytest.raises(ZeroDivisionError), base.weights():
        raise ZeroDivisionError
    assert torch.equal(log_probs(policy), ours), "adapters are back on after an error"
    assert all(p.requires_grad for p in adapter_parameters(policy).values())


def test_full_kl_to_the_base_has_the_gradient_of_one_to_a_copy() -> None:
    """Two micro-batches, so that gradients must also survive the base's next turn."""
    batch = completions_batch(*random_completions(6))
    grads = []
    for shared in (True, False):
        policy = adapted(tiny_model("qwen2"))
        reference = BaseModelView(policy) if shared else tiny_model("qwen2")
        for rows in (range(3), range(3, 6)):
            kl = outputs_with_kl(policy, batch.rows(rows), 0.8, reference).full_kl
            assert kl is not None
            kl.sum().backward()
        grads.append([p.grad for p in adapter_parameters(policy).values()])
        assert all(p.grad is None for n, p in policy.named_parameters() if ".lora_" not in n)
    assert max(float(g.abs().max()) for g in grads[0]) > 0.01
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
def test_saved_as_a_plain_model_and_as_an_adapter(
    tiny_folder: Path, tmp_path: Path, targets: Any
) -> None:
    policy, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    if targets != "all-linear":  # an adapted head needs a matrix of its own
        policy.config.tie_word_embeddings = False
        policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach() + 0.01)
        save_model(policy, tokenizer, tmp_path / "start")
        policy = load_model(tmp_path / "start")
    policy = adapted(policy, target_modules=targets)
    before = copies(policy)
    save_model(policy, tokenizer, tmp_path / "out")
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert has_adapters(policy)
    wanted = log_probs(policy)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert plain.state_dict().keys() == load_model(tiny_folder).state_dict().keys()
    torch.testing.assert_close(log_probs(plain), wanted, atol=1e-4, rtol=0)
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out/adapter").eval()
    assert torch.equal(log_probs(theirs.base_model.model), wanted)
    again = load_policy_model(tmp_path / "out/adapter", "float32")
    assert not has_adapters(again)
    torch.testing.assert_close(log_probs(again), wanted, atol=1e-4, rtol=0)
    assert load_tokenizer(tmp_path / "out/adapter").get_vocab() == tokenizer.get_vocab()
    assert vocabulary_and_context(tmp_path / "out/adapter") == (len(tokenizer), 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_copy_computes_what_the_policy_does(family: str) -> None:
    policy = adapted(tiny_model(family))
    plain = merged_copy(policy)
    assert not has_adapters(plain)
    torch.testing.assert_close(log_probs(plain), log_probs(policy), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_of_a_policy_starts_from_the_merged_weights_and_trains_all(family: str) -> None:
    policy = adapted(tiny_model(family))
    before = copies(policy)
    critic = create_critic_model(policy)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = policy.base_model(input_ids=ids).last_hidden_state
        got: Any = critic.backbone(input_ids=ids)
        torch.testing.assert_close(got.last_hidden_state, wanted, atol=1e-4, rtol=0)
        assert not any("lora" in name for name, _ in critic.named_parameters())
        assert all(p.requires_grad for p in critic.parameters())
        for parameter in critic.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == set(
        adapter_parameters(policy)
    )


def test_gpt2_is_saved_with_its_transposed_matrices(tmp_path: Path) -> None:
    folder = save_family("gpt2", tmp_path / "start")
    policy = adapted(load_model(folder))
    save_model(policy, _NoTokenizer(), tmp_path / "out")  # type: ignore[arg-type]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(log_probs(plain), log_probs(policy), atol=1e-4, rtol=0)


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


def test_an_adapter_on_an_adapter_names_the_folder_it_began_with(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    save_model(adapted(load_model(tiny_folder)), tokenizer, tmp_path / "one")
    second = adapted(load_model(tmp_path / "one/adapter"), moved=0.2)
    save_model(second, tokenizer, tmp_path / "two")
    again = load_model(tmp_path / "two/adapter").eval()
    torch.testing.assert_close(log_probs(again), log_probs(second), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda f: _edit(f, base_model_name_or_path=None), "names no base_model_name_or_path"),
        (lambda f: _edit(f, base_model_name_or_path="/nowhere"), "the base of .* does not exist"),
        (lambda f: _edit(f, r=5), "can't be merged"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "can't be merged"),
        (lambda f: _drop_a_tensor(f), r"lacks 1 of its weights, first .*lora_"),
    ],
)
def test_a_damaged_adapter_is_refused(
    tiny_folder: Path, tmp_path: Path, break_it: Any, message: str
) -> None:
    save_model(adapted(load_model(tiny_folder)), load_tokenizer(tiny_folder), tmp_path / "out")
    folder = Path(shutil.copytree(tmp_path / "out/adapter", tmp_path / "broken"))
    require_model_folder(folder)
    break_it(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def _edit(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_rollout_decodes_with_the_adapters(family: str, lora: str) -> None:
    policy = adapted(tiny_model(family))
    engine = create_engine("native", policy, max_num_seqs=8, max_model_len=40, lora=lora)
    prompts, _ = random_completions(4)
    params = SamplingParams(n=2, max_new_tokens=8)
    for round_ in range(2):
        done = engine.generate(prompts, params)
        batch = completions_batch(
            [prompts[c.prompt_index] for c in done], [c.token_ids for c in done]
        )
        with torch.no_grad():
            wanted = response_log_probs(policy, batch, 1.0)
        for row, completion in enumerate(done):
            said = torch.tensor(completion.log_probs)
            torch.testing.assert_close(said, wanted[row, : len(said)], atol=1e-4, rtol=0)
        assert torch.equal(log_probs(BaseModelView(policy)), log_probs(tiny_model(family)))
        with torch.no_grad():  # as an update would
            for parameter in adapter_parameters(policy).values():
                parameter.mul_(1.5)
        engine.update_weights(policy, round_ + 1)


def storages() -> dict[int, int]:
    """Bytes of what tensors there are, by address."""
    found = [t for t in gc.get_objects() if isinstance(t, Tensor) and not t.is_meta]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


@pytest.mark.parametrize("quantize", ["", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollout_keeps_no_second_base(quantize: Any, dtype: str) -> None:
    """What a rollout adds to the trainer's storage while it decodes: less than one dense layer."""
    shape = Qwen2Config(hidden_size=256, intermediate_size=1024, num_hidden_layers=3, vocab_size=99)
    model = Qwen2ForCausalLM(shape).to(getattr(torch, dtype))
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    if quantize:
        quantize_linears(model, quantize)
    policy = adapted(model)
    added: dict[str, int] = {}
    for lora in ("adapter", "merged"):
        before = storages()

        def count(done: int, lora: str = lora, before: dict[int, int] = before) -> None:
            new = storages()
            added[lora] = sum(size for at, size in new.items() if at not in before)

        engine = create_engine("native", policy, max_num_seqs=8, max_model_len=24, lora=lora)
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4), count)
    assert added["adapter"] < layer
    assert added["merged"] > 2.9 * layer, "so that copies are seen"


def test_an_unknown_way_to_decode_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.lora='both' is unknown; set merged or adap"):
        create_engine("native", adapted(tiny_model("qwen2")), lora="both")


def test_llama_families_keep_their_fast_path_with_adapters() -> None:
    policy = adapted(tiny_model("qwen2"))
    layer: Any = policy.model.layers[1].mlp.down_proj
    delta = 2.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    bound = bind(policy)
    torch.testing.assert_close(bound.layers[1].down.weight, layer.base_layer.weight + delta)
    assert bound.embedding is policy.model.embed_tokens.weight
    with BaseModelView(policy).weights():
        assert bind(policy).layers[1].down.weight is layer.base_layer.weight
    with pytest.raises(UnsupportedModel, match="its embedding is a"):
        bind(adapted(tiny_model("llama"), target_modules=("embed_tokens",)))


FROM_FOLDER = LoRAConfig(from_folder=True)


def adapter_log_probs(model: PreTrainedModel | BaseModelView) -> Tensor:
    return response_log_probs(model, completions_batch(*random_completions(5)), 1.0)


def train(model: PreTrainedModel, steps: int = 3) -> None:
    optimizer = Optimizer(model, OptimConfig(lr=3e-2), steps)
    for _ in range(steps):
        (-adapter_log_probs(model).mean()).backward()
        optimizer.step()


@pytest.fixture
def first(tiny_folder: Path, tmp_path: Path) -> PreTrainedModel:
    """A policy after a first run, saved in `tmp_path / "first"`."""
    lora = LoRAConfig(rank=3, alpha=5.0, target_modules=("q_proj", "down_proj"))
    model = load_policy_model(tiny_folder, "float32", lora)
    train(model)
    save_model(model, load_tokenizer(tiny_folder), tmp_path / "first")
    return model


def test_training_goes_on_with_the_same_adapters_on_the_same_base(
    first: PreTrainedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    second = load_policy_model(tmp_path / "first/adapter", "float32", FROM_FOLDER)
    ours, theirs = adapter_parameters(first), adapter_parameters(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {n for n, p in second.named_parameters() if p.requires_grad} == set(theirs)
    with torch.no_grad():
        assert torch.equal(adapter_log_probs(second), adapter_log_probs(first))
        assert torch.equal(
            adapter_log_probs(BaseModelView(second)), adapter_log_probs(load_model(tiny_folder))
        )
    train(second)
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours if ".lora_B." in name)
    save_model(second, load_tokenizer(tiny_folder), tmp_path / "second")
    config = json.loads((tmp_path / "second/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 5.0)
    assert config["base_model_name_or_path"] == str(tiny_folder)
    peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "second/adapter").eval()
    with torch.no_grad():
        assert torch.equal(adapter_log_probs(peft.base_model.model), adapter_log_probs(second))


def test_without_it_the_folder_is_merged(first: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "first/adapter"
    merged, fresh = (
        load_policy_model(folder, "float32"),
        load_policy_model(folder, "float32", LoRAConfig(rank=2)),
    )
    assert not has_adapters(merged)
    assert all(not p.any() for n, p in adapter_parameters(fresh).items() if ".lora_B." in n)
    with torch.no_grad():
        for model in (merged, fresh, BaseModelView(fresh)):
            torch.testing.assert_close(
                adapter_log_probs(model), adapter_log_probs(first), atol=1e-4, rtol=0
            )


def test_settings_are_the_folder_s(first: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "first/adapter"
    for asked in (FROM_FOLDER, LoRAConfig(from_folder=True, rank=3, dropout=0.1)):
        got = resolve_lora(folder, asked)
        assert (got.rank, got.alpha) == (3, 5.0)
        assert got.target_modules == ("down_proj", "q_proj")
        assert (got.from_folder, got.dropout) == (True, asked.dropout)
        assert resolve_lora(folder, got) == got
    plain = LoRAConfig(rank=7)
    assert resolve_lora(folder, plain) is plain


def test_a_regex_of_target_modules_stays_one(
    first: PreTrainedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    folder, regex = tmp_path / "first/adapter", r".*\.(q_proj|down_proj)"
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": regex}))
    assert resolve_lora(folder, FROM_FOLDER).target_modules == regex
    second = load_policy_model(folder, "float32", FROM_FOLDER)
    save_model(second, load_tokenizer(tiny_folder), tmp_path / "second")
    saved = tmp_path / "second/adapter"
    assert json.loads((saved / "adapter_config.json").read_text())["target_modules"] == regex
    with torch.no_grad():
        assert torch.equal(
            adapter_log_probs(load_policy_model(saved, "float32", FROM_FOLDER)),
            adapter_log_probs(first),
        )
        merged = load_policy_model(saved, "float32")
        torch.testing.assert_close(
            adapter_log_probs(merged), adapter_log_probs(first), atol=1e-4, rtol=0
        )


def test_dropout_is_the_run_s(first: PreTrainedModel, tmp_path: Path) -> None:
    lora = LoRAConfig(from_folder=True, dropout=0.5)
    model = load_policy_model(tmp_path / "first/adapter", "float32", lora)
    with torch.no_grad():
        quiet = adapter_log_probs(model)
        assert torch.equal(quiet, adapter_log_probs(first))
        assert not torch.equal(adapter_log_probs(model.train()), quiet)


def test_a_plain_folder_has_no_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    for path in (tiny_folder, tmp_path / "nowhere", "owner/name"):
        with pytest.raises(ConfigError, match=r"from_folder: model.path=.*no adapter_config.json"):
            load_policy_model(path, "float32", FROM_FOLDER)


def test_another_rank_is_refused(first: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank=8, but the adapters in .* have rank 3"):
        resolve_lora(tmp_path / "first/adapter", LoRAConfig(from_folder=True, rank=8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, ConfigError, r"not plain LoRA \(\['use_dora'\]\)"),
        ({"bias": "all"}, ConfigError, "not plain LoRA"),
        ({"target_modules": None}, ConfigError, r"not plain LoRA \(\['no target_modules'\]\)"),
        ({"target_parameters": ["w"]}, ConfigError, r"not plain LoRA \(\['target_parameters'\]\)"),
        ({"peft_type": "IA3"}, ConfigError, "not plain LoRA"),
        ({"r": 5}, ModelError, "don't fit their base"),
        ({"target_modules": ["q_proj"]}, ModelError, r"lack 0 weights and have 4 .*down_proj"),
        ({"target_modules": ["q_proj", "down_proj", "o_proj"]}, ModelError, "lack 4 weights"),
        ({"target_modules": ["nothing"]}, ModelError, "don't fit their base"),
    ],
)
def test_folders_that_can_t_be_continued_are_refused(
    first: PreTrainedModel, tmp_path: Path, change: dict[str, Any], error: Any, message: str
) -> None:
    folder = tmp_path / "first/adapter"
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=message):
        load_policy_model(folder, "float32", FROM_FOLDER)
