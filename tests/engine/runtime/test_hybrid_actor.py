"""HybridActor: loading, settings, generation, one storage, the switch."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_cases import PAD, prompts, step
from once import OwnEntries
from safetensors.torch import load_file, save_file
from tiny_engine import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig

from engine import HybridActor, measure_switch_overhead
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError, EngineError, ModelError, RolloutError
from engine.parallel.layout import Layout
from engine.rollout import protocol
from engine.rollout.native import NativeEngine, model_handle
from engine.rollout.native.decoding_weights import LlamaWeights
from engine.rollout.native.llama_decoder import LlamaDecoder
from engine.rollout.protocol import SamplingParams, register_engine
from engine.runtime import HybridConfig
from engine.runtime.hybrid_actor import StorageCounter


@pytest.mark.usefixtures("one_thread")
def test_an_actor_from_a_folder_is_saved_as_any_model(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pads-on-the-right"
    shutil.copytree(tiny_folder, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    actor = HybridActor.from_pretrained(
        folder, hybrid_config={"tp_size": 1, "fsdp_sharding": "HYBRID_SHARD"}
    )
    encoded = actor.tokenizer(["2+3=", "11+"], padding=True, return_tensors="pt")
    found = actor.generate(**encoded, max_new_tokens=6)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert torch.equal(found, plain.generate(**encoded, max_new_tokens=6))
    actor.save_pretrained(tmp_path)
    again = HybridActor.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.tokenizer is None
    assert next(again.parameters()).dtype == torch.bfloat16


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    cut = weights | {name: weights[name][:50].clone()}
    save_file(cut, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="can't be loaded"):
        HybridActor.from_pretrained(tmp_path)


@pytest.mark.usefixtures("one_thread")
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
    """It runs in a process of its own: a process group that is there would be used."""
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


@pytest.mark.parametrize(
    ("values", "world_size", "expected"),
    [
        ({}, 4, Layout(fsdp=4)),
        ({"tp_size": 4, "fsdp_sharding": "FULL_SHARD"}, 8, Layout(fsdp=8)),
        ({"train_tp_size": 2}, 8, Layout(fsdp=4, tp=2)),
        ({"train_tp_size": 2, "fsdp_sharding": "NO_SHARD"}, 8, Layout(dp=4, tp=2)),
        ({"fsdp_sharding": "HYBRID_SHARD"}, 8, Layout(dp=2, fsdp=4)),
        ({"fsdp_sharding": "HYBRID_SHARD", "train_tp_size": 2}, 8, Layout(dp=2, fsdp=2, tp=2)),
        ({"fsdp_sharding": "HYBRID_SHARD", "dp_size": 4}, 8, Layout(dp=4, fsdp=2)),
        ({"fsdp_sharding": "HYBRID_SHARD", "fsdp_size": 8}, 8, Layout(fsdp=8)),
        ({"train_tp_size": 2, "rollout_tp_size": 1}, 2, Layout(tp=2)),
    ],
)
def test_sizes_left_out_follow_from_the_ranks(
    values: dict[str, Any], world_size: int, expected: Layout
) -> None:
    assert HybridConfig.of(values).layout(world_size, ranks_per_node=4) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train_tp_size": 3}, "there are 4"),
        ({"fsdp_size": 2}, "there are 4"),
        (
            {"tp_size": 8, "fsdp_sharding": "FULL_SHARD"},
            r"needs 8 ranks, but there are 4.*torchrun",
        ),
        ({"dp_size": 2}, "use 'HYBRID_SHARD'"),
        ({"fsdp_size": 2, "fsdp_sharding": "NO_SHARD"}, "does not"),
        ({"rollout_tp_size": 3}, "tp=3 can't be made"),
    ],
)
def test_an_impossible_layout_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HybridConfig.of(values).check(tiny_model("qwen2").config, 4)


def test_generate_needs_heads_that_its_ranks_can_share() -> None:
    config = tiny_model("qwen2").config
    HybridConfig.of({"rollout_tp_size": 4}).check(config, 4)  # a key head is on two ranks
    config.update({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8})
    with pytest.raises(ConfigError, match=r"tp_size=2 .* 6 attention heads and 3 key"):
        HybridConfig.of({"rollout_tp_size": 2}).check(config, 4)
    gpt2 = tiny_model("gpt2").config
    assert HybridConfig.of({"fsdp_sharding": "NO_SHARD"}).check(gpt2, 4) == Layout(dp=4)
    with pytest.raises(ConfigError, match="can't be sharded over ranks"):
        HybridConfig.of({}).check(gpt2, 4)


def test_axes_of_the_trainer_are_pointed_to() -> None:
    with pytest.raises(ConfigError, match=r"no key 'pp_size'.*RLTrainer spreads by pp"):
        HybridConfig.of({"pp_size": 2})


@pytest.mark.usefixtures("one_thread")
def test_a_backward_pass_after_generate_is_the_models_own(actor: HybridActor) -> None:
    plain = copy.deepcopy(actor.policy)
    ids = prompts()["input_ids"]
    sequences = actor.generate(ids, max_new_tokens=4)
    assert actor.train() is actor
    assert all(module.training for module in actor.policy.modules())
    actor.eval()
    loss = actor(input_ids=sequences, labels=sequences).loss
    loss.backward()
    expected = plain(input_ids=sequences, labels=sequences).loss
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(actor.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_seen_by_the_next_generate(actor: HybridActor, fused: bool) -> None:
    before, version = actor.generate(**prompts(), max_new_tokens=8), actor.policy_version
    step(actor, fused)
    after = actor.generate(**prompts(), max_new_tokens=8)
    assert not torch.equal(after, before)
    assert torch.equal(after, actor.policy.generate(**prompts(), max_new_tokens=8))
    assert actor.policy_version == version + 1
    actor.generate(**prompts(), max_new_tokens=8)
    assert actor.policy_version == version + 1  # nothing has changed since


@pytest.mark.usefixtures("one_thread")
def test_completions_carry_version_and_log_probs(qwen: HybridActor) -> None:
    step(qwen, fused=False)
    (done,) = qwen.rollout([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    logits = qwen(input_ids=torch.tensor([[5, 6, 7, *done.token_ids]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)
    assert done.policy_version == qwen.policy_version == 1


@pytest.mark.usefixtures("one_thread")
def test_generate_leaves_mode_and_weights_alone(actor: HybridActor) -> None:
    actor.train()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in actor.named_parameters()}
    actor.generate(**prompts(), max_new_tokens=3)
    assert actor.training
    assert all(module.training for module in actor.policy.modules())
    for name, parameter in actor.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.usefixtures("one_thread")
def test_names_parameters_and_state_are_the_policys(actor: HybridActor) -> None:
    assert isinstance(actor, torch.nn.Module)
    ours, theirs = dict(actor.named_parameters()), dict(actor.policy.named_parameters())
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in ours)
    assert list(dict(actor.named_buffers())) == list(dict(actor.policy.named_buffers()))
    assert list(actor.state_dict()) == list(actor.policy.state_dict())
    assert actor.config is actor.policy.config
    with pytest.raises(AttributeError, match="no_such_thing"):
        actor.no_such_thing  # noqa: B018


@pytest.mark.usefixtures("one_thread")
def test_loaded_weights_and_another_dtype_are_seen(qwen: HybridActor) -> None:
    before = qwen.generate(**prompts(), max_new_tokens=8)
    other = tiny_model("qwen2", seed=4)
    qwen.load_state_dict(other.state_dict())
    after = qwen.generate(**prompts(), max_new_tokens=8)
    assert not torch.equal(after, before)
    assert torch.equal(after, other.generate(**prompts(), max_new_tokens=8))
    assert qwen.policy_version == 1
    qwen.to(torch.float64)
    assert next(qwen.policy.parameters()).dtype == torch.float64
    assert torch.equal(qwen.generate(**prompts(), max_new_tokens=8), after)


@pytest.mark.usefixtures("one_thread")
def test_a_copy_is_an_actor_of_its_own(qwen: HybridActor) -> None:
    twin = copy.deepcopy(qwen)
    before = qwen.generate(**prompts(), max_new_tokens=8)
    step(twin, fused=False)
    assert torch.equal(qwen.generate(**prompts(), max_new_tokens=8), before)
    assert not torch.equal(twin.generate(**prompts(), max_new_tokens=8), before)
    assert next(twin.parameters()) is next(twin.policy.parameters())


@pytest.mark.usefixtures("one_thread")
def test_a_closed_actor_serves_nothing(qwen: HybridActor) -> None:
    qwen.close()
    qwen.close()
    ids = prompts()["input_ids"]
    qwen(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(RolloutError, match="closed"):
        qwen.generate(**prompts())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["train", "rollout"])
def test_on_one_rank_the_switch_moves_nothing(actor: HybridActor, mode: Any) -> None:
    weights = [p.detach().clone() for p in actor.parameters()]
    actor.train()
    cost = measure_switch_overhead(actor, mode)
    assert set(cost) == {"latency_ms", "latency_min_ms", "mem_increase_mb", "received_mb"}
    assert cost["received_mb"] == 0
    size = sum(w.nbytes for w in weights) / 1e6
    assert cost["mem_increase_mb"] <= 0.01 * size
    assert 0 < cost["latency_min_ms"] <= cost["latency_ms"]
    assert cost["latency_min_ms"] < 8
    assert actor.training
    assert all(torch.equal(p, w) for p, w in zip(actor.parameters(), weights, strict=True))


class CopyingEngine(NativeEngine):
    """Takes a copy of the weights at each update, as engines without shared storage do."""

    def update_weights(self, model: torch.nn.Module, version: int) -> None:
        super().update_weights(copy.deepcopy(model), version)


@pytest.fixture
def copying(own_entries: OwnEntries) -> HybridActor:
    own_entries(protocol._registry)
    register_engine("copying")(CopyingEngine)
    return HybridActor(tiny_model("llama"), rollout_engine="copying")


@pytest.mark.usefixtures("one_thread")
def test_a_switch_that_copies_is_seen_to_copy(copying: HybridActor) -> None:
    size = sum(p.nbytes for p in copying.parameters()) / 1e6
    cost = measure_switch_overhead(copying, "rollout", repeats=3)
    assert size <= cost["mem_increase_mb"] < 1.5 * size
    assert measure_switch_overhead(copying, "train", repeats=3)["mem_increase_mb"] < 0.01 * size
    step(copying, fused=True)  # and the copy is brought up to date
    expected = copying.policy.generate(**prompts(), max_new_tokens=8)
    assert torch.equal(copying.generate(**prompts(), max_new_tokens=8), expected)


@pytest.mark.usefixtures("one_thread")
def test_the_counter_counts_new_storage_alone() -> None:
    x = torch.zeros(1000)
    with StorageCounter() as counter:
        x.view(10, 100).t().add_(1)
        assert counter.bytes == 0
        y = x + 1
        y.mul_(2)
        torch.empty(10)
    assert counter.bytes == 4040


@pytest.mark.usefixtures("one_thread")
def test_a_measure_of_nothing_is_refused(qwen: HybridActor) -> None:
    with pytest.raises(ConfigError, match="mode='generate'"):
        measure_switch_overhead(qwen, "generate")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="repeats=0"):
        measure_switch_overhead(qwen, "train", repeats=0)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_native_decodes_at_the_trainers_own_addresses(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the optimizer's first step, and for a tied head."""
    actor = HybridActor(tiny_model(family))
    bound: list[LlamaWeights] = []

    def spy(weights: LlamaWeights, *sizes: Any, **options: Any) -> LlamaDecoder:
        bound.append(weights)
        return LlamaDecoder(weights, *sizes, **options)

    monkeypatch.setattr(model_handle, "LlamaDecoder", spy)
    trained = {p.data_ptr() for p in actor.parameters()}
    for fused in (False, True):
        actor.generate(**prompts(), max_new_tokens=2)
        step(actor, fused)
        assert addresses(bound.pop()) == trained == {p.data_ptr() for p in actor.parameters()}


