"""Tensor-parallel native ranks that can't decode together: refused, no hanging."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankError, run_ranks
from rollout_models import build, make_prompts
from tensor_parallel_cases import GREEDY, STOP, local_shards, model_of, tp_shard

from engine.errors import ModelError, RolloutError
from engine.rollout.native import NativeEngine, TPModelShard
from engine.rollout.protocol import SamplingParams


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
