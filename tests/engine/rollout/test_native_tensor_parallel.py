"""The native engine over ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankError, run_ranks
from rollout_models import build, make_prompts
from tensor_parallel_cases import GREEDY, STOP, local_shards, model_of, tp_shard
from thorough import and_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engine.errors import ModelError, RolloutError
from engine.rollout.native import NativeEngine, TPModelShard
from engine.rollout.protocol import Completion, SamplingParams

SAMPLED = SamplingParams(n=3, max_new_tokens=12, seed=4, stop_token_ids=STOP)


def roll_out(
    family: str, changes: dict[str, Any], dtype: torch.dtype, *params: SamplingParams
) -> list[list[Completion]]:
    engine = NativeEngine(tp_shard(model_of(family, **changes).to(dtype)), max_num_seqs=8)
    return [engine.generate(make_prompts(7), each) for each in params]


@pytest.mark.parametrize(
    ("size", "family", "changes"),
    and_slow(
        [
            (2, "qwen2", {"vocab_size": 101}),  # biases, tied, an odd vocabulary
            (4, "qwen3", {"vocab_size": 103}),  # norms on q and k; each key head is on two ranks
        ],
        [
            (2, "llama", {"tie_word_embeddings": False}),  # biases on o as well
            (4, "mistral", {"num_key_value_heads": 1}),  # one key head for all ranks
        ],
    ),
)
def test_tokens_and_log_probs_are_those_of_one_rank(
    size: int, family: str, changes: dict[str, Any]
) -> None:
    engine = NativeEngine(model_of(family, **changes), max_num_seqs=8)
    whole = [engine.generate(make_prompts(7), params) for params in (SAMPLED, GREEDY)]
    for ranks in run_ranks(size, roll_out, family, changes, torch.float32, SAMPLED, GREEDY):
        for found, expected in zip(ranks, whole, strict=True):
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
            for ours, theirs in zip(found, expected, strict=True):
                errors = torch.tensor(ours.log_probs) - torch.tensor(theirs.log_probs)
                assert errors.abs().max() < 1e-5


def test_every_rank_draws_the_same_in_bfloat16() -> None:
    (first,), (other,) = run_ranks(2, roll_out, "qwen2", {}, torch.bfloat16, SAMPLED)
    assert first == other
    assert len({tuple(c.token_ids) for c in first}) > 10


def test_a_vocabulary_smaller_than_its_shares_leaves_ranks_empty() -> None:
    changes = {"vocab_size": 5, "eos_token_id": None, "bos_token_id": None}
    found = run_ranks(4, tiny_vocabulary, changes)
    assert found[0] == found[3]
    engine = NativeEngine(model_of("qwen2", **changes))
    assert found[0] == [c.token_ids for c in engine.generate([[1, 2], [4]], SAMPLED)]


def tiny_vocabulary(changes: dict[str, Any]) -> list[list[int]]:
    engine = NativeEngine(tp_shard(model_of("qwen2", **changes)))
    return [c.token_ids for c in engine.generate([[1, 2], [4]], SAMPLED)]


def pointers(model: TPModelShard) -> set[int]:
    weights = model.weights()
    found = [weights.embedding, *weights.head, weights.norm.weight]
    for layer in weights.layers:
        for name in layer.__slots__:
            part = getattr(layer, name)
            found += [] if part is None else [t for t in part if isinstance(t, Tensor)]
    return {t.data_ptr() for t in found if t is not None}


def trained_in_place() -> tuple[bool, list[list[int]], list[list[int]]]:
    """Decode from a trainer's DTensors, step them with an optimizer, decode again."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_of("llama")
    for module_name, module in model.named_modules():
        last = module_name.rpartition(".")[2]
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement: Any
            if last in ("o_proj", "down_proj") and name == "weight":
                placement = Shard(1)
            elif last in ("o_proj", "down_proj") or last.endswith("norm"):
                placement = Replicate()
            else:
                placement = Shard(0)
            tensor = distribute_tensor(parameter.data, mesh, [placement])
            module.register_parameter(name, nn.Parameter(tensor))
    view = TPModelShard.from_dtensors(model)
    local = [p.data.to_local() for p in model.parameters() if isinstance(p.data, DTensor)]
    shared = pointers(view) == {t.data_ptr() for t in local}
    engine = NativeEngine(view)
    before = [c.token_ids for c in engine.generate(make_prompts(5), GREEDY)]
    torch.manual_seed(2)  # the same gradient on one rank
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape)
        parameter.grad = distribute_tensor(whole, mesh, parameter.data.placements)
    torch.optim.SGD(model.parameters(), lr=0.05, foreach=False).step()
    engine.update_weights(None, 1)
    after = engine.generate(make_prompts(5), GREEDY)
    assert {c.policy_version for c in after} == {1}
    return shared, before, [c.token_ids for c in after]


def test_a_trainers_dtensors_are_decoded_in_place_and_its_steps_are_seen() -> None:
    model = model_of("llama")
    engine = NativeEngine(model)
    before = [c.token_ids for c in engine.generate(make_prompts(5), GREEDY)]
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    after = [c.token_ids for c in engine.generate(make_prompts(5), GREEDY)]
    assert after != before
    for shared, *tokens in run_ranks(2, trained_in_place):
        assert shared
        assert tokens == [before, after]