def addresses(weights: LlamaWeights) -> set[int]:
    found = [weights.embedding, weights.head.weight, weights.norm.weight]
    for layer in weights.layers:
        parts = [getattr(layer, name) for name in layer.__slots__]
        found += [t for part in parts if part for t in part if isinstance(t, torch.Tensor)]
    return {t.data_ptr() for t in found}


def frequent(actor: HybridActor) -> list[int]:
    """Two tokens that greedy decoding of `prompts()` reaches in some rows, early in one of them."""
    new = actor.generate(**prompts(), max_new_tokens=12)[:, 9:]
    return [int(new[0, 3]), int(new[2, 7])]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_new_tokens": 12},
        {"max_length": 15},
        {"max_new_tokens": 12, "temperature": 3.0, "top_k": 2},  # greedy pays them no heed
        {"generation_config": GenerationConfig(max_new_tokens=5)},
        {"max_new_tokens": 6, "use_cache": False, "synced_gpus": False, "logits_processor": None},
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    actor: HybridActor, arguments: dict[str, Any]
) -> None:
    expected = actor.policy.generate(**prompts(), **arguments)
    found = actor.generate(**prompts(), **arguments)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pad", [PAD, None])
def test_rows_are_filled_up_after_their_end_token_as_transformers_does(
    actor: HybridActor, pad: int | None
) -> None:
    ends = {"eos_token_id": frequent(actor), "pad_token_id": pad, "max_new_tokens": 12}
    expected = actor.policy.generate(**prompts(), **ends)
    found = actor.generate(**prompts(), **ends)
    assert torch.equal(found, expected)
    filler = ends["eos_token_id"][0] if pad is None else pad
    assert (found[0, 9 + 4 :] == filler).all()  # the row ended: this is filling


