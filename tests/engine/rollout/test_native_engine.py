"""The native engine's own promises: shared storage, one prefill a group, refilled batches."""

from __future__ import annotations

import pytest
import torch
from rollout_models import FAMILIES, GENERIC, build, make_prompts, reference_log_probs, train
from torch import nn

from engine.errors import ConfigError, RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.native.decoding_weights import LlamaWeights, UnsupportedModel, bind
from engine.rollout.protocol import SamplingParams, create_engine


def tensors(weights: LlamaWeights) -> list[torch.Tensor]:
    found = [weights.embedding, *weights.head, weights.norm.weight]
    for layer in weights.layers:
        for name in layer.__slots__:
            part = getattr(layer, name)
            found += [] if part is None else [t for t in part if isinstance(t, torch.Tensor)]
    return [t for t in found if t is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_with_the_trainers_storage(family: str) -> None:
    model = build(family)
    bound = {t.data_ptr() for t in tensors(bind(model))}
    assert bound == {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_moves_no_parameter(family: str) -> None:
    model = build(family)
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    NativeEngine(model).generate(make_prompts(4), SamplingParams(n=2, max_new_tokens=5))
    for name, parameter in model.named_parameters():
        pointer, numbers = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, numbers)


def test_optimizer_steps_are_seen_without_an_update() -> None:
    model = build("qwen2")
    engine = NativeEngine(model)
    train(model, steps=2)
    completion = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=6))[0]
    expected = reference_log_probs(model, [5, 6, 7], completion.token_ids)
    assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=1e-4)


def test_training_goes_on_after_a_rollout() -> None:
    model = build("gpt2").train()
    NativeEngine(model).generate([[5, 6]], SamplingParams(max_new_tokens=3))
    assert all(module.training for module in model.modules())
    ids = torch.tensor([[5, 6, 7, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize(("n", "slots"), [(4, 64), (4, 12), (4, 6), (1, 5)])
def test_a_prompt_is_prefilled_once_a_group(family: str, n: int, slots: int) -> None:
    prompts = make_prompts(9)
    engine = NativeEngine(build(family), max_num_seqs=slots)
    stop = tuple(range(20, 30))
    engine.generate(prompts, SamplingParams(n=n, max_new_tokens=20, stop_token_ids=stop))
    assert engine.stats.prefill_tokens == engine.stats.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("slots", [1, 3, 8, 50])
def test_the_number_of_slots_changes_nothing(slots: int) -> None:
    # In float64, so that no token lies within rounding of another one's share of [0, 1).
    prompts, model = make_prompts(8), build("llama").double()
    params = SamplingParams(n=4, max_new_tokens=16, seed=2, stop_token_ids=tuple(range(20, 30)))
    wide = NativeEngine(model, max_num_seqs=512).generate(prompts, params)
    narrow = NativeEngine(model, max_num_seqs=slots).generate(prompts, params)
    assert [c.token_ids for c in narrow] == [c.token_ids for c in wide]
    assert [c.finish_reason for c in narrow] == [c.finish_reason for c in wide]


def test_finished_rows_make_room_for_waiting_ones() -> None:
    """With refilling, steps stay near tokens / slots; static batches would wait for each tail."""
    prompts = make_prompts(40)
    engine = NativeEngine(build("qwen2"), max_num_seqs=16)
    stop = tuple(range(20, 35))
    completions = engine.generate(
        prompts, SamplingParams(n=4, max_new_tokens=60, stop_token_ids=stop)
    )
    longest_of_each_batch = sum(
        max(len(c.token_ids) for c in completions[i : i + 16]) for i in range(0, 160, 16)
    )
    tokens = engine.stats.generated_tokens
    assert tokens == sum(len(c.token_ids) for c in completions)
    assert engine.stats.decode_steps < 0.75 * longest_of_each_batch
    assert engine.stats.decode_steps >= (tokens - 160) / 16


def test_reaching_far_beyond_the_first_cache_columns() -> None:
    prompts, model = [[5], [6] * 20], build("qwen3")
    completions = NativeEngine(model).generate(prompts, SamplingParams(n=2, max_new_tokens=100))
    for c in completions:
        expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
        assert len(c.token_ids) == 100
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


@pytest.mark.parametrize("family", GENERIC)
def test_other_shapes_take_the_generic_path(family: str) -> None:
    with pytest.raises(UnsupportedModel):
        bind(build(family))


def test_a_hooked_or_adapted_module_takes_the_generic_path() -> None:
    model = build("qwen2")
    projection = model.model.layers[1].self_attn.q_proj
    handle = projection.register_forward_hook(lambda module, args, output: output * 0.5)
    with pytest.raises(UnsupportedModel, match="hooks"):
        bind(model)
    completion = NativeEngine(model).generate([[5, 6]], SamplingParams(max_new_tokens=5))[0]
    expected = reference_log_probs(model, [5, 6], completion.token_ids)
    assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=1e-4)
    handle.remove()

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model.model.layers[0].mlp.up_proj = Doubled(128, 96)
    with pytest.raises(UnsupportedModel, match="Doubled"):
        bind(model)


class Bare(nn.Module):
    """A user's model with nothing but `forward(input_ids, attention_mask)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama")

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return self.inner(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions
        ).logits


def test_a_model_without_a_cache_is_decoded_too() -> None:
    model, prompts = Bare(), make_prompts(3)
    params = SamplingParams(n=2, max_new_tokens=6, seed=4)
    bare = NativeEngine(model, max_model_len=64).generate(prompts, params)
    fast = NativeEngine(model.inner, max_model_len=64).generate(prompts, params)
    assert [c.token_ids for c in bare] == [c.token_ids for c in fast]
    with pytest.raises(ConfigError, match="max_model_len"):
        NativeEngine(model)


def test_bfloat16_stays_near_the_trainers_forward() -> None:
    model, prompts = build("qwen2").bfloat16(), make_prompts(6)
    completions = NativeEngine(model).generate(prompts, SamplingParams(n=2, max_new_tokens=12))
    errors = torch.cat(
        [
            torch.tensor(c.log_probs)
            - reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
            for c in completions
        ]
    ).abs()
    assert errors.max() < 0.2
    assert errors.mean() < 0.03


def test_errors_of_construction_and_closing() -> None:
    model = build("qwen2")
    with pytest.raises(ConfigError, match="context of 128"):
        NativeEngine(model, max_model_len=129)
    with pytest.raises(ConfigError, match="unknown"):
        create_engine("nativ", model)
    engine = NativeEngine(model)
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate([[5]], SamplingParams())
