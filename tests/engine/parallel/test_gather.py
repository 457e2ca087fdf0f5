"""Whole parameters out of spread models and into them again."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import run_ranks
from sharded_training import decoder_layers
from thorough import and_slow
from tiny_engine import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from engine.config import ParallelConfig
from engine.errors import CheckpointError
from engine.parallel import fsdp
from engine.parallel import module_shards as full
from engine.parallel.layout import Layout
from engine.parallel.module_shards import local_tensor
from engine.parallel.pipeline_parallel import extract_stage
from engine.parallel.process_groups import Ranks
from engine.parallel.tensor_parallel import apply_tensor_parallel


def plain_weights(family: str, seed: int) -> dict[str, Tensor]:
    """As transformers names and ties them."""
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
    config = ParallelConfig(offload_params=True)
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
