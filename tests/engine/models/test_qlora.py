"""A quantised base: what it computes, what is trained on it, and what is decoded and saved."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from gloo_ranks import run_ranks
from pydantic import ValidationError
from tiny_engine import completions_batch, random_completions, response_log_probs, tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import LoRAConfig, OptimConfig, ParallelConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.models import (
    BaseModelView,
    adapter_parameters,
    add_adapters,
    create_critic_model,
    load_model,
    load_policy_model,
    save_model,
)
from engine.models.quantize import (
    PackedWeight,
    QuantizedLinear,
    check_quantization,
    quantize_linears,
)
from engine.parallel.fsdp import reshard, run_forward, shard_model
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.rollout.native.decoding_weights import bind
from engine.rollout.protocol import SamplingParams, create_engine
from engine.runtime.optimizer import Optimizer
from engine.runtime.policy_runtime import PolicyRuntime

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["nf4", "int8"]


def lora(kind: str, **changes: Any) -> LoRAConfig:
    return LoRAConfig.model_validate({"rank": 4, "alpha": 8.0, "quantize": kind} | changes)


def policy(kind: str, family: str = "qwen2", **changes: Any) -> PreTrainedModel:
    """A quantised random model with adapters that add something."""
    model = tiny_model(family)
    quantize_linears(model, kind)
    add_adapters(model, lora(kind, **changes), seed=0)
    move(model)
    return model.eval()


def move(model: nn.Module) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.3, generator=draw)


def with_dense_base(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with plain linears that hold what the quantised ones compute with."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                linear.weight = nn.Parameter(child.dense(), requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)
    return plain


def log_probs(model: PreTrainedModel | BaseModelView) -> Tensor:
    return response_log_probs(model, completions_batch(*random_completions(5)), 1.0)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def linear_bytes(model: nn.Module) -> int:
    """Bytes of all layers' matrices and whatever belongs to them, biases apart."""
    return sum(
        tensor.nbytes
        for name, tensor in model.state_dict().items()
        if "_proj." in name and not name.endswith(".bias")
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "times"),
    [
        ("nf4", torch.float32, 7.5),
        ("nf4", torch.bfloat16, 3.7),
        ("int8", torch.float32, 3.5),
    ],
)
def test_matrices_shrink_and_stay_close(kind: str, dtype: torch.dtype, times: float) -> None:
    model = tiny_model("qwen2").to(dtype)
    before, start = linear_bytes(model), state(model)
    untouched = model.get_input_embeddings().weight
    quantize_linears(model, kind)
    assert linear_bytes(model) * times < before
    assert model.lm_head.weight is model.get_input_embeddings().weight is untouched
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(linears) == 2 * 7
    for name, linear in linears.items():
        dense, original = linear.dense(), start[f"{name}.weight"]
        assert dense.dtype == dtype
        error = (dense - original).float().norm() / original.float().norm()
        assert error < (0.12 if kind == "nf4" else 0.01), name


# The 16 levels of arXiv:2305.14314, appendix E.
NF4_LEVELS = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


@pytest.mark.parametrize("columns", [32, 48, 64, 96, 128, 5, 6])
@pytest.mark.parametrize("rows", [40, 5])
def test_nf4_is_the_paper_s_whatever_the_shape(rows: int, columns: int) -> None:
    """Blocks of 64 of the flat matrix, each value its block's largest times the nearest level."""
    linear = nn.Linear(columns, rows)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(columns))
    flat = linear.weight.detach().flatten()
    blocks = [
        NF4_LEVELS[(block[:, None] / scale - NF4_LEVELS).abs().argmin(1)] * scale
        for block in flat.split(64)
        for scale in [block.abs().max()]
    ]
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles its way for odd sizes
        got = QuantizedLinear(linear, "nf4").dense()
    wanted = torch.cat(blocks).view(rows, columns)
    # Scales are rounded to 8 bits in their turn, which is all that may differ.
    assert (got - wanted).norm() / wanted.norm() < 0.01


def test_matrices_are_unpacked_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU has AVX-512, bitsandbytes' kernel begins new blocks in each row of a matrix."""
    shapes, unpack = [], bnb.functional.dequantize_4bit

    def watched(packed: Tensor, state: Any) -> Tensor:
        shapes.append(tuple(state.shape))
        return unpack(packed, state)

    monkeypatch.setattr(bnb.functional, "dequantize_4bit", watched)
    assert QuantizedLinear(nn.Linear(96, 40), "nf4").dense().shape == (40, 96)
    assert shapes == [(40 * 96,)]


def test_a_library_that_restores_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        check_quantization(kind)
    unpack = bnb.functional.dequantize_4bit

    def with_wrong_scales(packed: Tensor, state: Any) -> Tensor:
        state.absmax = state.absmax.roll(1)
        return unpack(packed, state)

    monkeypatch.setattr(bnb.functional, "dequantize_4bit", with_wrong_scales)
    with pytest.raises(ConfigError, match=r"quantize='nf4': what this bitsandbytes restores on"):
        check_quantization("nf4")


