"""Packed rows and prefix trees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_engine import (
    VOCABULARY,
    branches_batch,
    response_log_probs,
    segments_of,
    shared_prompts_batch,
    tiny_model,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.kernels import attention
from engine.kernels.training_ops import recurring_size
from engine.models import create_critic_model, packed_attention, packing
from engine.models import packing as alignment
from engine.models.packing import (
    PackedRows,
    apply_packing,
    pack_rows,
    packed_forward,
    prefix_tree,
    prefix_tree_batches,
    prompt_tree,
    same_prompts,
    worthwhile_tree,
)
from engine.models.vocabulary_head import token_statistics
from engine.parallel.fsdp import run_forward, shard_model
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.parallel.tensor_parallel import apply_tensor_parallel
from engine.parallel.vocab_parallel import VocabParallelStatistics

pytestmark = pytest.mark.usefixtures("one_thread")


LENGTHS = torch.tensor([3, 9, 1, 6])


def rows(lengths: Tensor = LENGTHS, seed: int = 0) -> Tensor:
    """Left-aligned rows with padding 0 last."""
    draw = torch.Generator().manual_seed(seed)
    width = int(lengths.max()) + 2
    ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=draw)
    return ids * (torch.arange(width) < lengths[:, None])


def packed_rows(
    ids: Tensor, lengths: Tensor, prompts: Tensor | None = None, *, recurring: bool = False
) -> PackedRows:
    """Pack rows that have equal prompts of `prompts` tokens in common; None: no row has."""
    groups = [[row] for row in range(len(ids))] if prompts is None else same_prompts(ids, prompts)
    tree = prompt_tree(groups, (lengths if prompts is None else prompts).tolist())
    return pack_rows(ids, lengths.tolist(), tree, recurring=recurring)


def padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    hidden: Tensor = packed_forward(model.base_model, packed).last_hidden_state
    return hidden


@st.composite
def groups_of_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Left-aligned ids [B, L], lengths [B] and prompts' lengths [B]; some prompts are the same."""
    prompts = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1))
    chosen = draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=9))
    own = [draw(st.lists(st.integers(4, VOCABULARY - 1), max_size=5)) for _ in chosen]
    lengths = [len(p) + len(r) for p, r in zip(chosen, own, strict=True)]
    ids = torch.zeros(len(chosen), max(lengths) + draw(st.integers(0, 2)), dtype=torch.long)
    for row, (p, r) in enumerate(zip(chosen, own, strict=True)):
        ids[row, : lengths[row]] = torch.tensor(p + r)
    return ids, torch.tensor(lengths), torch.tensor([len(p) for p in chosen])


@given(groups_of_rows())
def test_every_token_has_its_place_and_sees_its_own_row(
    groups: tuple[Tensor, Tensor, Tensor],
) -> None:
    ids, lengths, prompts = groups
    packed = packed_rows(ids, lengths, prompts)
    unlike = {tuple(row[:p].tolist()) for row, p in zip(ids, prompts.tolist(), strict=True)}
    total = sum(len(prompt) for prompt in unlike) + int((lengths - prompts).sum())
    assert packed.input_ids.shape == packed.position_ids.shape == (1, total)
    segments = packed.segments
    keys = segments.keys if segments.keys is not None else torch.arange(total)
    seen: dict[int, list[int]] = {}
    for index, (a, b, start, stop) in enumerate(segments.runs):
        assert segments.starts[index] == start
        assert segments.starts[index + 1] == stop
        after_prefix = [*range(a, b), *range(start, stop)]
        ends = segments.key_starts[index : index + 2].tolist()
        assert keys[slice(*ends)].tolist() == after_prefix
        seen |= {token: [*range(a, b), *range(start, token + 1)] for token in range(start, stop)}
    assert sorted(seen) == list(range(total))
    assert segments.longest == segments.starts.diff().max()
    assert segments.longest_keys == segments.key_starts.diff().max()
    for row, length in enumerate(lengths.tolist()):
        where = packed.index(torch.full((length,), row), torch.arange(length))
        assert torch.equal(packed.input_ids[0, where], ids[row, :length])
        assert packed.position_ids[0, where].tolist() == list(range(length))
        for column in range(length):
            assert seen[int(where[column])] == where[: column + 1].tolist()


