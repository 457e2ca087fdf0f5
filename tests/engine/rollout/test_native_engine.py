"""The native engine, its graphs and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_models import FAMILIES, GENERIC, build, make_prompts, reference_log_probs, train
from stream_checks import drain, generated, texts, update, weights_of, with_n, worst_error
from thorough import and_slow
from tiny_engine import tiny_model
from torch import Tensor, nn

from engine.batch import Batch
from engine.config import ParallelConfig
from engine.data.collate import collate_completions, pad_tokens
from engine.errors import ConfigError, RolloutError
from engine.models.forward import LogProbReader
from engine.models.routing import routers
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.rollout.native import NativeEngine, llama_decoder, model_handle
from engine.rollout.native.decoder import RoutedExperts
from engine.rollout.native.decoding_weights import LlamaWeights, UnsupportedModel, bind
from engine.rollout.native.kv_cache import KVCache
from engine.rollout.native.llama_decoder import GraphedSteps, LlamaDecoder, can_graph
from engine.rollout.protocol import Completion, SamplingParams, create_engine
from engine.runtime.sharded_model import ShardedModel, untrimmed


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
    assert engine.stats.prefill_tokens == sum(map(len, prompts))


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
    tokens = sum(len(c.token_ids) for c in completions)
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


def addresses(decoder: LlamaDecoder) -> tuple[int, int]:
    assert isinstance(decoder._cache, KVCache)
    return decoder._cache._kv.data_ptr(), decoder._w.embedding.data_ptr()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Make engines capture on this device; the outputs of captured steps, as they were captured."""
    outputs: list[Tensor] = []

    def decoder(*sizes: Any, **options: Any) -> LlamaDecoder:
        def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
            outputs.append(function())  # a graph warms up with the step's own inputs
            output, where = torch.empty_like(outputs[-1]), addresses(made)

            def replay() -> Tensor:
                assert addresses(made) == where, "a graph would use what was freed"
                return output.copy_(function())

            return replay

        made = LlamaDecoder(*sizes, **options | {"cuda_graphs": True, "capture": capture})
        return made

    monkeypatch.setattr(model_handle, "LlamaDecoder", decoder)
    return outputs


@pytest.mark.parametrize(
    ("n", "slots", "family"),
    and_slow(
        [(1, 9, "qwen2"), (3, 9, "llama"), (4, 64, "qwen2")],
        [(1, 9, "llama"), (3, 9, "qwen2"), (4, 64, "llama")],
    ),
)
def test_tokens_are_those_of_plain_steps(
    family: str, n: int, slots: int, captures: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = build(family).double(), make_prompts(8)
    params = SamplingParams(n=n, max_new_tokens=60, seed=2, stop_token_ids=tuple(range(20, 26)))
    found = NativeEngine(model, max_num_seqs=slots).generate(prompts, params)
    assert captures
    monkeypatch.undo()
    expected = NativeEngine(model, max_num_seqs=slots).generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    for ours, theirs in zip(found, expected, strict=True):
        errors = torch.tensor(ours.log_probs) - torch.tensor(theirs.log_probs)
        assert errors.abs().max() < 1e-5


def test_steps_are_captured_again_after_the_cache_has_grown(
    captures: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_decoder, "_COLUMNS", 32)
    prompt, model = [5, 6, 7], build("qwen3")
    (done,) = NativeEngine(model).generate([prompt], SamplingParams(max_new_tokens=120))
    expected = reference_log_probs(model, prompt, done.token_ids)
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)
    assert [tuple(output.shape) for output in captures] == [(1, 100)] * 4


