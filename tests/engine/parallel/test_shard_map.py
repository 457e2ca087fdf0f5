"""Maps of shards, and gathering by them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from reshard_cases import (
    contiguous,
    decoder_shapes,
    local_parts,
    merge_stages,
    numbered,
    training_shard_map,
)
from sharded_training import decoder_layers
from thorough import and_slow
from tiny_engine import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from engine.config import ParallelConfig
from engine.errors import CheckpointError, ConfigError
from engine.parallel import fsdp
from engine.parallel import module_shards as full
from engine.parallel.layout import Layout, ModelShape, rollout_layout
from engine.parallel.module_shards import local_tensor
from engine.parallel.pipeline_parallel import extract_stage
from engine.parallel.process_groups import Ranks
from engine.parallel.shard_maps import Box, ShardMap, rollout_shard_map
from engine.parallel.tensor_parallel import apply_tensor_parallel

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


def plain_weights(family: str, seed: int) -> dict[str, Tensor]:
    """The weights of a tiny model, as transformers names and ties them."""
    model = tiny_model(family, seed)
    return {name: tensor.detach() for name, tensor in full.named_tensors(model).items()}


def spread(family: str, layout: Layout) -> tuple[nn.Module, Ranks, dict[str, str]]:
    """A tiny model on this rank of the layout, and the name of its repeated tensor, if any."""
    ranks = Ranks.form(layout)
    whole = tiny_model(family)
    model: nn.Module = whole
    layers = decoder_layers(model)
    if layout.pp > 1:
        model = extract_stage(whole, ranks.index("pp"), layout.pp)
        layers = model.layers  # type: ignore[assignment]
    if layout.tp > 1:
        apply_tensor_parallel(model, ranks.submesh("tp"))
    config = ParallelConfig(offload_policy=True)
    fsdp.shard_model(model, ranks, config, layers=layers)
    ends = {"lm_head.weight": "model.embed_tokens.weight"} if family == "qwen2" else {}
    return model, ranks, ends if layout.pp > 1 and ranks.index("pp") else {}


def out_and_in(family: str, layout: Layout) -> list[str]:
    """What went out equals the model; another model's weights go in and come out again."""
    model, ranks, copies = spread(family, layout)
    old, new = plain_weights(family, 0), plain_weights(family, 1)
    names = []
    for name, whole in full.gather_full_tensors(model, ranks, copies):
        names.append(name)
        assert torch.equal(whole, old[name]), name
    storage = full.named_tensors(model)
    full.load_full_tensors(model, new, ranks, copies)
    assert all(t is storage[n] for n, t in full.named_tensors(model).items())
    for name, whole in full.gather_full_tensors(model, ranks, copies):
        assert torch.equal(whole, new[name]), name
    end = storage.get("lm_head.weight")
    if copies and end is not None:  # the second end of a tied matrix, though never given
        part = full.shard_like(new["model.embed_tokens.weight"], end)
        assert torch.equal(local_tensor(end), part)
    return names


LAYOUTS = [
    *(Layout(fsdp=2), Layout(dp=2), Layout(tp=2), Layout(pp=2)),
    *(Layout(dp=2, fsdp=2), Layout(fsdp=2, sp=2), Layout(fsdp=2, tp=2)),
    *(Layout(pp=2, fsdp=2), Layout(pp=2, tp=2)),
]


QUICK = [
    ("qwen2", Layout(dp=2)),
    ("llama", Layout(fsdp=2, sp=2)),
    ("qwen2", Layout(fsdp=2, tp=2)),
    ("llama", Layout(pp=2, fsdp=2)),
    ("qwen2", Layout(pp=2, tp=2)),
]


MORE = [case for f in ("qwen2", "llama") for at in LAYOUTS if (case := (f, at)) not in QUICK]


@pytest.mark.parametrize(("family", "layout"), and_slow(QUICK, MORE), ids=str)
def test_wholes_go_out_and_in(family: str, layout: Layout) -> None:
    """Vocabulary 97 is uneven on 2 ranks, and on 2 · 2."""
    given = run_ranks(layout.world_size, out_and_in, family, layout)
    wanted = list(plain_weights(family, 0))
    assert all(names == given[0] for names in given)
    assert sorted(given[0]) == sorted(wanted)  # all, tied ones once
    if layout.pp == 1:
        assert given[0] == wanted