@given(groups_of_rows())
def test_tokens_are_counted_before_they_are_packed(groups: tuple[Tensor, Tensor, Tensor]) -> None:
    ids, lengths, prompts = groups
    found = same_prompts(ids, prompts)
    assert sorted(row for rows in found for row in rows) == list(range(len(ids)))
    counted = prompt_tree(found, prompts.tolist()).size(lengths.tolist())
    assert counted == packed_rows(ids, lengths, prompts).input_ids.numel()


def test_rows_without_prompts_are_laid_end_to_end() -> None:
    ids = rows()
    packed = packed_rows(ids, LENGTHS)
    assert packed.input_ids.tolist() == [[t for row in ids.tolist() for t in row if t]]
    assert packed.position_ids.tolist() == [[c for n in LENGTHS.tolist() for c in range(n)]]
    assert packed.segments.starts.tolist() == packed.segments.key_starts.tolist()
    assert packed.segments.starts.tolist() == [0, 3, 12, 13, 19]
    assert packed.segments.starts.dtype == packed.segments.key_starts.dtype == torch.int32
    assert packed.segments.keys is None
    assert packed.segments.longest == packed.segments.longest_keys == 9


def test_few_sizes_come_again_and_again() -> None:
    """And fill a pass up by little."""
    for low in (100, 1000, 5000):
        counts = range(low, low + low // 5)
        sizes = [recurring_size(count) for count in counts]
        assert len(set(sizes)) <= 6
        assert all(n <= size <= 1.16 * n for n, size in zip(counts, sizes, strict=True))
        assert sum(sizes) <= 1.08 * sum(counts)
    assert recurring_size(0) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_fills_a_size_up_changes_nothing_that_is_read(dtype: torch.dtype) -> None:
    model = tiny_model("qwen2").to(dtype)
    apply_packing(model)
    ids, prompts = rows(), torch.tensor([1, 4, 1, 4])
    ids[1, :4] = ids[3, :4]
    found = []
    for recurring in (False, True):
        packed = packed_rows(ids, LENGTHS, prompts, recurring=recurring)
        if recurring:
            assert packed.input_ids.numel() == packed.segments.starts[-1] == 16
        real = torch.arange(ids.shape[1]) < LENGTHS[:, None]
        states = hidden_states(model, packed)[0, packed.places[real]]
        model.zero_grad()
        states.float().square().sum().backward()
        found.append([states, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    close = 1e-9 if dtype == torch.float64 else 0.1
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=close, atol=close)


def test_a_model_on_a_cpu_gets_recurring_sizes() -> None:
    model = tiny_model("qwen2")
    apply_packing(model)
    every = [
        packing.pack(model, packing.left_align(shared_prompts_batch(seed=seed)))
        for seed in range(5)
    ]
    for packed in every:
        assert packed is not None
        count = int(packed.places.max()) + 1
        assert packed.input_ids.numel() == recurring_size(count)


def test_a_shared_prompt_comes_once() -> None:
    ids = torch.tensor([[5, 6, 1, 2], [7, 7, 7, 0], [5, 6, 0, 0], [5, 6, 3, 0]])
    lengths, prompts = torch.tensor([4, 3, 2, 3]), torch.tensor([2, 2, 2, 2])
    packed = packed_rows(ids, lengths, prompts)
    assert packed.input_ids.tolist() == [[5, 6, 1, 2, 3, 7, 7, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert packed.segments.runs == ((0, 0, 0, 2), (0, 2, 2, 4), (0, 2, 4, 5), (5, 5, 5, 8))


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_outputs_and_gradients_are_those_of_padded_rows(family: str, checkpointed: bool) -> None:
    ids, results = rows(), []
    ids[1, :2] = ids[3, :2]  # one prompt
    prompts = torch.tensor([1, 2, 1, 2])
    where = ids.nonzero(as_tuple=True)
    weigh = torch.randn(len(where[0]), 32, generator=torch.Generator().manual_seed(4))
    for pack in (False, True):
        model = tiny_model(family)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        if pack:
            apply_packing(model)
            packed = packed_rows(ids, LENGTHS, prompts)
            hidden = hidden_states(model, packed)
            assert hidden.shape == (1, int(LENGTHS.sum()) - 2, 32)
            picked = hidden[0, packed.index(*where)]
        else:
            picked = padded(model, ids)[where]
        (picked * weigh).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((picked.detach(), grads))
    (wanted, wanted_grads), (got, got_grads) = results
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert got_grads.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        torch.testing.assert_close(got_grads[name], grad, atol=1e-4, rtol=1e-4)


def test_rows_do_not_see_each_other() -> None:
    model = tiny_model("qwen2")
    apply_packing(model)
    with torch.no_grad():
        ids = rows()
        before = hidden_states(model, packed_rows(ids, LENGTHS))
        ids[0, 0] = ids[0, 0] % (VOCABULARY - 1) + 1
        after = hidden_states(model, packed_rows(ids, LENGTHS))
    changed = (before - after).abs().amax(-1)[0] > 0
    assert changed[:3].all()
    assert not changed[3:].any()


def test_completions_of_a_prompt_do_not_see_each_other() -> None:
    model = tiny_model("llama")
    apply_packing(model)
    ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 9, 9, 9], [5, 6, 3, 0, 0]])
    lengths, prompts = torch.tensor([4, 5, 3]), torch.tensor([2, 2, 2])
    with torch.no_grad():
        before = hidden_states(model, packed_rows(ids, lengths, prompts))
        ids[1, 2] = 10
        after = hidden_states(model, packed_rows(ids, lengths, prompts))
    changed = (before - after).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False] * 4 + [True] * 3 + [False]