@pytest.mark.usefixtures("one_thread")
def test_output_is_as_wide_as_the_longest_row(actor: HybridActor) -> None:
    whole = actor.generate(**prompts(), max_new_tokens=12)
    early = {"eos_token_id": whole[:, 9 + 2].tolist(), "pad_token_id": PAD}
    expected = actor.policy.generate(**prompts(), **early, max_new_tokens=12)
    found = actor.generate(**prompts(), **early, max_new_tokens=12)
    assert found.shape[1] <= 9 + 3
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("one_thread")
def test_the_models_own_generation_config_counts_and_arguments_override_it(
    qwen: HybridActor,
) -> None:
    qwen.generation_config.max_length = 14
    qwen.generation_config.eos_token_id = frequent(qwen)[:1]
    assert torch.equal(qwen.generate(**prompts()), qwen.policy.generate(**prompts()))
    longer = {"max_new_tokens": 11, "eos_token_id": None}
    expected = qwen.policy.generate(**prompts(), **longer)
    assert torch.equal(qwen.generate(**prompts(), **longer), expected)
    assert expected.shape == (4, 20)


@pytest.mark.usefixtures("one_thread")
def test_padding_is_found_without_a_mask_as_transformers_does(qwen: HybridActor) -> None:
    ids = prompts()["input_ids"]
    for arguments in ({}, {"pad_token_id": PAD}, {"pad_token_id": PAD, "eos_token_id": PAD}):
        expected = qwen.policy.generate(ids, max_new_tokens=8, **arguments)
        assert torch.equal(qwen.generate(ids, max_new_tokens=8, **arguments), expected)


