"""Experts that rollout's routers chose: recorded a token, and what training repeats."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import tiny_model
from torch import Tensor, nn

from engine.batch import Batch
from engine.config import ParallelConfig
from engine.data.collate import collate_completions, pad_tokens
from engine.errors import ConfigError
from engine.models.forward import LogProbReader
from engine.models.routing import routers
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.rollout.native.decoder import RoutedExperts
from engine.rollout.native.engine import NativeEngine
from engine.rollout.protocol import Completion, SamplingParams
from engine.runtime.sharded_model import ShardedModel, untrimmed

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12]]
PARAMS = SamplingParams(n=3, max_new_tokens=7, stop_token_ids=tuple(range(0, 97, 4)), seed=5)


def batch_of(done: list[Completion]) -> Batch:
    source = Batch({"group_ids": torch.arange(len(PROMPTS))}, {"prompt_ids": PROMPTS})
    batch = collate_completions(
        source,
        [c.prompt_index for c in done],
        [c.token_ids for c in done],
        [c.log_probs for c in done],
        pad_token_id=0,
    )
    experts = [c.routed_experts for c in done if c.routed_experts is not None]
    return batch | {"routed_experts": pad_tokens(experts, batch["attention_mask"])}


def trained(model: nn.Module, batch: Batch, replay: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and chosen experts of a training pass."""
    chosen: list[Tensor] = []
    sharded = ShardedModel(model, Ranks(Layout()), ParallelConfig(packing=False))
    passes = sharded.micro_batches(batch, 64)
    reader = LogProbReader(1.0, replay=replay, record=chosen.append)
    out = sharded.outputs(batch, passes, reader)
    return out["log_probs"], untrimmed(batch, passes, chosen)


@pytest.mark.parametrize("slots", [2, 512])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_each_token_s_experts_are_those_of_training(family: str, slots: int) -> None:
    """In batches one after the other, from which sequences of many lengths leave, as in one."""
    model = tiny_model(family)
    done = NativeEngine(model, max_num_seqs=slots, routed_experts=True).generate(PROMPTS, PARAMS)
    for one in done:
        assert one.routed_experts is not None
        assert len(one.routed_experts) == len(PROMPTS[one.prompt_index]) + len(one.token_ids) - 1
    assert len({len(c.token_ids) for c in done}) > 2
    batch = batch_of(done)
    log_probs, chosen = trained(model, batch, replay=False)
    assert chosen.any()
    assert torch.equal(chosen, batch["routed_experts"])
    assert torch.allclose(log_probs, batch["rollout_log_probs"], atol=1e-4)
    plain = NativeEngine(model, max_num_seqs=slots).generate(PROMPTS, PARAMS)
    assert all(c.routed_experts is None for c in plain)
    assert [c.token_ids for c in plain] == [c.token_ids for c in done]


def test_replay_takes_the_gap_between_rollout_and_training_away() -> None:
    """Routers that compute a little otherwise in training choose others, and log-probs differ."""
    model = tiny_model("qwen3_moe")
    batch = batch_of(NativeEngine(model, routed_experts=True).generate(PROMPTS, PARAMS))

    def otherwise(router: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        noise = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(0))
        return (args[0] + 0.05 * noise,)

    for router in routers(model):
        router.register_forward_pre_hook(otherwise)
    gaps = [
        (trained(model, batch, replay)[0] - batch["rollout_log_probs"]).abs().max()
        for replay in (False, True)
    ]
    assert gaps[0] > 3 * gaps[1]


def test_a_dense_model_has_nothing_to_record() -> None:
    with pytest.raises(ConfigError, match="enable_rollout_routing_replay"):
        RoutedExperts(tiny_model("qwen2"))