def test_under_autocast_attention_takes_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated queries and keys are wider than values there; the kernel takes one dtype."""
    model, ids, dtypes = tiny_model("qwen2"), rows(), []
    where = ids.nonzero(as_tuple=True)

    def watch(name: str) -> None:
        attend = getattr(attention, name)

        def watched(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
            dtypes.append({query.dtype, key.dtype, value.dtype})
            found: Tensor = attend(query, key, value, *options)
            return found

        monkeypatch.setattr(attention, name, watched)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = padded(model, ids)[where]
        apply_packing(model)
        packed = packed_rows(ids, LENGTHS)
        watch("row_attention")
        watch("compiled_attention")  # where it is compiled
        got = hidden_states(model, packed)[0, packed.index(*where)]
    assert (got - wanted).norm() / wanted.norm() < 0.02
    assert dtypes == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("block", "together"), [(256, 128), (4, 3), (2, 0)])
def test_attention_is_torch_s_of_each_segment(
    kv_heads: int, block: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its gradient, however segments are cut or joined."""
    monkeypatch.setattr(packed_attention, "_BLOCK", block)
    monkeypatch.setattr(packed_attention, "_TOGETHER", together)
    packed_attention._blocks.cache_clear()
    prompts = torch.tensor([1, 4, 1, 4])
    ids = rows()
    ids[1, :4] = ids[3, :4]
    segments = packed_rows(ids, LENGTHS, prompts).segments
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, int(segments.starts[-1]), 8) for heads in (4, kv_heads, kv_heads)]
    tensors = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    tensors = [t.requires_grad_() for t in tensors]
    weigh = torch.randn(1, shapes[0][2], 4, 8, generator=draw, dtype=torch.float64)
    results = []
    for attend in (packed_attention._by_block, packed_attention._by_segment):
        out = attend(*tensors, segments, 0.3)
        results.append([out, *torch.autograd.grad((out * weigh).sum(), tensors)])
    packed_attention._blocks.cache_clear()  # of other sizes
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
    with torch.random.fork_rng():
        dropped = packed_attention.packed_attention(*tensors, segments, scale=0.3, dropout=0.9)
    assert (dropped == 0).sum() > (results[0][0] == 0).sum()


