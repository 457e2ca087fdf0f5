"""A trainer whose shares lie in the rollout's tensors: nothing is held twice, training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from live_layouts import storages, tiny, trained, wrong

from engine.parallel.exchange import Exchange
from engine.parallel.gather import full_parameters
from engine.parallel.grouping import grouping
from engine.parallel.layout import Layout, ModelShape
from engine.parallel.module_shards import gather_holdings, local_tensors
from engine.parallel.pipeline_stages import layers_by_stage
from engine.parallel.process_groups import Ranks
from engine.parallel.reshard import RankPlan, plan
from engine.parallel.sharding_specs import merge_stages, rollout_holdings
from engine.parallel.shared import share_storage
from engine.parallel.tensor_parallel import apply_tensor_parallel


def moved_in(layout: Layout, tp: int, dtype: torch.dtype, columns: bool) -> dict[str, Any]:
    """Share storage, update the trainer's shares where they lie now, exchange."""
    reference = tiny()
    whole = {name: p.detach().clone() for name, p in reference.named_parameters()}
    shape = ModelShape.of(reference.config)
    stages = layers_by_stage(shape, layout.pp)
    model = trained(reference, layout)
    before = {name: t.clone() for name, t in local_tensors(model).items()}
    held = gather_holdings(model)
    groups = grouping(layout, 1, tp)
    target = rollout_holdings(
        held.shapes, groups, shape, dtype, merge_stages(stages, 1), fused=True
    )
    rank = dist.get_rank()
    planned = plan(held, target)
    filled = storages(target, rank)
    part = planned.for_rank(rank)
    shared = share_storage(model, part, filled, columns=columns)
    source = local_tensors(model)
    same = all(torch.equal(t, before[name]) for name, t in source.items())
    with torch.no_grad():
        for tensor in source.values():
            tensor.mul_(2)
    moved = Exchange(part, source, filled).run()
    return {
        "same": same,
        "mistakes": wrong(target, rank, filled, {name: 2 * t for name, t in whole.items()}),
        "shared": [shared, moved.shared],
        "copied": moved.kept,
        "kept": int(planned.kept[rank]),
        "apart": sum(t.nbytes for t in source.values() if not t.is_contiguous()),
        "columns": sum(t.nbytes for n, t in source.items() if "o_proj" in n or "down_proj" in n),
    }


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(pp=2, tp=2)], ids=str)
def test_no_element_is_held_twice(layout: Layout) -> None:
    for seen in run_ranks(4, moved_in, layout, 2, torch.float32, True):
        assert seen["same"]
        assert seen["mistakes"] == []
        assert seen["shared"] == [seen["kept"]] * 2
        assert seen["copied"] == 0


def test_shares_that_are_columns_stay_unless_asked_for() -> None:
    for seen in run_ranks(4, moved_in, Layout(tp=4), 2, torch.float32, False):
        assert seen["same"]
        assert seen["mistakes"] == []
        assert seen["apart"] == 0
        assert seen["copied"] == seen["columns"] > 0
        assert seen["shared"] == [seen["kept"] - seen["columns"]] * 2


@pytest.mark.parametrize(
    ("layout", "dtype"), [(Layout(tp=4), torch.bfloat16), (Layout(fsdp=4), torch.float32)]
)
def test_what_can_t_be_shared_is_copied(layout: Layout, dtype: torch.dtype) -> None:
    for seen in run_ranks(4, moved_in, layout, 2, dtype, True):
        assert seen["same"]
        assert seen["mistakes"] == []
        assert seen["shared"] == [0, 0]
        assert seen["copied"] == seen["kept"] > 0


def train(shares: bool, columns: bool) -> tuple[list[float], dict[str, Any]]:
    """Losses and last weights of AdamW steps on two ranks, with or without rollout's storage."""
    ranks = Ranks.form(Layout(tp=2))
    model: Any = tiny()
    apply_tensor_parallel(model, ranks.submesh("tp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=not columns)
    if shares:
        held = gather_holdings(model)
        shape = ModelShape.of(model.config)
        target = rollout_holdings(held.shapes, grouping(ranks.layout), shape, torch.float32)
        part: RankPlan = plan(held, target).for_rank(ranks.rank)
        filled = storages(target, ranks.rank)
        assert share_storage(model, part, filled, columns=columns) > 0
    losses = []
    for step in range(3):
        ids = torch.randint(128, (2, 6), generator=torch.Generator().manual_seed(step))
        loss = model.model(ids, use_cache=False).last_hidden_state.square().mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: w.clone() for name, w in full_parameters(model, ranks)}


@pytest.mark.parametrize("columns", [False, True])
def test_training_goes_on_as_before(columns: bool) -> None:
    plain, shared = (run_ranks(2, train, shares, columns)[0] for shares in (False, True))
    assert shared[0] == pytest.approx(plain[0], rel=1e-6)
    for name, weight in plain[1].items():
        torch.testing.assert_close(shared[1][name], weight, rtol=1e-5, atol=1e-6)