def test_numbers_are_bitsandbytes_own() -> None:
    linear = nn.Linear(128, 40)
    theirs: Any = bnb.nn.Linear4bit(128, 40, quant_type="nf4", compress_statistics=True)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to("cpu")
    wanted = bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    assert torch.equal(QuantizedLinear(linear, "nf4").dense(), wanted)
    rows = linear.weight.abs().amax(1, keepdim=True)
    steps = (QuantizedLinear(linear, "int8").dense() / rows * 127).abs()
    assert (steps - steps.round()).abs().max() < 0.05, "each row in 127 steps"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_forward_and_gradients_are_those_of_the_dense_base(kind: str, family: str) -> None:
    model = policy(kind, family)
    plain = with_dense_base(model)
    outputs = []
    for each in (model, plain):
        got = log_probs(each)
        got.sum().backward()
        outputs.append(got.detach())
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=0)
    assert (outputs[0] - log_probs(tiny_model(family))).abs().max() > 0.01
    ours, theirs = adapter_parameters(model), adapter_parameters(plain)
    for name, parameter in ours.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_adapters_only(kind: str) -> None:
    model = tiny_model("qwen2")
    quantize_linears(model, kind)
    add_adapters(model, lora(kind), seed=0)
    before = state(model)
    optimizer = Optimizer(model, OptimConfig(lr=3e-2), 20)
    losses = []
    for step in range(20):
        model.train(step % 2 == 0)  # storage must not change with the mode
        loss = -log_probs(model).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    own = set(adapter_parameters(model))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == own
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in own), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_there_with_adapters_off(kind: str) -> None:
    start = tiny_model("llama")
    quantize_linears(start, kind)
    model = policy(kind, "llama")
    with torch.no_grad():
        ours = log_probs(model)
        assert torch.equal(log_probs(BaseModelView(model)), log_probs(start))
        assert (ours - log_probs(start)).abs().max() > 0.01
        assert torch.equal(log_probs(model), ours)


@pytest.mark.parametrize("kind", KINDS)
def test_casting_the_model_leaves_the_matrices_as_they_are(kind: str) -> None:
    model = policy(kind)
    layer: Any = model.model.layers[0].mlp.up_proj.base_layer
    dense = layer.dense()
    model.to(torch.bfloat16)
    assert torch.equal(layer.dense(), dense)
    with torch.no_grad():
        assert log_probs(model).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded_again(tiny_folder: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    model = load_policy_model(tiny_folder, dtype, lora(kind))
    move(model)
    before = state(model)
    save_model(model, load_tokenizer(tiny_folder), tmp_path / "out")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with torch.no_grad():
        wanted = log_probs(model)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert plain.dtype == model.model.embed_tokens.weight.dtype
        assert plain.state_dict().keys() == load_model(tiny_folder).state_dict().keys()
        tolerance = 1e-4 if dtype == "float32" else 0.2
        assert (log_probs(plain) - wanted).abs().max() < tolerance
        adapters = tmp_path / "out/adapter"
        again = load_policy_model(adapters, dtype, lora(kind, rank=0, from_folder=True))
        assert torch.equal(log_probs(again), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_of_it_is_dense_and_all_of_it_trained(kind: str) -> None:
    model = policy(kind)
    critic = create_critic_model(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = model.base_model(input_ids=ids).last_hidden_state
    got: Any = critic.backbone(input_ids=ids)
    torch.testing.assert_close(got.last_hidden_state, wanted, atol=1e-4, rtol=0)
    assert not any(isinstance(module, QuantizedLinear) for module in critic.modules())
    torch.nn.init.ones_(critic.head.weight)
    critic(ids).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in critic.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_rollout_decodes_what_the_forward_pass_computes(kind: str, targets: Any, way: str) -> None:
    model = policy(kind, target_modules=targets)
    engine = create_engine("native", model, max_num_seqs=8, max_model_len=40, lora=way)
    prompts, _ = random_completions(4)
    for round_ in range(2):
        done = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=8))
        batch = completions_batch(
            [prompts[c.prompt_index] for c in done], [c.token_ids for c in done]
        )
        with torch.no_grad():
            wanted = response_log_probs(model, batch, 1.0)
        for row, completion in enumerate(done):
            said = torch.tensor(completion.log_probs)
            torch.testing.assert_close(said, wanted[row, : len(said)], atol=1e-4, rtol=0)
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.mul_(1.5)
        engine.update_weights(model, round_ + 1)
    layer: Any = model.model.layers[0].self_attn.q_proj
    dense = layer.base_layer.dense()
    with BaseModelView(model).weights():
        assert torch.equal(bind(model).layers[0].q.weight, dense)
    delta = 2.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    torch.testing.assert_close(bind(model).layers[0].q.weight, dense + delta)


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_travel_to_other_processes(tiny_folder: Path, kind: str) -> None:
    here, there = (load_policy_model(tiny_folder, "float32", lora(kind), seed) for seed in (0, 1))
    move(here)
    sender, receiver = PolicyRuntime(here), PolicyRuntime(there)
    sender.version = 3
    packed = sender.pack_weights()
    assert packed["weights"].numel() == 4 * sum(
        p.numel() for p in adapter_parameters(here).values()
    )
    assert receiver.load_weights(packed) == 3
    with torch.no_grad():
        assert torch.equal(log_probs(there), log_probs(here))


def sharded(kind: str, shared: bool) -> dict[str, Tensor]:
    """Adapters after three steps, on two ranks with rows of their own or on one with all."""
    ranks = Ranks.form(Layout(fsdp=2)) if shared else Ranks(Layout())
    model = policy(kind)
    packed = {name: p for name, p in model.named_parameters() if isinstance(p, PackedWeight)}
    assert len(packed) == 2 * 7
    before = {name: p.detach().clone() for name, p in packed.items()}
    shard_model(model, ranks, ParallelConfig(fsdp=2), layers=list(model.base_model.layers))
    batch = completions_batch(*random_completions(6)).rows(
        range(ranks.index("fsdp"), 6, ranks.size("fsdp"))
    )
    for _ in range(3):
        log_probs = run_forward(model, lambda: response_log_probs(model, batch, 1.0))
        (-log_probs.sum() / 6).backward()
        for parameter in adapter_parameters(model).values():
            with torch.no_grad():
                parameter.sub_(0.01 * parameter.grad)
            parameter.grad = None
    reshard(model)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], before[name]) for name in before), "whole, and as it was"
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in adapter_parameters(model).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp_shares_adapters_and_leaves_packed_matrices_whole(kind: str) -> None:
    alone = sharded(kind, False)
    for answer in run_ranks(2, sharded, kind, True):
        assert answer.keys() == alone.keys()
        for name, tensor in answer.items():
            torch.testing.assert_close(tensor, alone[name], atol=1e-5, rtol=0)