GROUPS = st.one_of(  # tokens of a shared prompt, and of each row after it
    st.tuples(st.just(0), st.lists(st.integers(1, 30), min_size=1, max_size=1)),
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=3)),
    st.tuples(st.integers(1, 3), st.lists(st.integers(1, 12), min_size=8, max_size=16)),
)


@given(
    st.lists(GROUPS, min_size=1, max_size=6),
    st.sampled_from([(1.0, 0), (1.3, 2), (9.0, 30)]),
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
)
def test_attention_of_padded_rows_is_that_of_each_segment(
    groups: list[tuple[int, list[int]]], alike: tuple[float, int], heads: tuple[int, int]
) -> None:
    """And its gradient, however many batches the rows come in, with and without prompts."""
    segments = segments_of(groups)
    tokens = int(segments.starts[-1])
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, 4) for count in (heads[0], heads[1], heads[1])]
    tensors = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    tensors = [t.requires_grad_() for t in tensors]
    weigh = torch.randn(1, tokens, heads[0], 4, generator=draw, dtype=torch.float64)
    ways: list[tuple[Any, Any]] = [
        (packed_attention._by_segment, segments),
        (attention.row_attention, segments.runs),
    ]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_LONGER", alike[0])
        patch.setattr(attention, "_NEAR", alike[1])
        patch.setattr(attention, "_SCORES", 2000)
        attention._plan.cache_clear()
        for attend, cut in ways:
            out = attend(*tensors, cut, 0.3)
            results.append([out, *torch.autograd.grad((out * weigh).sum(), tensors)])
        attention._plan.cache_clear()
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_many_rows_of_one_prompt_that_is_not_short_and_long_ones_are_passed_over() -> None:
    cpu, limit = torch.device("cpu"), attention._LONGEST
    assert attention.takes_rows(((0, 0, 0, limit), (limit, limit, limit, limit + 3)), cpu)
    assert not attention.takes_rows(((0, 0, 0, limit + 1),), cpu)
    pair = segments_of([(9, [8, 5])]).runs
    assert attention.takes_rows(pair, cpu)
    assert not attention.takes_rows(pair, torch.device("cuda"))
    assert not attention.takes_rows(segments_of([(limit - 9, [5, 5])]).runs, cpu)
    assert not attention.takes_rows(segments_of([(9, [10] * 16)]).runs, cpu)
    assert attention.takes_rows(segments_of([(9, [40] * 16)]).runs, cpu)


