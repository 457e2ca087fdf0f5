"""ShardMap made from layouts: hand-written cases, and what vLLM's own loaders put where."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reshard_cases import (
    contiguous,
    decoder_shapes,
    local_parts,
    merge_stages,
    numbered,
    training_shard_map,
)
from torch import Tensor

from engine.errors import ConfigError
from engine.parallel.layout import Layout, ModelShape, rollout_layout
from engine.parallel.shard_maps import Box, ShardMap, rollout_shard_map

MODEL = ModelShape(4, 8, 2, 4, 16, 24, 101)
SHAPES = decoder_shapes(MODEL, biases=True)
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def boxes(shard_map: ShardMap, name: str) -> dict[int, Box]:
    """Each rank's box of a parameter."""
    found = [
        (rank, shard.box) for shard in shard_map.parameters[name].shards for rank in shard.ranks
    ]
    return dict(sorted(found))


def test_training_shards_of_stages_tensor_parallelism_and_fsdp() -> None:
    layout = Layout(pp=2, fsdp=2, tp=2)  # rank = 4 pp + 2 fsdp + tp
    found = training_shard_map(SHAPES, layout, MODEL, [[0, 1, 2], [3]])
    queries = boxes(found, ATTENTION + "q_proj.weight")  # [32, 16]: rows for tp, then for fsdp
    assert queries == {r: Box((o, 0), (8, 16)) for r, o in enumerate([0, 16, 8, 24])}
    out = boxes(found, ATTENTION + "o_proj.weight")  # [16, 32]: columns for tp, rows for fsdp
    assert out == {r: Box(at, (8, 16)) for r, at in enumerate([(0, 0), (0, 16), (8, 0), (8, 16)])}
    embedding = boxes(found, "model.embed_tokens.weight")  # 101 rows: 51 and 50, then 26, 25
    assert [(b.offset[0], b.size[0]) for b in embedding.values()] == [
        (0, 26),
        (51, 25),
        (26, 25),
        (76, 25),
    ]
    assert boxes(found, ATTENTION + "q_proj.bias")[3] == Box((24,), (8,))
    assert boxes(found, "model.layers.0.input_layernorm.weight")[1] == Box((0,), (8,))
    assert set(boxes(found, "model.layers.3.mlp.up_proj.weight")) == {4, 5, 6, 7}
    assert set(boxes(found, "lm_head.weight")) == set(boxes(found, "model.norm.weight"))
    assert set(boxes(found, "lm_head.weight")) == {4, 5, 6, 7}


def test_a_tied_matrix_is_on_the_first_stage_and_the_last() -> None:
    tied = ModelShape(4, 8, 2, 4, 16, 24, 101, tied=True)
    layout = Layout(pp=4)
    found = training_shard_map(decoder_shapes(tied), layout, tied, [[0], [1], [2], [3]])
    assert set(boxes(found, "model.embed_tokens.weight")) == {0, 3}


def test_copies_and_sequence_ranks() -> None:
    found = training_shard_map(
        SHAPES, Layout(dp=2, sp=2), MODEL
    )  # sp ranks share weights as fsdp's do
    shards = found.parameters[MLP + "down_proj.weight"].shards
    assert [(one.box, one.ranks) for one in shards] == [
        (Box((0, 0), (8, 24)), (0, 2)),
        (Box((8, 0), (8, 24)), (1, 3)),
    ]


def test_more_ranks_than_rows_leave_some_without() -> None:
    found = training_shard_map({"model.norm.weight": (3,)}, Layout(fsdp=4), MODEL)
    assert set(boxes(found, "model.norm.weight")) == {0, 1, 2}


def test_plain_rollout_slices() -> None:
    groups = rollout_layout(Layout(fsdp=4), tp=4)
    found = rollout_shard_map(SHAPES, groups, MODEL, torch.bfloat16)
    keys = boxes(found, ATTENTION + "k_proj.weight")  # two heads of 4 rows over four ranks
    assert [box.offset[0] for _, box in sorted(keys.items())] == [0, 0, 4, 4]
    assert {box.size for box in keys.values()} == {(4, 16)}
    head = boxes(found, "lm_head.weight")
    assert [(box.offset[0], box.size[0]) for _, box in sorted(head.items())] == [
        (0, 26),
        (26, 26),
        (52, 26),
        (78, 23),
    ]
    assert boxes(found, MLP + "down_proj.weight")[3] == Box((0, 18), (16, 6))
    assert boxes(found, "model.norm.weight")[3] == Box((0,), (16,))
    assert found.parameters[ATTENTION + "k_proj.weight"].storage == ATTENTION + "k_proj.weight"