def after_a_pass() -> None:
    """Gathered weights are no obstacle, and what is loaded is what the next pass reads."""
    model, ranks, _ = spread("qwen2", Layout(fsdp=2))
    ids = torch.arange(8).view(1, 8)
    model.unshard()  # type: ignore[operator]
    full.load_full_tensors(model, plain_weights("qwen2", 1), ranks)
    with torch.no_grad():
        got = model(input_ids=ids).logits  # leaves the root's gathered, as no `call` is around it
        torch.testing.assert_close(got, tiny_model("qwen2", 1)(input_ids=ids).logits)
    for name, whole in full.gather_full_tensors(model, ranks):
        assert torch.equal(whole, plain_weights("qwen2", 1)[name])


def test_gathered_weights_are_dropped_first() -> None:
    run_ranks(2, after_a_pass)


def refusals(layout: Layout) -> None:
    model, ranks, _ = spread("llama", layout)
    wrong = plain_weights("llama", 1)
    for change, text in (
        ({"model.norm.weight": torch.zeros(3)}, r"'model.norm.weight' is of shape \[3\], this"),
        ({"model.norm.weight": None}, r"'model.norm.weight' is missing, this model wants \[32\]"),
    ):
        given = {n: t for n, t in (wrong | change).items() if t is not None}
        with pytest.raises(CheckpointError, match=text):
            full.load_full_tensors(model, given, ranks)
    for name, whole in full.gather_full_tensors(model, ranks):
        assert torch.equal(whole, plain_weights("llama", 0)[name]), name


def test_weights_of_another_model_change_nothing() -> None:
    run_ranks(2, refusals, Layout(fsdp=2))


def parts(tp: int, fsdp_: int) -> None:
    """Every size up to 7, cut in each way: the parts lie as torch's own collectives see them."""
    ranks = Ranks.form(Layout(fsdp=fsdp_, tp=tp))
    for size in range(1, 8):
        for placement in (Shard(0), Shard(1), Replicate()):
            whole = torch.arange(size * size * 2).float().view(size, 2 * size)
            module = nn.Module()
            value = distribute_tensor(whole, ranks.submesh("tp"), [placement])
            module.register_parameter("weight", nn.Parameter(value))
            fsdp.shard_model(module, ranks, ParallelConfig(), layers=[])
            part = full.shard_like(whole, module.weight)  # type: ignore[arg-type]
            mine = local_tensor(module.weight)  # type: ignore[arg-type]
            assert torch.equal(part, mine), (size, placement)
            (got,) = (w for _, w in full.gather_full_tensors(module, ranks))
            assert torch.equal(got, whole), (size, placement)


@pytest.mark.parametrize(("tp", "shares"), and_slow([(2, 2), (4, 1)], [(2, 1)]))
def test_parts_of_every_size(tp: int, shares: int) -> None:
    run_ranks(tp * shares, parts, tp, shares)


def partial_part() -> None:
    placements: list[Placement] = [Partial()]
    mesh = Ranks.form(Layout(tp=2)).submesh("tp")
    from torch.distributed.tensor import DTensor

    value = DTensor.from_local(torch.zeros(2), mesh, placements, run_check=False)
    with pytest.raises(ValueError, match="can't be loaded into the placement"):
        full.shard_like(torch.zeros(2), value)


def test_partial_sums_are_no_parameters() -> None:
    run_ranks(2, partial_part)


def test_buffers_that_are_saved_are_given_and_others_not() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.tensor([True, False]))
    model.register_buffer("lost", torch.zeros(1), persistent=False)
    given = dict(full.gather_full_tensors(model, Ranks(Layout())))
    assert list(given) == ["kept"]
    full.load_full_tensors(model, {"kept": torch.tensor([False, True])}, Ranks(Layout()))
    assert model.kept.tolist() == [False, True]  # type: ignore[operator,union-attr]