def spread_log_probs(layout: Layout, pack: bool) -> list[Tensor]:
    """Log-probs, and the gradient of the first layer's `down_proj`, on ranks or one alone."""
    alone = layout.world_size == 1
    ranks = Ranks(layout) if alone else Ranks.form(layout)
    config = ParallelConfig(fsdp=layout.fsdp, tp=layout.tp)
    model = tiny_model("llama")
    if pack:
        apply_packing(model)
    if layout.tp > 1:
        apply_tensor_parallel(model, ranks.submesh("tp"))
    shard_model(model, ranks, config, layers=list(model.base_model.layers))
    batch = shared_prompts_batch()
    statistics: Any = token_statistics
    if layout.tp > 1:
        statistics = VocabParallelStatistics.of(VOCABULARY, ranks.submesh("tp"))
    got = run_forward(model, lambda: response_log_probs(model, batch, 1.0, statistics=statistics))
    (got.sum() / layout.fsdp).backward()  # FSDP sums over ranks, which all have all rows here
    grad = model.base_model.layers[0].mlp.down_proj.weight.grad
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return [got.detach().clone(), whole.detach().clone()]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(fsdp=2)])
def test_models_spread_over_ranks_take_packed_rows(layout: Layout) -> None:
    wanted = spread_log_probs(Layout(), False)
    for answer in run_ranks(2, spread_log_probs, layout, True):
        for got, expected in zip(answer, wanted, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_padded_rows_and_other_models_are_as_before() -> None:
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    other.config = model.config
    ids = rows()
    mask = (ids != 0).long().flip(1)
    with torch.no_grad():
        wanted = padded(model, ids)
        masked = model(input_ids=ids.flip(1), attention_mask=mask).logits
        said = model.generate(ids[:1, :3], max_new_tokens=5, do_sample=False)
        apply_packing(model)
        for each in (model, other, copy.deepcopy(model)):
            assert torch.equal(padded(each, ids), wanted)
            assert torch.equal(each(input_ids=ids.flip(1), attention_mask=mask).logits, masked)
            again = each.generate(ids[:1, :3], max_new_tokens=5, do_sample=False)
            assert torch.equal(again, said)
    assert model.config._attn_implementation == "sdpa"


def test_a_second_time_changes_nothing() -> None:
    """Two trainers may share a model, and a critic may be made of a packed policy."""
    model, ids = tiny_model("qwen2"), rows()
    packed = packed_rows(ids, LENGTHS)
    apply_packing(model)
    with torch.no_grad():
        once, plain = hidden_states(model, packed), padded(model, ids)
        for body in (model, create_critic_model(model).backbone):
            apply_packing(body)  # type: ignore[arg-type]
            assert torch.equal(hidden_states(body, packed), once)  # type: ignore[arg-type]
            assert torch.equal(padded(body, ids), plain)  # type: ignore[arg-type]


def test_attention_that_is_not_plain_is_refused() -> None:
    eager = tiny_model("llama")
    eager.set_attn_implementation("eager")
    shape: Any = eager.config.to_dict() | {"sliding_window": 4, "num_hidden_layers": 1}
    windowed = MistralForCausalLM(MistralConfig(**{k: shape[k] for k in WINDOWED}))
    for model in (eager, windowed):
        with pytest.raises(ConfigError, match=r"can't take packed rows.*leave packing off"):
            apply_packing(model)


WINDOWED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "sliding_window",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast", "checkpointed"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_on_a_device_it_is_the_padded_pass_too(
    kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, also autocast's, it is torch's variable-length kernel, else our own passes."""
    calls: list[str] = []
    attend = packed_attention._by_block
    lengths, prompts = torch.tensor([40, 7, 64, 1, 23]), torch.tensor([6, 2, 6, 1, 6])
    ids = rows(lengths)[:, :64]  # as many as there are positions
    ids[[2, 4], :6] = ids[0, :6]
    ids = ids.cuda()
    where = ids.nonzero(as_tuple=True)
    weigh = torch.randn(len(where[0]), 32, generator=torch.Generator().manual_seed(4)).cuda()
    half, results = kind != "float32", []
    for pack in (False, True):
        model = tiny_model(family).to("cuda", torch.float32)
        if half and kind != "autocast":
            model.to(torch.bfloat16)
        if kind == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            if pack:
                monkeypatch.setattr(
                    packed_attention,
                    "_by_block",
                    lambda *args: (calls.append("a pass"), attend(*args))[1],
                )
                apply_packing(model)
                packed = packed_rows(ids, lengths.cuda(), prompts.cuda())
                picked = hidden_states(model, packed)[0, packed.index(*where)]
            else:
                picked = padded(model, ids)[where]
        # Weighed: a normalised state's squares have no gradient but rounding.
        (picked.float() * weigh).sum().backward()
        grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
        results.append((picked.detach().float(), grads))
    assert bool(calls) == (not half), "the kernel"
    (wanted, wanted_grads), (got, got_grads) = results
    tolerance = 0.05 if half else 1e-4
    assert (got - wanted).norm() / wanted.norm() < tolerance
    for grad, other in zip(wanted_grads, got_grads, strict=True):
        assert (grad - other).norm() <= 2 * tolerance * grad.norm() + 1e-3


@st.composite
def rows_of_few_tokens(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """Left-aligned ids [B, L], lengths and prompts' lengths; many begin alike."""
    token = st.integers(1, 2)
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=9))
    lengths = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    return ids, lengths, [draw(st.integers(1, length)) for length in lengths]


# That (1, 1, 2) and (1, 2) share a piece is due to the first two rows, of one prompt.
PIECE_OF_OTHER_ROWS = (
    torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 0]]),
    [1, 1, 3, 3, 2],
    [1, 1, 1, 2, 1],
)