def test_models_without_linears_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize='nf4'.*GPT2.*no plain linear modules"):
        quantize_linears(tiny_model("gpt2"), "nf4")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes .*hybridflyte\[qlora\]"):
        check_quantization("int8")


def test_a_failure_without_words_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: QuantizedLinear) -> Tensor:
        raise RuntimeError

    monkeypatch.setattr(QuantizedLinear, "dense", fail)
    with pytest.raises(ConfigError, match=r"can't quantise on cpu \(RuntimeError\)"):
        check_quantization("nf4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_bitsandbytes_lacks_is_named(kind: str) -> None:
    with pytest.raises(ConfigError, match="can't quantise on mps"):
        check_quantization(kind, "mps")


def test_a_quantised_base_without_adapters_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"quantize='nf4' without adapters.*rank > 0"):
        LoRAConfig(quantize="nf4")
    assert LoRAConfig(quantize="nf4", from_folder=True).quantize == "nf4"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device(kind: str, dtype: torch.dtype) -> None:
    """Packed on the CPU, it computes, trains, decodes and merges there as it does here."""
    model = tiny_model("qwen2").to(dtype)
    quantize_linears(model, kind)
    add_adapters(model, lora(kind), seed=0)
    move(model)
    model.eval()
    there = copy.deepcopy(model).cuda()
    tolerance = 1e-3 if dtype == torch.float32 else 0.2
    layer: Any = there.model.layers[0].mlp.up_proj.base_layer
    here: Any = model.model.layers[0].mlp.up_proj.base_layer
    torch.testing.assert_close(layer.dense().cpu(), here.dense())
    with torch.no_grad():
        assert (log_probs(there).cpu() - log_probs(model)).abs().max() < tolerance
        start = log_probs(BaseModelView(there))
    before, optimizer = state(there), Optimizer(there, OptimConfig(lr=3e-2), 10)
    losses = []
    for _ in range(10):
        loss = -log_probs(there).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    own = set(adapter_parameters(there))
    for name, tensor in there.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in own), name
    engine = create_engine("native", there, max_num_seqs=8, max_model_len=40)
    prompts, _ = random_completions(4)
    done = engine.generate(prompts, SamplingParams(n=1, max_new_tokens=8))
    batch = completions_batch(prompts, [c.token_ids for c in done])
    with torch.no_grad():
        assert torch.equal(log_probs(BaseModelView(there)), start)
        wanted = response_log_probs(there, batch, 1.0).cpu()
    for row, completion in enumerate(done):
        said = torch.tensor(completion.log_probs)
        assert (said - wanted[row, : len(said)]).abs().max() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_packed_on_the_device_as_on_the_cpu(kind: str) -> None:
    linear = nn.Linear(96, 40)
    here = QuantizedLinear(linear, kind)
    there = QuantizedLinear(copy.deepcopy(linear).cuda(), kind)
    error = (there.dense().cpu() - here.dense()).norm() / linear.weight.norm()
    assert error < 0.01, "ties and reciprocals round differently; nothing else does"
