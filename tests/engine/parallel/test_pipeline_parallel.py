"""Pipeline schedules and stages."""

from __future__ import annotations

import itertools
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import CHANGES
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from stage_models import VOCABULARY, Spec, micro_batches, tiny_model
from thorough import and_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from engine.config import ParallelConfig
from engine.errors import ConfigError, WorkerError
from engine.models.lora import BaseModelView, has_adapters
from engine.models.value_head import CriticModel, create_critic_model
from engine.models.vocabulary_head import require_vocabulary_head
from engine.parallel.fsdp import shard_model
from engine.parallel.gradients import all_reduce_gradients, clip_grad_norm
from engine.parallel.layout import Layout, ModelShape
from engine.parallel.pipeline_parallel import (
    Pipeline,
    PipelineStage,
    extract_stage,
    layers_by_stage,
    split_layers,
    sum_tied_gradients,
    tied_across_stages,
    tied_duplicates,
)
from engine.parallel.process_groups import Ranks
from engine.parallel.sequence_parallel import apply_ulysses, local_tokens, split_tokens, sum_tokens

COUNTS = (5, 1)  # micro-batches of each step; all their shapes differ


READS = (4, 1)  # the same of each run without a backward pass


CLIP = 0.1


TIMEOUT_S = 3


def loss_of(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    """Sum of the next tokens' negative log-probs, over a count that is the same everywhere."""
    logits = head(hidden[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / 50


def descent(model: nn.Module) -> torch.optim.SGD:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.5, foreach=False)


Trained = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights


def train_alone(spec: Spec, ways: int = 1) -> Trained:
    """What one rank does with all of the `ways` data ranks' micro-batches."""
    model: Any = tiny_model(spec)
    optimizer = descent(model)
    losses, norms = [], []
    for step, count in enumerate(COUNTS):
        for way in range(ways):
            for ids in micro_batches(step, way, count):
                hidden = model.base_model(ids, use_cache=False).last_hidden_state
                loss = loss_of(model.lm_head, hidden, ids)
                loss.backward()
                losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.named_parameters())


def form(
    spec: Spec, layout: Layout, compute_dtype: Any = "float32"
) -> tuple[Ranks, PipelineStage, Pipeline]:
    ranks = Ranks.form(layout)
    model = tiny_model(spec)
    stage = extract_stage(model, ranks.index("pp"), layout.pp)
    config = ParallelConfig(compute_dtype=compute_dtype, **layout.sizes)
    shard_model(stage, ranks, config, layers=stage.layers)
    dtype = getattr(torch, compute_dtype)
    return ranks, stage, connect(stage, ranks, model.config.hidden_size, dtype)


def connect(
    stage: nn.Module, ranks: Ranks, size: int, dtype: torch.dtype = torch.float32
) -> Pipeline:
    return Pipeline(stage, ranks, size, dtype, torch.device("cpu"))


def train_stage(spec: Spec, layout: Layout) -> Trained:
    ranks, stage, pipeline = form(spec, layout)
    optimizer, way = descent(stage), ranks.index("dp", "fsdp")
    losses: list[float] = []
    norms = []
    for step, count in enumerate(COUNTS):
        batches = micro_batches(step, way, count)
        for part in batches[: count // 2], batches[count // 2 :]:  # gradients of both add up

            def read(number: int, hidden: Tensor, part: list[Tensor] = part) -> Tensor:
                loss = loss_of(stage.lm_head, hidden, part[number])
                losses.append(loss.item())
                return loss

            pipeline.run(part, read, backward=True)
        all_reduce_gradients(stage.parameters(), ranks)
        sum_tied_gradients(stage, ranks)
        norms.append(clip_grad_norm(stage.parameters(), ranks, CLIP, tied_duplicates(stage)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, whole_weights(stage)


def train_shared_rows(spec: Spec, layout: Layout) -> Trained:
    """As `train_stage`, with each row's tokens shared by the `sp` ranks."""
    ranks = Ranks.form(layout)
    model = tiny_model(spec)
    stage = extract_stage(model, ranks.index("pp"), layout.pp)
    apply_ulysses(stage, ranks)
    shard_model(stage, ranks, ParallelConfig(**layout.sizes), layers=stage.layers)
    pipeline = connect(stage, ranks, model.config.hidden_size)
    optimizer = descent(stage)
    losses: list[float] = []
    norms = []
    for step, count in enumerate(COUNTS):
        batches = micro_batches(step, 0, count)
        shares = [split_tokens(ids, ranks) for ids in batches]

        def read(number: int, hidden: Tensor, batches: list[Tensor] = batches) -> Tensor:
            loss = shared_loss(stage, hidden, batches[number], ranks)
            losses.append(loss.item())
            return loss

        ids, positions = zip(*shares, strict=True)
        pipeline.run(ids, read, backward=True, positions=positions)
        sum_tied_gradients(stage, ranks)
        norms.append(clip_grad_norm(stage.parameters(), ranks, CLIP, tied_duplicates(stage)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, whole_weights(stage)


def shared_loss(stage: PipelineStage, hidden: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """`loss_of` of this rank's tokens and the others'."""
    rows, columns = torch.ones_like(ids[:, 1:]).nonzero(as_tuple=True)
    mine, at = local_tokens(columns, hidden.shape[1], ranks)
    logits = stage.lm_head(hidden[rows[mine], at]).float()
    lost = F.cross_entropy(logits, ids[:, 1:].flatten()[mine], reduction="none")
    return sum_tokens(lost.new_zeros(len(rows)).index_put((mine,), lost), ranks).sum() / 50


@pytest.mark.parametrize(
    "spec", and_slow([Spec("qwen2", tied=True)], [Spec("llama", tied=False)]), ids=str
)
def test_stages_that_share_sequences(spec: Spec) -> None:
    losses, norms, weights = train_alone(spec)
    results = run_ranks(4, train_shared_rows, spec, Layout(pp=2, sp=2))
    for rank, (losses_there, norms_there, _) in enumerate(results):
        wanted = losses if rank >= 2 else []  # both ranks of the last stage know the whole loss
        torch.testing.assert_close(losses_there, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(norms_there, norms, atol=1e-5, rtol=1e-5)
    assert_same_weights([result[2] for result in results], weights)


def whole_weights(stage: PipelineStage) -> dict[str, Tensor]:
    named = {name: p.detach() for name, p in stage.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named.items()}


def assert_same_weights(found: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    """Every wanted weight is found, and found alike wherever it is."""
    seen = set()
    for weights in found:
        for name, weight in weights.items():
            whole = name if name in wanted else "model.embed_tokens.weight"  # a tied head
            torch.testing.assert_close(weight, wanted[whole], atol=2e-5, rtol=1e-4)
            seen.add(whole)
    assert seen == wanted.keys()


@pytest.mark.parametrize(
    ("spec", "layout"),
    and_slow(
        [
            (Spec("llama", tied=False), Layout(pp=2)),
            (Spec("qwen3", tied=True), Layout(pp=4)),
            (Spec("qwen2", tied=True), Layout(pp=2, fsdp=2)),
            (Spec("qwen2", tied=True, lora=True), Layout(pp=2)),
        ],
        [
            (Spec("qwen2", tied=True), Layout(pp=2)),
            (Spec("mistral", tied=False), Layout(pp=4)),
            (Spec("qwen2", tied=True), Layout(pp=2, dp=2)),
        ],
    ),
    ids=str,
)
def test_training_in_stages_is_training_on_one_rank(spec: Spec, layout: Layout) -> None:
    losses, norms, weights = train_alone(spec, layout.data_ranks)
    results = run_ranks(layout.world_size, train_stage, spec, layout)
    last = [results[r][0] for r in layout.groups("dp", "fsdp")[-1]]
    per_step: list[float] = []
    for step, count in enumerate(COUNTS):
        for of_rank in last:
            start = sum(COUNTS[:step])
            per_step += of_rank[start : start + count]
    torch.testing.assert_close(per_step, losses, atol=1e-5, rtol=1e-5)
    assert min(norms) > CLIP  # so that a matrix counted twice would show
    for _, norms_there, _ in results:
        torch.testing.assert_close(norms_there, norms, atol=1e-5, rtol=1e-5)
    assert_same_weights([result[2] for result in results], weights)
    if spec.tied:  # not only close: they must never part
        ends = results[0][2]["model.embed_tokens.weight"], results[-1][2]["lm_head.weight"]
        assert torch.equal(*ends)


def read_only(spec: Spec, layout: Layout, compute_dtype: str) -> list[list[Tensor]]:
    """Logits of the runs of some steps; where adapters are, of their base as well."""
    ranks, stage, pipeline = form(spec, layout, compute_dtype)
    found: list[list[Tensor]] = []
    for count in READS:
        logits: list[Tensor] = []

        def read(
            number: int, hidden: Tensor, logits: list[Tensor] = logits, count: int = count
        ) -> None:
            assert number == len(logits) % count
            assert not hidden.requires_grad
            logits.append(stage.lm_head(hidden).float())

        batches = micro_batches(count, ranks.index("fsdp"), count)
        pipeline.run(batches, read, backward=False)
        found.append(logits)
        if spec.lora:
            with BaseModelView(stage).weights():
                pipeline.run(batches, read, backward=False)
    assert all(p.grad is None for p in stage.parameters())
    for parameter in stage.parameters():  # what was gathered to compute has been let go of
        assert isinstance(parameter, DTensor) == (layout.fsdp > 1)
    return found


@pytest.mark.parametrize(
    ("spec", "layout", "dtype", "tolerance"),
    [
        (Spec("qwen3", tied=True), Layout(pp=4), "float32", 1e-5),
        (Spec("qwen2", tied=True, lora=True), Layout(pp=2), "float32", 1e-5),
        (Spec("qwen2", tied=False), Layout(pp=2, fsdp=2), "bfloat16", 0.1),
    ],
    ids=str,
)
def test_reading_in_stages_is_reading_on_one_rank(
    spec: Spec, layout: Layout, dtype: str, tolerance: float
) -> None:
    model: Any = tiny_model(spec)
    results = run_ranks(layout.world_size, read_only, spec, layout, dtype)
    last = layout.world_size - layout.world_size // layout.pp  # the last stage's first rank
    for way in range(layout.fsdp):
        found = results[last + way * layout.sp * layout.tp]
        for count, logits in zip(READS, found, strict=True):
            batches = micro_batches(count, way, count)
            with torch.no_grad():
                wanted = [model(ids).logits for ids in batches]
                if spec.lora:
                    with BaseModelView(model).weights():
                        wanted += [model(ids).logits for ids in batches]
            torch.testing.assert_close(logits, wanted, atol=tolerance, rtol=tolerance)
    for rank in range(last):
        assert not any(results[rank])


def events(count: int) -> list[str]:
    """Passes of the last stage in their order."""
    _, stage, pipeline = form(Spec("qwen2", tied=False), Layout(pp=2))
    order: list[str] = []
    batches = micro_batches(0, 0, count)

    def read(number: int, hidden: Tensor) -> Tensor:
        order.append(f"F{number}")
        hidden.register_hook(lambda _: order.append(f"B{number}"))
        return loss_of(stage.lm_head, hidden, batches[number])

    pipeline.run(batches, read, backward=True)
    return order


@pytest.mark.parametrize(("count", "order"), [(3, "F0 B0 F1 B1 F2 B2"), (1, "F0 B0")])
def test_activations_wait_for_one_forward_only(count: int, order: str) -> None:
    assert run_ranks(2, events, count) == [[], order.split()]


def most_alive(backward: bool) -> tuple[int, int]:
    """Hidden states in and out of this stage that are alive at once, and after the run."""
    _, stage, pipeline = form(Spec("qwen2", tied=False), Layout(pp=2))
    seen: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def look(_: nn.Module, inputs: tuple[Tensor], hidden: Tensor) -> None:
        states = [tensor for tensor in (inputs[0], hidden) if tensor.is_floating_point()]
        seen.extend(weakref.ref(tensor) for tensor in states)
        counts.append(sum(ref() is not None for ref in seen))

    stage.register_forward_hook(look)
    batches = micro_batches(0, 0, 8)

    def read(number: int, hidden: Tensor) -> Tensor:
        return loss_of(stage.lm_head, hidden, batches[number])

    pipeline.run(batches, read, backward=backward)
    return max(counts), sum(ref() is not None for ref in seen)


@pytest.mark.parametrize("backward", [True, False])
def test_activations_of_two_micro_batches_are_kept_and_no_more(backward: bool) -> None:
    for most, after in run_ranks(2, most_alive, backward):
        assert most <= 2 * 3  # two in their passes, and one on its way out
        assert after == 0


def read_at_positions() -> list[Tensor]:
    *_, pipeline = form(Spec("qwen2", tied=False), Layout(pp=2))
    batches, found = micro_batches(0, 0, 2), []
    positions = [torch.arange(3, 3 + ids.shape[1]).expand(ids.shape) for ids in batches]

    def read(_: int, hidden: Tensor) -> None:
        found.append(hidden)

    pipeline.run(batches, read, backward=False, positions=positions)
    return found


def test_rows_may_start_at_any_position() -> None:
    model: Any = tiny_model(Spec("qwen2", tied=False))
    _, found = run_ranks(2, read_at_positions)
    for ids, hidden in zip(micro_batches(0, 0, 2), found, strict=True):
        positions = torch.arange(3, 3 + ids.shape[1]).expand(ids.shape)
        with torch.no_grad():
            wanted = model.base_model(ids, position_ids=positions, use_cache=False)
        torch.testing.assert_close(hidden, wanted.last_hidden_state, atol=1e-5, rtol=1e-5)


def partly_without_loss(kind: str) -> dict[str, Tensor]:
    """Gradients where the first of three micro-batches has no loss, or is a filler."""
    _, stage, pipeline = form(Spec("llama", tied=False), Layout(pp=2))
    batches = micro_batches(0, 0, 3)
    if kind == "filler":
        batches[0] = torch.zeros(1, 1, dtype=torch.long)

    def read(number: int, hidden: Tensor) -> Tensor | None:
        if number == 0:
            return hidden.detach().sum() if kind == "constant" else None
        return loss_of(stage.lm_head, hidden, batches[number])

    pipeline.run(batches, read, backward=True)
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["none", "constant", "filler"])
def test_a_micro_batch_without_loss_adds_nothing(kind: str) -> None:
    model: Any = tiny_model(Spec("llama", tied=False))
    for ids in micro_batches(0, 0, 3)[1:]:
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        loss_of(model.lm_head, hidden, ids).backward()
    first, last = run_ranks(2, partly_without_loss, kind)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(first | last, wanted, atol=1e-6, rtol=1e-5)


def adapt_last_stage_only() -> float:
    """A first stage with nothing to train still hands on, and takes back, what it must."""
    ranks, stage, pipeline = form(Spec("qwen2", tied=False), Layout(pp=2))
    stage.requires_grad_(stage.last)
    batches = micro_batches(0, 0, 3)
    pipeline.run(batches, lambda i, h: loss_of(stage.lm_head, h, batches[i]), backward=True)
    return clip_grad_norm(stage.parameters(), ranks, 1.0)


def test_a_frozen_stage_takes_part() -> None:
    model: Any = tiny_model(Spec("qwen2", tied=False))
    model.requires_grad_(False)
    model.model.layers[3:].requires_grad_(True)
    for part in (model.model.norm, model.lm_head):
        part.requires_grad_(True)
    norms = run_ranks(2, adapt_last_stage_only)
    first = len(extract_stage(model, 0, 2).layers)
    model.model.layers[first:].requires_grad_(True)
    for ids in micro_batches(0, 0, 3):
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        loss_of(model.lm_head, hidden, ids).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert norms == pytest.approx([wanted, wanted], rel=1e-5)


def critic() -> CriticModel:
    made = create_critic_model(tiny_model(Spec("qwen2", tied=True)))
    nn.init.ones_(made.head.weight)
    return made.eval()


def critic_values() -> tuple[list[Tensor], dict[str, Tensor]]:
    ranks = Ranks.form(Layout(pp=2))
    stage = extract_stage(critic(), ranks.index("pp"), 2)
    found: list[Tensor] = []

    def read(number: int, hidden: Tensor) -> Tensor:
        found.append(stage.head(hidden).squeeze(-1))
        return found[-1].square().sum()

    connect(stage, ranks, 16).run(micro_batches(0, 0, 2), read, backward=True)
    sum_tied_gradients(stage, ranks)  # of which it has none
    gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return [values.detach() for values in found], gradients


def test_a_critic_is_cut_like_its_policy() -> None:
    model = critic()
    wanted = [model(ids) for ids in micro_batches(0, 0, 2)]
    sum(values.square().sum() for values in wanted).backward()  # type: ignore[union-attr]
    (_, first), (values, last) = run_ranks(2, critic_values)
    torch.testing.assert_close(values, [v.detach() for v in wanted], atol=1e-5, rtol=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(first | last, gradients, atol=1e-4, rtol=1e-4)


def fail(where: str, folder: str) -> tuple[str, str, float]:
    """What each rank says when one fails, the cause's type, and how long it took to say so."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    dtype = "bfloat16" if where == "dtype" else "float32"
    _, stage, pipeline = form(Spec("qwen2", tied=False), Layout(pp=2), dtype)
    if where == "layer" and stage.first:
        stage.layers[0].register_forward_pre_hook(lambda *_: {}["nothing"])
    batches = micro_batches(0, 0, 3)

    def read(number: int, hidden: Tensor) -> Tensor:
        if where == "read" and number == 1:
            raise ValueError("no such reward")
        return loss_of(stage.lm_head, hidden, batches[number])

    started = time.monotonic()
    with pytest.raises(WorkerError) as error:
        pipeline.run(batches, read, backward=True)
    took = time.monotonic() - started
    return str(error.value), type(error.value.__cause__).__name__, took


@pytest.mark.parametrize(
    ("where", "culprit", "cause", "says"),
    [
        ("layer", 0, "KeyError", "'nothing'"),
        ("read", 1, "ValueError", "no such reward"),
        ("dtype", 0, "WorkerError", "[1, 5, 16] of torch.float32 where the next one awaits"),
    ],
)
def test_a_failing_stage_is_named_and_does_not_hang_the_others(
    where: str, culprit: int, cause: str, says: str, tmp_path: Path
) -> None:
    results = run_ranks(2, fail, where, str(tmp_path))
    text, kind, _ = results[culprit]
    assert f"stage {culprit} of pp=2 failed on 3 micro-batches" in text
    assert says in text
    assert kind == cause
    text, kind, took = results[1 - culprit]
    assert f"stage {1 - culprit} of pp=2 failed" in text
    assert kind == "RuntimeError"  # its peer was not heard of
    assert took < TIMEOUT_S + 5


IDS = torch.arange(3 * 9).view(3, 9) % VOCABULARY


def heaviest(counts: tuple[int, ...], first: float, last: float) -> float:
    loads = [float(count) for count in counts]
    loads[0] += first
    loads[-1] += last
    return max(loads)


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 4)))),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_no_other_split_has_a_lighter_heaviest_stage(
    sizes: tuple[int, int], first: float, last: float
) -> None:
    layers, stages = sizes
    split = split_layers(layers, stages, first, last)
    assert [layer for part in split for layer in part] == list(range(layers))
    counts = tuple(len(part) for part in split)
    assert min(counts) >= 1
    all_ways = itertools.product(range(1, layers + 1), repeat=stages)
    best = min(heaviest(way, first, last) for way in all_ways if sum(way) == layers)
    assert heaviest(counts, first, last) == pytest.approx(best)


def test_a_large_head_takes_layers_off_the_last_stage() -> None:
    qwen = ModelShape(
        layers=24, heads=14, kv_heads=2, head_dim=64, hidden=896, intermediate=4864, vocab=151936
    )
    assert [len(part) for part in layers_by_stage(qwen, 2)] == [17, 7]  # the head weighs 9 layers
    assert [len(part) for part in layers_by_stage(qwen, 4)] == [8, 8, 7, 1]


@pytest.mark.parametrize("stages", [0, 5])
def test_stages_that_layers_cannot_fill_are_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match=f"pp={stages} stages can't be made of 4 layers"):
        split_layers(4, stages)


@pytest.mark.parametrize("family", CHANGES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_stages_in_a_chain_are_the_model(family: str, kernel: str) -> None:
    model: Any = tiny_model(Spec(family, tied=False))
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        wanted = model.base_model(IDS, use_cache=False).last_hidden_state
        logits = model(IDS, use_cache=False).logits
        torch.testing.assert_close(require_vocabulary_head(model)(wanted), logits)
        for stages in (1, 2, 4):
            hidden = IDS
            for stage in range(stages):
                hidden = extract_stage(model, stage, stages)(hidden)
            torch.testing.assert_close(hidden, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_parameters_keep_their_names_and_are_in_one_stage(lora: bool) -> None:
    model = tiny_model(Spec("qwen3", tied=False, lora=lora))
    cuts = [extract_stage(model, stage, 3) for stage in range(3)]
    named = [pair for cut in cuts for pair in cut.named_parameters()]
    assert len(named) == len(dict(named))
    wanted = dict(model.named_parameters())
    assert {name: id(p) for name, p in named} == {name: id(p) for name, p in wanted.items()}
    assert [n for cut in cuts for n in cut.layer_numbers] == [0, 1, 2, 3]
    ends = [(cut.get_input_embeddings(), cut.get_output_embeddings()) for cut in cuts]
    none = (None, None)
    assert ends == [(model.get_input_embeddings(), None), none, (None, model.lm_head)]
    assert [has_adapters(cut) for cut in cuts] == [lora] * 3


def test_a_critic_keeps_its_names() -> None:
    model = create_critic_model(tiny_model(Spec("qwen2", tied=True)))
    cuts = [extract_stage(model, stage, 2) for stage in range(2)]
    names = [name for cut in cuts for name, _ in cut.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert cuts[1].get_output_embeddings() is model.head
    assert not any(tied_across_stages(cut) for cut in cuts)


def test_adapters_of_a_stage_can_be_switched_off() -> None:
    model = tiny_model(Spec("qwen2", tied=True, lora=True))
    cut = extract_stage(model, 0, 2)
    with torch.no_grad():
        adapted = cut(IDS)
        with BaseModelView(cut).weights() as base:
            plain = base(IDS)
        again = cut(IDS)
    assert torch.equal(adapted, again)
    assert (adapted - plain).abs().max() > 1e-3


def test_a_stage_does_not_keep_the_others_alive() -> None:
    model: Any = tiny_model(Spec("llama", tied=False))
    others = [weakref.ref(model.model.layers[0].mlp.up_proj.weight), weakref.ref(model.lm_head)]
    own = weakref.ref(model.model.layers[3].mlp.up_proj.weight)
    cut = extract_stage(model, 2, 4)
    last = extract_stage(model, 3, 4)
    del model, cut
    assert others[0]() is None
    assert own() is not None
    del last
    assert others[1]() is None


def test_tied_copies_are_known_and_counted_once() -> None:
    model = tiny_model(Spec("qwen2", tied=True))
    first, middle, last = (extract_stage(model, stage, 3) for stage in range(3))
    assert tied_across_stages(first) == {"model.embed_tokens.weight"}
    assert tied_across_stages(last) == {"lm_head.weight"}
    assert not tied_across_stages(middle)
    assert tied_duplicates(last) == {last.lm_head.weight}
    assert not tied_duplicates(first)
    assert not tied_duplicates(middle)
    alone = extract_stage(model, 0, 1)
    assert not tied_across_stages(alone)
    assert alone.lm_head.weight is alone.model.embed_tokens.weight


def test_other_families_are_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11))
    with pytest.raises(ConfigError, match="type 'gpt2' can't be cut into pp=2 stages, only llama"):
        extract_stage(model, 0, 2)


def sum_ends(sharp: bool) -> torch.Tensor | str | None:
    """The tied gradient after summing; with `sharp`, of ends that are not alike."""
    ranks = Ranks.form(Layout(pp=4))
    stage = extract_stage(tiny_model(Spec("qwen2", tied=True)), ranks.index("pp"), 4)
    for name in tied_across_stages(stage):
        weight = stage.get_parameter(name)
        if stage.last:
            weight.grad = torch.arange(float(weight.numel())).view_as(weight)
        if sharp and stage.last:
            weight.data = weight.data.double()
            weight.grad = weight.detach().clone()
    try:
        sum_tied_gradients(stage, ranks)
    except WorkerError as error:
        return str(error)
    found = [stage.get_parameter(name).grad for name in tied_across_stages(stage)]
    return found[0] if found else None


def test_an_end_without_gradient_gets_the_other_ends() -> None:
    first, *middle, last = run_ranks(4, sum_ends, False)
    assert middle == [None, None]
    assert torch.equal(first, last)
    assert torch.equal(last.flatten(), torch.arange(float(last.numel())))


def test_ends_that_are_kept_otherwise_are_refused() -> None:
    for text in itertools.compress(run_ranks(4, sum_ends, True), (1, 0, 0, 1)):
        assert "tied to a matrix in another stage" in text
        assert "its counterpart is not; shard embedding and head alike" in text