@pytest.mark.usefixtures("one_thread")
def test_without_prompts_it_starts_from_the_bos_token(qwen: HybridActor) -> None:
    expected = qwen.policy.generate(bos_token_id=7, max_new_tokens=5)
    assert torch.equal(qwen.generate(bos_token_id=7, max_new_tokens=5), expected)
    with pytest.raises(DataError, match="BOS"):
        qwen.generate(max_new_tokens=5)


@pytest.mark.usefixtures("one_thread")
def test_sampling_is_repeated_by_the_global_seed(actor: HybridActor) -> None:
    arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8}
    torch.manual_seed(5)
    first, second = (actor.generate(**prompts(), **arguments) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(actor.generate(**prompts(), **arguments), first)
    assert not torch.equal(first, second)
    assert first.shape == (12, 9 + 8)
    assert torch.equal(first[:, :9], prompts()["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in first[:3].tolist()}) > 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("cut", "allowed"), [({"top_k": 3}, 3), ({"top_k": 0, "top_p": 0.3}, None), ({}, 50)]
)
def test_sampling_draws_from_the_tokens_that_transformers_keeps(
    qwen: HybridActor, cut: dict[str, Any], allowed: int | None
) -> None:
    row = prompts(1)["input_ids"]
    torch.manual_seed(0)
    arguments = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 1} | cut
    drawn = qwen.generate(row, num_return_sequences=3000, **arguments)[:, -1]
    kept = qwen.policy.generate(
        row, **arguments, return_dict_in_generate=True, output_scores=True
    ).scores[0][0]
    expected = kept.softmax(-1)
    assert set(drawn.unique().tolist()) <= set(expected.nonzero()[:, 0].tolist())
    if allowed is not None:
        assert int((expected > 0).sum()) == allowed
    found = drawn.bincount(minlength=VOCABULARY) / len(drawn)
    assert (found - expected).abs().sum() < 0.15  # total variation of 3,000 draws


REFUSED: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"repetition_penalty": 1.2},
    {"min_new_tokens": 2},
    {"stop_strings": "x"},
    {"bad_words_ids": [[3]]},
    {"return_dict_in_generate": True},
    {"output_logits": True},
    {"output_hidden_states": True},
    {"max_time": 1.0},
    {"stopping_criteria": [print]},
    {"streamer": object()},
    {"position_ids": torch.zeros(4, 9)},
    {"max_new_token": 5},
    {"do_sample": True, "min_p": 0.1},
    {"num_return_sequences": 2},
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("arguments", REFUSED, ids=lambda a: list(a)[-1])
def test_what_it_can_t_honour_is_refused_by_name(
    qwen: HybridActor, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=list(arguments)[-1]):
        qwen.generate(**prompts(), **arguments)


