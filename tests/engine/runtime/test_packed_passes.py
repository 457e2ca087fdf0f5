"""Passes are packed where layout and model allow it, and only if they give what padded ones do."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tiny_engine import shared_prompts_batch, tiny_model
from torch import Tensor

from engine.batch import Batch
from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.kernels import attention
from engine.kernels.training_ops import recurring_size
from engine.models import packed_attention
from engine.models.forward import LogProbReader
from engine.models.packing import packing_of
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.sharded_model import ShardedModel

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_ranks_agree_to_pad() -> None:
    """Else they would wait for each other's collectives."""
    wanted = log_probs(sharded(False, "llama"))
    for found, packing in run_ranks(2, on_a_rank, Layout(fsdp=2), 1):
        assert packing is False
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


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


def test_stages_take_packed_rows() -> None:
    wanted = log_probs(sharded(False))
    for found, packing, width in run_ranks(2, in_stages, Layout(pp=2)):
        assert packing == "auto"
        assert width == packed_tokens(shared_prompts_batch())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