def buffers_in_subgroups() -> list[list[int]]:
    """Two groups of two ranks each, shards in the reverse order of their ranks, in own buffers."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    index = 1 - rank // 2
    model = model_of("qwen2", vocab_size=101)
    buffers = {name: torch.zeros_like(t) for name, t in local_shards(model, index, 2).items()}
    view = TPModelShard(model.config, buffers, groups[rank % 2], index)
    engine = NativeEngine(view)
    for name, tensor in local_shards(model, index, 2).items():  # what a resharding step does
        buffers[name].copy_(tensor)
    engine.update_weights(view, 3)
    return [c.token_ids for c in engine.generate(make_prompts(4 + rank % 2), GREEDY)]


def test_buffers_are_filled_later_and_shards_need_not_follow_ranks() -> None:
    engine = NativeEngine(model_of("qwen2", vocab_size=101))
    found = run_ranks(4, buffers_in_subgroups)
    for rank, tokens in enumerate(found):
        wanted = engine.generate(make_prompts(4 + rank % 2), GREEDY)
        assert tokens == [c.token_ids for c in wanted]


def refusal(case: str) -> str:
    """The error that this rank gets."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    model = model_of("qwen2")
    local, config = local_shards(model, rank, size), model.config
    try:
        if case == "missing" and rank == 1:
            del local["model.layers.1.mlp.up_proj.weight"]
        elif case == "shape":
            local["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(128, 128)
        elif case == "extra":
            local["model.layers.0.lora_A"] = torch.zeros(2)
        elif case == "dtype":
            local["model.norm.weight"] = local["model.norm.weight"].double()
        elif case == "vocabulary":
            config.vocab_size = 90
        elif case == "heads":
            config.num_attention_heads = 3
        elif case == "family":
            config = build("gpt2").config
        view = TPModelShard(config, local, group, 0 if case == "index" else None)
        engine = NativeEngine(view)
        if case == "stream":
            engine.stream(GREEDY)
        elif case == "version":
            engine.update_weights(view, rank)
            engine.generate([[5]], GREEDY)
        elif case == "prompts":
            engine.generate([[5 + rank]], GREEDY)
        elif case == "long":
            engine.generate([[5] * (1 + 127 * rank)], GREEDY)
        elif case == "refusing" and rank == 0:
            with pytest.raises(RolloutError), engine._handle.updating(view, 1):
                raise ValueError("the sync broke")
        if case == "refusing":
            engine.generate([[5]], GREEDY)
    except (ModelError, RolloutError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", ["another rank's shards", "'model.layers.1.mlp.up_proj.weight' is missing"]),
        ("shape", [r"o_proj.weight' is (128, 128), and shard 0 of 2 is (128, 64)", "shard 1 of 2"]),
        ("extra", ["'model.layers.0.lora_A' is no parameter"] * 2),
        ("dtype", ["'model.norm.weight' is torch.float64"] * 2),
        ("vocabulary", ["100 rows of the embedding and the vocabulary has 90"] * 2),
        ("heads", ["2 ranks can't share 3 attention heads"] * 2),
        ("family", ["GPT2LMHeadModel is not a Llama"] * 2),
        ("index", ["hold shards [0, 0]"] * 2),
        ("stream", ["stream decodes on one rank"] * 2),
        ("version", ["policy versions [0, 1]"] * 2),
        ("prompts", ["different prompts"] * 2),
        ("long", ["rank 1 of the tensor-parallel group", "leaves no room"]),
        ("refusing", ["the sync broke", "rank 0 of the tensor-parallel group"]),
    ],
)
def test_what_can_t_be_decoded_together_is_refused_on_all_ranks(
    case: str, words: list[str]
) -> None:
    for found, wanted in zip(run_ranks(2, refusal, case), words, strict=True):
        assert wanted in found


def lonely(seconds: float) -> tuple[str, str, float]:
    """Rank 1 leaves in the middle of a rollout; the others say what they get, and when."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    model = model_of("qwen2")
    view = TPModelShard(model.config, local_shards(model, dist.get_rank(), 2), group)
    engine = NativeEngine(view)
    params = SamplingParams(n=4, max_new_tokens=100, stop_token_ids=STOP)

    def leave(done: int) -> None:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt

    errors, started = ["", ""], time.perf_counter()
    try:
        engine.generate(make_prompts(8), params, leave)
    except KeyboardInterrupt:
        time.sleep(seconds + 2)  # alive, but out of step
        return "left", "", 0.0
    except RolloutError as error:
        errors[0] = str(error)
    passed = time.perf_counter() - started
    try:
        engine.generate([[5]], GREEDY)
    except RolloutError as error:
        errors[1] = str(error)
    return errors[0], errors[1], passed


def test_a_rank_that_falls_out_of_step_ends_the_others_wait() -> None:
    (first, again, passed), (left, _, _) = run_ranks(2, lonely, 1.5)
    assert left == "left"
    assert "lost or fell out of step" in first
    assert "lost or fell out of step" in again
    assert passed < 5


def dying() -> None:
    engine = NativeEngine(tp_shard(model_of("qwen2")))

    def die(done: int) -> None:
        if dist.get_rank() == 1:
            os._exit(3)

    params = SamplingParams(n=4, max_new_tokens=100, stop_token_ids=STOP)
    engine.generate(make_prompts(8), params, die)


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    with pytest.raises(RankError, match="lost or fell out of step"):
        run_ranks(2, dying)
