"""`hybrid_config`: the layout that sizes come to, and sizes that come to none."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import tiny_model

from engine.errors import ConfigError
from engine.parallel.layout import Layout
from engine.runtime import HybridConfig


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