@given(rows_of_few_tokens(), st.integers(1, 4))
def test_every_token_sees_its_row_and_common_beginnings_come_once(
    case: tuple[Tensor, list[int], list[int]], least: int
) -> None:
    ids, lengths, prompts = case
    tree = prefix_tree(ids, lengths, prompts, least)
    packed = pack_rows(ids, lengths, tree)
    size = packed.input_ids.numel()
    assert size == tree.size(lengths)
    seen: dict[int, list[int]] = {}
    for run in packed.segments.runs:
        before = [t for a, b in zip(run[:-2:2], run[1:-2:2], strict=True) for t in range(a, b)]
        for token in range(*run[-2:]):
            seen[token] = [*before, *range(run[-2], token + 1)]
    assert sorted(seen) == list(range(size))
    for row, length in enumerate(lengths):
        places = packed.places[row, :length]
        assert packed.input_ids[0, places].tolist() == ids[row, :length].tolist()
        assert packed.position_ids[0, places].tolist() == list(range(length))
        for column, token in enumerate(places.tolist()):
            assert seen[token] == places[: column + 1].tolist()
    beginnings = {
        tuple(row[: k + 1])
        for row, end in zip(ids.tolist(), lengths, strict=True)
        for k in range(end)
    }
    assert size == len(beginnings) if least == 1 else size >= len(beginnings)


@given(rows_of_few_tokens(), st.integers(1, 30))
@example(PIECE_OF_OTHER_ROWS, 4)
def test_batches_of_a_tree_stay_within_their_budget(
    case: tuple[Tensor, list[int], list[int]], budget: int
) -> None:
    ids, lengths, prompts = case
    tree = prefix_tree(ids, lengths, prompts, 2)
    batches = prefix_tree_batches(tree, ids, lengths, prompts, budget, least=2)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        own = prefix_tree(ids[batch], [lengths[i] for i in batch], [prompts[i] for i in batch], 2)
        assert len(batch) == 1 or own.size([lengths[i] for i in batch]) <= budget


def test_completions_of_one_turn_are_laid_out_as_before() -> None:
    seqs = alignment.left_align(shared_prompts_batch())
    assert seqs.lengths is not None
    assert seqs.prompts is not None
    prompts, lengths = seqs.prompts.tolist(), seqs.lengths.tolist()
    by_prompt = prompt_tree(same_prompts(seqs.input_ids, seqs.prompts), prompts)
    assert worthwhile_tree(seqs.input_ids, lengths, prompts, by_prompt) is None


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_branches_have_the_log_probs_and_gradients_of_padded_rows(family: str) -> None:
    batch, found, computed = branches_batch(), [], []
    weights = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(3))
    for packed in (False, True):
        model = tiny_model(family)
        if packed:
            apply_packing(model)
        model.base_model.get_input_embeddings().register_forward_hook(
            lambda module, args, out: computed.append(args[0].numel())
        )
        log_probs = response_log_probs(model, batch, 0.8)
        (log_probs * weights * batch["response_mask"]).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([log_probs.detach(), *grads])
    assert computed[1] < 0.45 * computed[0], "turns before are computed once"
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_blocks_are_the_attention_of_each_segment() -> None:
    seqs = alignment.left_align(branches_batch())
    assert seqs.lengths is not None
    assert seqs.prompts is not None
    tree = prefix_tree(seqs.input_ids, seqs.lengths.tolist(), seqs.prompts.tolist())
    segments = pack_rows(seqs.input_ids, seqs.lengths.tolist(), tree).segments
    assert max(map(len, segments.runs)) > 4, "a prefix of several parts"
    size = segments.runs[-1][-1]
    results = []
    for kernel in (packed_attention._by_block, packed_attention._by_segment):
        draw = torch.Generator().manual_seed(1)
        q, k, v = (
            torch.randn(1, heads, size, 8, generator=draw, dtype=torch.float64).requires_grad_()
            for heads in (4, 2, 2)
        )
        out = kernel(q, k, v, segments, 0.3)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
