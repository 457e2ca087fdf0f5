"""Micro-batches: packed and uneven passes."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import Products
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from thorough import and_slow
from tiny_engine import (
    completions_batch,
    fill_value_head,
    random_completions,
    response_log_probs,
    save_family,
    shared_prompts_batch,
    tiny_model,
    training_batch,
)
from torch import Tensor

from engine.batch import Batch
from engine.config import ActorConfig, CriticConfig, LoRAConfig, ParallelConfig
from engine.errors import ConfigError
from engine.kernels import attention
from engine.kernels.training_ops import recurring_size
from engine.models import forward, packed_attention, vocabulary_head
from engine.models.forward import LogProbReader
from engine.models.lora import add_adapters
from engine.models.packing import packing_of
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.sharded_model import ShardedModel, micro_batches, trim
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.role import ProcessState, WorkerContext


@pytest.mark.usefixtures("one_thread")
@given(rows=st.integers(1, 12), seed=st.integers(0, 1000), budget=st.integers(1, 120))
def test_every_row_once_and_within_the_budget(rows: int, seed: int, budget: int) -> None:
    batch = training_batch(rows, seed)
    seen: list[int] = []
    for index, micro in micro_batches(batch, budget):
        lengths = micro["attention_mask"].sum(1)
        assert len(micro) == 1 or len(micro) * int(lengths.max()) <= budget
        seen += index.tolist()
        p, r = micro["prompts"].shape[1], micro["responses"].shape[1]
        present = batch["response_mask"][index].bool()
        assert p == int(batch["attention_mask"][index, : batch["prompts"].shape[1]].sum(1).max())
        assert r == int(present.sum(1).max())
        for name in ("advantages", "returns", "responses"):
            assert torch.equal(micro[name], batch[name][index, :r]), name
            assert micro[name].shape == (len(index), r)
    assert sorted(seen) == list(range(rows))


@pytest.mark.usefixtures("one_thread")
def test_trimmed_log_probs_equal_untrimmed_ones() -> None:
    model = tiny_model("qwen2")
    batch = completions_batch(*random_completions(10))
    with torch.no_grad():
        whole = response_log_probs(model, batch, 1.0)
        for index, micro in micro_batches(batch, 30):
            part = response_log_probs(model, micro, 1.0)
            width = part.shape[1]
            torch.testing.assert_close(part, whole[index, :width], atol=1e-5, rtol=0)
            assert whole[index, width:].eq(0).all()


def packed_gradients(checkpoints: bool | str, rank: int) -> tuple[int, dict[str, Tensor]]:
    """Count the products of a pass over packed rows, its head in chunks, and get its gradients."""
    model = tiny_model("qwen2")
    if rank:
        add_adapters(model, LoRAConfig(rank=rank), seed=0)
    options = {"activation_checkpointing": checkpoints, "packing": True}
    sharded = ShardedModel(model, Ranks(Layout()), ParallelConfig.model_validate(options))
    micro = shared_prompts_batch()
    with Products() as products, sharded.forward(micro, LogProbReader(0.9, entropy=True)) as out:
        (out["log_probs"] * micro["advantages"]).sum().backward()
    named = sharded.module.named_parameters()
    return products.count, {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rank", [0, 3])
def test_selective_checkpoints_of_packed_rows(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms' gradients of fused layers differ by how their tensors lie in memory."""
    in_chunks = partial(vocabulary_head.chunked_statistics, chunk_tokens=7)
    monkeypatch.setattr(forward, "chunked_statistics", in_chunks)
    none, plain = packed_gradients(False, rank)
    selective, got = packed_gradients("selective", rank)
    full, _ = packed_gradients(True, rank)
    assert none < selective < full
    for name, wanted in plain.items():
        tolerance = 1e-6 if "norm" in name else 0.0
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("one_thread")
def test_trim_cuts_both_outsides() -> None:
    batch = completions_batch([[1, 2, 3], [4]], [[5], [6, 7]])
    short = trim(batch.rows([1]))
    assert short["input_ids"].tolist() == [[4, 6, 7]]
    assert short["prompts"].tolist() == [[4]]
    assert short["group_ids"].tolist() == [1]


@pytest.mark.usefixtures("one_thread")
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda s: sum(s) > 1),
    seed=st.integers(0, 1000),
    budget=st.integers(1, 120),
)
def test_packed_every_row_comes_once_and_a_prompt_counts_once(
    sizes: list[int], seed: int, budget: int
) -> None:
    batch = shared_prompts_batch(sizes, seed)
    seen: list[int] = []
    for index, micro in micro_batches(batch, budget, packing=True):
        prompts = micro["attention_mask"][:, : micro["prompts"].shape[1]]
        unlike = {
            tuple(ids[on.bool()].tolist())
            for ids, on in zip(micro["prompts"], prompts, strict=True)
        }
        own = int(micro["attention_mask"].sum() - prompts.sum())
        assert len(micro) == 1 or own + sum(map(len, unlike)) <= budget
        assert torch.equal(
            micro["advantages"], batch["advantages"][index, : micro["responses"].shape[1]]
        )
        seen += index.tolist()
    assert sorted(seen) == list(range(sum(sizes)))


