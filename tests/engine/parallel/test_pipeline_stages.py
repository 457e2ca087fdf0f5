"""Cutting models into stages: which layers, under which names, and the same numbers in a chain."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from family_models import CHANGES
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from stage_models import VOCABULARY, Spec, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

from engine.errors import ConfigError, WorkerError
from engine.models.lora import BaseModelView, has_adapters
from engine.models.value_head import create_critic_model
from engine.models.vocabulary_head import require_vocabulary_head
from engine.parallel.layout import Layout, ModelShape
from engine.parallel.pipeline_parallel import (
    extract_stage,
    layers_by_stage,
    split_layers,
    sum_tied_gradients,
    tied_across_stages,
    tied_duplicates,
)
from engine.parallel.process_groups import Ranks

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