def test_rollout_stages() -> None:
    groups = contiguous(4, pp=2, tp=2)
    stages = merge_stages([[0], [1], [2], [3]], 2)
    assert stages == [[0, 1], [2, 3]]
    found = rollout_shard_map(SHAPES, groups, MODEL, torch.bfloat16, stages)
    assert set(boxes(found, "model.layers.1.mlp.up_proj.weight")) == {0, 1}
    assert set(boxes(found, "model.layers.2.mlp.up_proj.weight")) == {2, 3}
    assert set(boxes(found, "model.embed_tokens.weight")) == {0, 1}
    assert set(boxes(found, "lm_head.weight")) == {2, 3}


@pytest.fixture(scope="module")
def vllm_layers() -> Iterator[Any]:
    """vLLM's fused layers, whose place among tensor parallel ranks a test may set."""
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import vocab_parallel_embedding

    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):

        def stand_at(rank: int, size: int) -> None:
            for module in (linear, parameter, vocab_parallel_embedding):
                patch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
                patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

        yield SimpleNamespace(
            stand_at=stand_at,
            QKVParallelLinear=linear.QKVParallelLinear,
            MergedColumnParallelLinear=linear.MergedColumnParallelLinear,
            RowParallelLinear=linear.RowParallelLinear,
            VocabParallelEmbedding=vocab_parallel_embedding.VocabParallelEmbedding,
        )


def loaded_by_vllm(layers: Any, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What vLLM's layers hold after loading whole parameters, on the rank that is set."""
    fused = layers.QKVParallelLinear(MODEL.hidden, MODEL.head_dim, MODEL.heads, MODEL.kv_heads)
    for kind in "qkv":
        for part in ("weight", "bias"):
            parameter = getattr(fused, part)
            parameter.weight_loader(parameter, whole[f"{ATTENTION}{kind}_proj.{part}"], kind)
    gate_up = layers.MergedColumnParallelLinear(MODEL.hidden, [MODEL.intermediate] * 2, bias=False)
    for number, kind in enumerate(("gate", "up")):
        gate_up.weight.weight_loader(gate_up.weight, whole[f"{MLP}{kind}_proj.weight"], number)
    down = layers.RowParallelLinear(MODEL.intermediate, MODEL.hidden, bias=False)
    down.weight.weight_loader(down.weight, whole[f"{MLP}down_proj.weight"])
    table = layers.VocabParallelEmbedding(MODEL.vocab, MODEL.hidden)
    table.weight.weight_loader(table.weight, whole["model.embed_tokens.weight"])
    return {
        ATTENTION + "qkv_proj.weight": fused.weight.data,
        ATTENTION + "qkv_proj.bias": fused.bias.data,
        MLP + "gate_up_proj.weight": gate_up.weight.data,
        MLP + "down_proj.weight": down.weight.data,
        "model.embed_tokens.weight": table.weight.data,
    }


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_fused_slices_are_where_vllm_loads_them(vllm_layers: Any, tp: int) -> None:
    """Grouped and replicated key heads, padded vocabulary (101 → 128), biases."""
    shard_map = rollout_shard_map(SHAPES, contiguous(tp, tp=tp), MODEL, torch.float32, fused=True)
    whole = {name: tensor.float() for name, tensor in numbered(SHAPES).items()}
    for rank in range(tp):
        vllm_layers.stand_at(rank, tp)
        ours = local_parts(shard_map, whole, rank)
        for storage, theirs in loaded_by_vllm(vllm_layers, whole).items():
            rows = ours[storage].shape[0] if storage in ours else 0
            if rows:
                assert torch.equal(ours[storage], theirs[:rows])
            if "embed" in storage:
                assert theirs.shape[0] == 128 // tp
                assert not theirs[rows:].any()  # padding, which no box covers
            else:
                assert rows == theirs.shape[0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: training_shard_map(SHAPES, Layout(pp=2), MODEL, [[0, 1], [3]]),
            r"stages \[\[0, 1\], \[3\]\] are not 4 layers over 2 stages",
        ),
        (lambda: training_shard_map(SHAPES, Layout(pp=2), MODEL), "are not 4 layers over 2 stages"),
        (
            lambda: training_shard_map({"model.experts.weight": (4, 4)}, Layout(tp=2), MODEL),
            r"'model.experts.weight' \[4, 4\] has no tensor parallel rule; use tp=1",
        ),
        (
            lambda: training_shard_map({"model.layers.9.x.bias": (4,)}, Layout(), MODEL),
            "is of layer 9, but the stages have 4 layers",
        ),
        (
            lambda: rollout_shard_map(SHAPES, contiguous(3, tp=3), MODEL, torch.float32),
            "rollout tp=3 does not divide the model's 8 attention heads",
        ),
        (
            lambda: rollout_shard_map(
                SHAPES, contiguous(4, tp=4), ModelShape(4, 12, 6, 4, 16, 24, 101), torch.float32
            ),
            "rollout tp=4 neither divides the model's 6 key heads",
        ),
    ],
)
def test_what_does_not_fit(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()
