"""Micro-batches: every row once, within the budget, and the same numbers after trimming."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import (
    completions_batch,
    random_completions,
    response_log_probs,
    shared_prompts_batch,
    tiny_model,
    training_batch,
)

from engine.runtime.sharded_model import micro_batches, trim

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_trim_cuts_both_outsides() -> None:
    batch = completions_batch([[1, 2, 3], [4]], [[5], [6, 7]])
    short = trim(batch.rows([1]))
    assert short["input_ids"].tolist() == [[4, 6, 7]]
    assert short["prompts"].tolist() == [[4]]
    assert short["group_ids"].tolist() == [1]


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


def test_auto_packs_where_that_saves_enough() -> None:
    alike = completions_batch([[5, 6, 7, 8]] * 6, [[9, 10]] * 6)
    unlike = completions_batch([[5, 6, 7, i] for i in range(6)], [[9, 10]] * 6)
    rows = [len(micro) for _, micro in micro_batches(alike, 16, "auto")]
    assert rows == [6], "4 + 6 · 2 tokens"
    for batch, packing in ((alike, False), (unlike, "auto")):
        assert [len(micro) for _, micro in micro_batches(batch, 16, packing)] == [2, 2, 2]