@pytest.mark.usefixtures("one_thread")
def test_auto_packs_where_that_saves_enough() -> None:
    alike = completions_batch([[5, 6, 7, 8]] * 6, [[9, 10]] * 6)
    unlike = completions_batch([[5, 6, 7, i] for i in range(6)], [[9, 10]] * 6)
    rows = [len(micro) for _, micro in micro_batches(alike, 16, "auto")]
    assert rows == [6], "4 + 6 · 2 tokens"
    for batch, packing in ((alike, False), (unlike, "auto")):
        assert [len(micro) for _, micro in micro_batches(batch, 16, packing)] == [2, 2, 2]


def sharded(packing: Any, family: str = "qwen2", ranks: Ranks | None = None) -> ShardedModel:
    ranks = ranks or Ranks(Layout())
    sizes = {"tp": ranks.layout.tp, "fsdp": ranks.layout.fsdp, "sp": ranks.layout.sp}
    return ShardedModel(tiny_model(family), ranks, ParallelConfig(packing=packing, **sizes))


def log_probs(model: ShardedModel) -> Tensor:
    batch = shared_prompts_batch()
    reader = LogProbReader(1.0, statistics=model.statistics())
    return model.outputs(batch, model.micro_batches(batch, 1000), reader)["log_probs"]


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let completions see each other."""
    cut = packed_attention._Block

    def seen(*args: Any) -> Any:
        return cut(*args[:-1], args[-1].logical_and(torch.ones_like(args[-1]).triu(1)))

    masked = attention._attention_mask

    def all_seen(rows: Any, longest: int) -> Tensor:
        return masked([replace(row, cuts=()) for row in rows], longest)

    forget()
    monkeypatch.setattr(packed_attention, "_Block", seen)
    monkeypatch.setattr(attention, "_attention_mask", all_seen)


def forget() -> None:
    """No mask is taken from an earlier pass."""
    packed_attention._blocks.cache_clear()
    attention._plan.cache_clear()


@pytest.mark.usefixtures("one_thread")
def test_rows_that_come_out_different_are_padded_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, subject = log_probs(sharded(False)), sharded("auto")
    damage(monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(log_probs(subject), wanted, rtol=0, atol=0)
    forget()
    [said] = caplog.messages
    assert "rows are padded from here on" in said
    assert packing_of(subject.module) is False


@pytest.mark.usefixtures("one_thread")
def test_rows_that_come_out_the_same_are_packed() -> None:
    wanted, subject = log_probs(sharded(False)), sharded("auto")
    found, seen = log_probs(subject), []
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert packing_of(subject.module) == "auto"
    module: Any = subject.module
    module.get_input_embeddings().register_forward_hook(lambda _, x, y: seen.append(x[0].numel()))
    assert torch.equal(log_probs(subject), found)
    assert seen == [packed_tokens(shared_prompts_batch())], "one pass, and no check again"


def packed_tokens(batch: Batch) -> int:
    """Each prompt once, and of each response all but the last; filled up to a size that recurs."""
    width = batch["prompts"].shape[1]
    mask = batch["attention_mask"]
    own = (mask[:, width:].sum(1) - 1).clamp(min=0).sum()
    prompts = {
        tuple(row[on].tolist())
        for row, on in zip(batch["prompts"], mask[:, :width].bool(), strict=True)
    }
    return recurring_size(int(own) + sum(map(len, prompts)))


def on_a_rank(layout: Layout, broken: int) -> tuple[Tensor, Any]:
    ranks = Ranks.form(layout)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == broken:
                damage(patch)
            subject = sharded(True, "llama", ranks)
            return log_probs(subject), packing_of(subject.module)
    finally:
        forget()


@pytest.mark.usefixtures("one_thread")
def test_ranks_agree_to_pad() -> None:
    """Else they would wait for each other's collectives."""
    wanted = log_probs(sharded(False, "llama"))
    for found, packing in run_ranks(2, on_a_rank, Layout(fsdp=2), 1):
        assert packing is False
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_a_model_that_can_t_is_padded_by_auto_and_refused_by_true(
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager = tiny_model("llama")
    eager.set_attn_implementation("eager")
    ranks, config = Ranks(Layout()), ParallelConfig()
    assert config.packing == "auto"
    assert packing_of(ShardedModel(eager, ranks, config).module) is False
    [said] = caplog.messages
    assert "rows are padded" in said
    assert "attn_implementation='eager'" in said
    with pytest.raises(ConfigError, match="leave packing off"):
        ShardedModel(eager, ranks, ParallelConfig(packing=True))


def in_shares(layout: Layout) -> tuple[Tensor, Any, int]:
    """Log-probs of rows that share prompts, when they are packed, and the tokens of a pass."""
    subject = sharded("auto", "qwen2", Ranks.form(layout))
    widths: list[int] = []
    module: Any = subject.module
    module.get_input_embeddings().register_forward_hook(lambda _, x, y: widths.append(x[0].numel()))
    return log_probs(subject), packing_of(subject.module), widths[-1]


@pytest.mark.usefixtures("one_thread")
def test_shared_sequences_are_packed() -> None:
    """Each rank runs its half of the packed tokens."""
    wanted = log_probs(sharded(False))
    for found, packing, width in run_ranks(2, in_shares, Layout(sp=2)):
        assert packing == "auto"
        assert width == -(-packed_tokens(shared_prompts_batch()) // 2)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def in_stages(layout: Layout) -> tuple[Tensor, Any, int]:
    """The same of a stage."""
    ranks = Ranks.form(layout)
    subject = ShardedModel(tiny_model("qwen2"), ranks, ParallelConfig(pp=layout.pp, sp=layout.sp))
    widths: list[int] = []
    module: Any = subject.module
    module.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    return log_probs(subject), packing_of(subject.module), widths[-1]


@pytest.mark.usefixtures("one_thread")
def test_stages_take_packed_rows() -> None:
    wanted = log_probs(sharded(False))
    for found, packing, width in run_ranks(2, in_stages, Layout(pp=2)):
        assert packing == "auto"
        assert width == packed_tokens(shared_prompts_batch())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


BUDGET = 64  # tokens a micro-batch


PASSES = (2, 6)  # micro-batches by rank


def rows(data_rank: int) -> Batch:
    """Six completions, short or long."""
    length = (6, 20)[data_rank]
    prompts = [[5 + i] * length for i in range(6)]
    responses = [[40 + i] * length for i in range(6)]
    return completions_batch(prompts, responses)


def course(folder: str, sizes: dict[str, int]) -> list[tuple[int, dict[str, Tensor]]]:
    """The passes of one rank's rows, and what each role gives for them twice; alone: of both."""
    rank = dist.get_rank() if sizes else 0
    world = Layout(**sizes).world_size
    config = ActorConfig.model_validate({"parallel": sizes, "max_tokens_per_micro_batch": BUDGET})
    layout = Layout.of(config.parallel)
    process = ProcessState()

    def context(role: str) -> WorkerContext:
        return WorkerContext(role, rank, world, process, layout)

    actor = ActorWorker(
        context("actor"), model_path=folder, config=config, temperature=0.8, total_steps=1, seed=0
    )
    reference = ReferenceWorker(
        context("reference"),
        model_path=folder,
        temperature=1.3,
        max_tokens_per_micro_batch=BUDGET,
        parallel=config.parallel,
    )
    asked = [actor.log_probs, reference.log_probs]
    if config.parallel.pp == 1:
        asked.append(reference.full_kl)
    critic = CriticWorker(
        context("critic"),
        model_path=folder,
        config=CriticConfig.model_validate({"max_tokens_per_micro_batch": BUDGET}),
        total_steps=1,
        seed=0,
        parallel=config.parallel,
    )
    fill_value_head(critic.sharded)
    asked.append(critic.values)
    found = []
    for part in [layout.data_shard(rank).index] if sizes else range(2):
        batch = rows(part)
        given: dict[str, Tensor] = {}
        for _ in range(2):
            for method in asked:
                given |= method(batch).as_dict()
        found.append((len(list(micro_batches(batch, BUDGET))), given))
    return found


@pytest.mark.parametrize(
    "sizes", and_slow([{"fsdp": 2}], [{"fsdp": 2, "pp": 2}, {"fsdp": 2, "sp": 2}]), ids=str
)
def test_ranks_with_more_passes_than_others_end(
    tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, int]
) -> None:
    folder = str(save_family("qwen2", tmp_path_factory.mktemp("model")))
    wanted = course(folder, {})
    assert tuple(count for count, _ in wanted) == PASSES
    world = Layout(**sizes).world_size
    seen = set()
    for [(count, gradients)] in run_ranks(world, course, folder, sizes, timeout_s=45.0):
        part = PASSES.index(count)
        seen.add(part)
        for name, value in gradients.items():
            torch.testing.assert_close(value, wanted[part][1][name], rtol=1e-4, atol=1e-5, msg=name)
    assert seen == {0, 1}