@pytest.mark.usefixtures("one_thread")
def test_a_penalty_in_the_models_generation_config_is_not_dropped_silently(
    qwen: HybridActor,
) -> None:
    qwen.generation_config.repetition_penalty = 1.1
    with pytest.raises(ConfigError, match=r"repetition_penalty=1\.1"):
        qwen.generate(**prompts())
    qwen.generate(**prompts(), repetition_penalty=1.0)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"max_length": 9}, ConfigError, "max_length=9"),
        ({"max_new_tokens": 60}, ConfigError, "64 tokens of the model's context"),
        ({"do_sample": True, "temperature": 0.0}, ConfigError, "do_sample=False"),
        ({"do_sample": True, "top_p": 1.5}, RolloutError, "top_p"),
        ({"attention_mask": torch.ones(4, 8)}, DataError, "same shape"),
        ({"attention_mask": torch.eye(4, 9)}, DataError, "row 0 .* left"),
        ({"input_ids": torch.ones(4)}, DataError, r"\(4,\)"),
        ({"input_ids": torch.full((4, 9), VOCABULARY)}, ModelError, "vocabulary of 97"),
        ({"inputs": torch.ones(4, 9)}, ConfigError, "inputs and input_ids"),
    ],
)
def test_a_bad_call_says_what_is_wrong(
    qwen: HybridActor, arguments: dict[str, Any], error: type[EngineError], words: str
) -> None:
    with pytest.raises(error, match=words):
        qwen.generate(**(prompts() | arguments))