@pytest.mark.parametrize("kind", ["recompute", "keep"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_streams_new_weights_are_seen(
    kind: Any, in_place: bool, captures: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for _ in range(2):
        model = build("llama")
        stream = NativeEngine(model).stream(with_n(3, stop_token_ids=()), kv_on_update=kind)
        prompts: dict[Any, list[int]] = dict(enumerate(make_prompts(5)))
        for key, prompt in prompts.items():
            stream.submit(key, prompt)
        for _ in range(7):
            stream.step()
        if in_place:
            update(stream, model, "llama", 4)
        else:
            stream.update_weights(weights_of("llama")[4], 4)
        found.append(drain(stream))
        if kind == "recompute":
            assert worst_error("llama", prompts, found[-1]) < 1e-4
        assert captures
        monkeypatch.undo()  # the second time without capturing
    assert texts(found[0]) == texts(found[1])


def test_a_shape_is_captured_once_it_has_come_up_often() -> None:
    calls: list[tuple[int, int]] = []

    def step(tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        calls.append((len(tokens), columns))
        return (tokens + positions)[:, None].float()

    steps = GraphedSteps(step, slots=6, columns=300, capture=lambda function: function)
    assert [steps.padded_columns(used) for used in (1, 128, 129, 290)] == [128, 128, 256, 300]
    for rows in (3, 3, 4, 3, 5, 5, 5):
        tokens = torch.arange(rows)
        assert steps.run(tokens, 2 * tokens, 128).flatten().tolist() == (3.0 * tokens).tolist()
    assert calls == [(3, 128), (3, 128), (4, 128), (4, 128), (5, 128), (5, 128), (6, 128)]
    steps.clear()
    steps.run(torch.arange(3), torch.arange(3), 128)
    assert calls[-1] == (3, 128)


def test_without_a_gpu_nothing_is_captured() -> None:
    prompts, params = make_prompts(4), with_n(2)
    plain = NativeEngine(build("qwen2"))
    asked = NativeEngine(build("qwen2"), cuda_graphs=True)
    assert not can_graph(bind(build("qwen2")))
    assert texts(generated(asked, prompts, params)) == texts(generated(plain, prompts, params))


PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12]]


PARAMS = SamplingParams(n=3, max_new_tokens=7, stop_token_ids=tuple(range(0, 97, 4)), seed=5)


def batch_of(done: list[Completion]) -> Batch:
    source = Batch({"group_ids": torch.arange(len(PROMPTS))}, {"prompt_ids": PROMPTS})
    batch = collate_completions(
        source,
        [c.prompt_index for c in done],
        [c.token_ids for c in done],
        [c.log_probs for c in done],
        pad_token_id=0,
    )
    experts = [c.routed_experts for c in done if c.routed_experts is not None]
    return batch | {"routed_experts": pad_tokens(experts, batch["attention_mask"])}


def trained(model: nn.Module, batch: Batch, replay: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and chosen experts of a training pass."""
    chosen: list[Tensor] = []
    sharded = ShardedModel(model, Ranks(Layout()), ParallelConfig(packing=False))
    passes = sharded.micro_batches(batch, 64)
    reader = LogProbReader(1.0, replay=replay, record=chosen.append)
    out = sharded.outputs(batch, passes, reader)
    return out["log_probs"], untrimmed(batch, passes, chosen)


@pytest.mark.parametrize("slots", [2, 512])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_each_token_s_experts_are_those_of_training(family: str, slots: int) -> None:
    """In batches one after the other, from which sequences of many lengths leave, as in one."""
    model = tiny_model(family)
    done = NativeEngine(model, max_num_seqs=slots, routed_experts=True).generate(PROMPTS, PARAMS)
    for one in done:
        assert one.routed_experts is not None
        assert len(one.routed_experts) == len(PROMPTS[one.prompt_index]) + len(one.token_ids) - 1
    assert len({len(c.token_ids) for c in done}) > 2
    batch = batch_of(done)
    log_probs, chosen = trained(model, batch, replay=False)
    assert chosen.any()
    assert torch.equal(chosen, batch["routed_experts"])
    assert torch.allclose(log_probs, batch["rollout_log_probs"], atol=1e-4)
    plain = NativeEngine(model, max_num_seqs=slots).generate(PROMPTS, PARAMS)
    assert all(c.routed_experts is None for c in plain)
    assert [c.token_ids for c in plain] == [c.token_ids for c in done]


def test_replay_takes_the_gap_between_rollout_and_training_away() -> None:
    """Routers that compute a little otherwise in training choose others, and log-probs differ."""
    model = tiny_model("qwen3_moe")
    batch = batch_of(NativeEngine(model, routed_experts=True).generate(PROMPTS, PARAMS))

    def otherwise(router: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        noise = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(0))
        return (args[0] + 0.05 * noise,)

    for router in routers(model):
        router.register_forward_pre_hook(otherwise)
    gaps = [
        (trained(model, batch, replay)[0] - batch["rollout_log_probs"]).abs().max()
        for replay in (False, True)
    ]
    assert gaps[0] > 3 * gaps[1]


def test_a_dense_model_has_nothing_to_record() -> None:
    with pytest.raises(ConfigError, match="enable_rollout_routing_replay"):
        RoutedExperts(tiny_model("qwen2"))
