"""vLLM's engine: sleep mode, shared memory, external launcher."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import flask.globals  # noqa: F401
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import CONTEXT, Subject, build, make_prompts, reference_log_probs, train
from torch import nn
from transformers import Qwen2ForCausalLM

from engine.config import ParallelConfig
from engine.errors import ConfigError, RolloutError
from engine.parallel.exchange import Exchange
from engine.parallel.layout import Layout, ModelShape, rollout_layout
from engine.parallel.module_shards import gather_shard_map, local_tensors
from engine.parallel.process_groups import Ranks
from engine.parallel.reshard import plan_reshard
from engine.parallel.shard_maps import ShardMap, rollout_shard_map
from engine.rollout.protocol import Completion, SamplingParams, check_version, create_engine
from engine.rollout.vllm import VllmEngine
from engine.rollout.vllm.engine import SleepMode
from engine.rollout.vllm.engine_weights import SharedBuffer, chunks
from engine.rollout.vllm.weight_load import ParameterSnapshot
from engine.runtime.sharded_model import ShardedModel

with contextlib.suppress(ImportError):  # it comes with vLLM
    import llvmlite.binding  # noqa: F401 (its functions once broke the start of an engine, too)


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@needs_vllm
def test_the_fused_parameters_are_the_trainers(vllm_subject: Subject) -> None:
    engine, model = vllm_subject.engine, vllm_subject.model
    assert isinstance(engine, VllmEngine)
    assert engine.shares_storage
    engine.update_weights(model, engine.policy_version)
    inner = engine.parameters()
    for index, layer in enumerate(model.model.layers):
        fused = inner[f"model.layers.{index}.self_attn.qkv_proj.weight"]
        start = fused.data_ptr()
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert projection.weight.data_ptr() == start
            assert projection.weight.is_contiguous()
            start += projection.weight.numel() * 4
        gate_up = inner[f"model.layers.{index}.mlp.gate_up_proj.weight"]
        assert layer.mlp.gate_proj.weight.data_ptr() == gate_up.data_ptr()
    assert model.lm_head.weight.data_ptr() == inner["model.embed_tokens.weight"].data_ptr()


@needs_vllm
def test_a_switch_takes_less_than_a_millisecond_and_no_memory(vllm_subject: Subject) -> None:
    """An optimizer step writes where vLLM reads; what is left is to forget the prefix cache."""
    engine, model = vllm_subject.engine, vllm_subject.model
    engine.update_weights(model, engine.policy_version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    seconds = []
    for _ in range(10):
        model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        started = time.perf_counter()
        engine.update_weights(model, engine.policy_version + 1)
        seconds.append(time.perf_counter() - started)
        c = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))[0]
        expected = reference_log_probs(model, [5, 6, 7], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
    assert min(seconds) < 1e-3
    assert pointers == {name: p.data_ptr() for name, p in model.named_parameters()}


def move_storage(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()


def replace_parameter(model: torch.nn.Module) -> None:
    module = model.model.layers[1].mlp.down_proj
    module.weight = torch.nn.Parameter(module.weight.detach().clone())


def replace_module(model: torch.nn.Module) -> None:
    model.model.layers[0].self_attn.o_proj = copy.deepcopy(model.model.layers[0].self_attn.o_proj)


def add_parameter(model: torch.nn.Module) -> None:
    model.model.norm.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))


MOVES = [move_storage, replace_parameter, replace_module, add_parameter]


@pytest.mark.parametrize("move", MOVES)
def test_whatever_takes_weights_away_is_seen(move: Callable[[torch.nn.Module], None]) -> None:
    model = build("qwen2")
    snapshot = ParameterSnapshot(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.train()
    assert snapshot.is_current(), "a step and a change of mode move nothing"
    move(model)
    assert not snapshot.is_current()


@needs_vllm
@pytest.mark.parametrize("move", MOVES[:3])
def test_weights_that_were_taken_away_are_served_all_the_same(
    vllm_subject: Subject, move: Callable[[torch.nn.Module], None]
) -> None:
    engine, model = vllm_subject.engine, vllm_subject.model
    engine.update_weights(model, engine.policy_version)
    move(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(model, engine.policy_version + 1)
    c = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))[0]
    expected = reference_log_probs(model, [5, 6, 7], c.token_ids)
    assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
    assert engine.shares_storage, "they are one again"


@needs_vllm
def test_an_error_of_the_progress_callback_leaves_no_request(vllm_subject: Subject) -> None:
    engine, model = vllm_subject.engine, vllm_subject.model

    def stop(finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(make_prompts(20), SamplingParams(n=2, max_new_tokens=9), stop)
    engine.update_weights(model, engine.policy_version + 1)
    assert len(engine.generate([[5]], SamplingParams(n=3, max_new_tokens=4))) == 3


@needs_vllm
def test_long_shared_prompts_see_new_weights(vllm_subject: Subject) -> None:
    """Prefix caching works on blocks; a stale block would give the old weights' log-probs."""
    engine, model = vllm_subject.engine, vllm_subject.model
    prompt = (make_prompts(1, seed=3)[0] * CONTEXT)[: CONTEXT - 4]
    params = SamplingParams(n=2, max_new_tokens=4, seed=1)
    for _ in range(2):
        train(model, steps=2)
        engine.update_weights(model, engine.policy_version + 1)
        for c in engine.generate([prompt], params):
            expected = reference_log_probs(model, prompt, c.token_ids)
            assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


@needs_vllm
def test_saving_and_state_dicts_work_on_views(vllm_subject: Subject, tmp_path: Path) -> None:
    model = vllm_subject.model
    vllm_subject.engine.update_weights(model, vllm_subject.engine.policy_version)
    model.save_pretrained(tmp_path / "model")
    again = Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
        assert torch.equal(state[name], parameter)


@needs_vllm
def test_optimizer_states_outlive_sharing(vllm_subject: Subject) -> None:
    """Sharing, an update to another model and back must leave training as it would have been."""
    engine = vllm_subject.engine
    shared, alone = build("qwen2"), build("qwen2")
    ids = make_prompts(1, seed=12)[0] * 2
    batch = torch.tensor([ids])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (shared, alone)]
    for step in range(3):
        if step == 1:
            engine.update_weights(shared, engine.policy_version + 1)
        if step == 2:
            engine.update_weights(vllm_subject.model, engine.policy_version + 1)
        for model, optimizer in zip((shared, alone), optimizers, strict=True):
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in alone.named_parameters():
        assert torch.equal(shared.get_parameter(name), parameter)


@needs_vllm
def test_a_layout_that_cannot_be_shared_is_copied_and_the_process_left_clean() -> None:
    """Steps are short here, so that prompts have to wait for the next one instead of being cut."""
    model = build("gpt2")
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    environment = dict(os.environ)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    set_threads = torch.set_num_threads
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_mb": 32}
    engine = VllmEngine(model, **sizes, max_num_batched_tokens=64)
    try:
        assert dict(os.environ) == environment
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (np.random.get_state()[1] == states[1]).all()
        assert random.getstate() == states[2]
        assert torch.set_num_threads is set_threads
        assert torch.get_num_threads() == 1
        assert not engine.shares_storage
        pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
        for version in (1, 2):
            train(model, steps=2)
            engine.update_weights(model, version)
            prompts = [[5, 6, 7], [9] * 30, [8] * 40, [7] * 50]
            for c in engine.generate(prompts, SamplingParams(n=2, max_new_tokens=6, seed=1)):
                expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
                assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
        assert pointers == {n: p.data_ptr() for n, p in model.named_parameters()}
    finally:
        engine.close()
        engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate([[5]], SamplingParams())


def test_without_vllm_the_message_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a)
    )
    with pytest.raises(RolloutError, match=r"rollout\.engine=native"):
        create_engine("vllm", build("qwen2"))


@needs_vllm
def test_a_head_size_without_a_kernel_is_refused_at_the_start() -> None:
    model = build("qwen2")
    model.config.num_attention_heads = 8
    with pytest.raises(RolloutError, match="head size of 16"):
        VllmEngine(model)


CALLS = ("sleep1", "sleep2", "wake_weights", "update", "wake_kv", "generate")


# What may follow what, written out apart from the code: phase, whether weights are there → calls.
ALLOWED = {
    ("serving", True): {"sleep1", "sleep2", "update", "generate"},
    ("asleep", True): {"wake_weights"},
    ("asleep", False): {"wake_weights"},
    ("weights", True): {"update", "wake_kv"},
    ("weights", False): {"update"},
}


def call(life: SleepMode, name: str) -> SleepMode:
    if name.startswith("sleep"):
        return life.sleep(int(name[-1]))
    after: SleepMode = getattr(life, name)()
    return after


@given(st.lists(st.sampled_from(CALLS), max_size=12))
def test_only_one_order_is_allowed_and_an_error_changes_nothing(calls: list[str]) -> None:
    life = SleepMode()
    for name in calls:
        if name in ALLOWED[life.phase, not life.discarded]:
            life = call(life, name)
        else:
            with pytest.raises(RolloutError):
                call(life, name)
        if life.phase == "serving":
            assert not life.discarded, "weights that were thrown away must never be served"


def test_each_wrong_call_names_the_next_right_one() -> None:
    asleep = SleepMode().sleep(2)
    weights = asleep.wake_weights()
    for state, name, message in (
        (SleepMode(), "wake_weights", "wake_weights while serving: call sleep first"),
        (SleepMode(), "wake_kv", "wake_kv while serving: call sleep first"),
        (asleep, "generate", "generate while asleep: call wake_weights first"),
        (asleep, "update", "update of weights while asleep: call wake_weights first"),
        (asleep, "wake_kv", "wake_kv while asleep: call wake_weights first"),
        (weights, "generate", "generate while only weights are awake: call wake_kv first"),
        (weights, "wake_kv", r"sleep\(level=2\) discarded the old ones; call update_weights"),
        (SleepMode(), "sleep3", r"sleep\(level=3\) is unknown; use 1"),
    ):
        with pytest.raises(RolloutError, match=message):
            call(state, name)


@pytest.fixture
def engine(vllm_subject: Subject) -> Iterator[VllmEngine]:
    """The session's engine; the test leaves it awake and whole."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    assert isinstance(vllm_subject.engine, VllmEngine)
    yield vllm_subject.engine
    assert not vllm_subject.engine.asleep


def serves(engine: VllmEngine, model: Any, seed: int) -> None:
    """Assert that what `engine` samples has `model`'s log-probs."""
    prompts = make_prompts(2, seed=seed)
    for c in engine.generate(prompts, SamplingParams(max_new_tokens=6, seed=seed)):
        expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_before_the_cache(
    engine: VllmEngine, vllm_subject: Subject, level: int
) -> None:
    model, version = vllm_subject.model, engine.policy_version + 1
    engine.sleep(level)
    assert engine.asleep
    train(model, steps=1)
    with pytest.raises(RolloutError, match="generate while asleep"):
        engine.generate([[5]], SamplingParams())
    with pytest.raises(RolloutError, match="update of weights while asleep"):
        engine.update_weights(model, version)
    with pytest.raises(RolloutError, match="update of weights while asleep"):
        engine.begin_update(version)
    engine.wake_weights()
    engine.update_weights(model, version)
    with pytest.raises(RolloutError, match="call wake_kv first"):
        engine.generate([[5]], SamplingParams())
    engine.wake_kv()
    serves(engine, model, seed=level)


def test_an_update_that_fails_between_sleep_and_wake_is_repeated_whole(
    engine: VllmEngine, vllm_subject: Subject
) -> None:
    model, version = vllm_subject.model, engine.policy_version + 1
    engine.sleep(2)
    engine.wake_weights()
    with pytest.raises(RolloutError, match="could not take policy version"):
        engine.update_weights(build("qwen2").to("meta"), version)
    with pytest.raises(RolloutError, match="call update_weights first"):
        engine.wake_kv()
    engine.update_weights(model, version)
    engine.wake_kv()
    serves(engine, model, seed=4)


def test_a_stream_that_breaks_off_or_lacks_a_part_is_not_served(
    engine: VllmEngine, vllm_subject: Subject
) -> None:
    model, version = vllm_subject.model, engine.policy_version + 1
    named = {name: p.detach().clone() for name, p in model.named_parameters()}

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(named.items())[:5]
        raise OSError("the connection was reset")

    lacking = "model.layers.1.self_attn.k_proj.weight"
    partial = ((name, tensor) for name, tensor in named.items() if name != lacking)
    for stream, message in ((broken(), "connection was reset"), (partial, lacking)):
        with pytest.raises(RolloutError, match=message):
            engine.update_from(stream, version)
        with pytest.raises(RolloutError, match=f"can't serve.*{message}"):
            engine.generate([[5]], SamplingParams())
    engine.update_from(named.items(), version)
    serves(engine, model, seed=5)
    assert engine.policy_version == version


def test_writing_into_vllms_parameters_is_framed_by_begin_and_end(
    engine: VllmEngine, vllm_subject: Subject
) -> None:
    model, version = vllm_subject.model, engine.policy_version + 1
    with pytest.raises(RolloutError, match=r"without begin_update"):
        engine.finish_update(version)
    with pytest.raises(RolloutError, match="never fall"):
        engine.begin_update(version - 2)
    engine.begin_update(version)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for tensor in engine.parameters().values():
        tensor.mul_(1.01)
    for name, parameter in model.named_parameters():  # the trainer's are its own meanwhile
        assert torch.equal(parameter, before[name])
    with pytest.raises(RolloutError, match="did not finish"):
        engine.generate([[5]], SamplingParams())
    engine.finish_update(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    serves(engine, model, seed=6)
    engine.update_weights(model, version)
    assert engine.shares_storage


def test_a_version_behind_is_said_before_a_rollout(engine: VllmEngine) -> None:
    version = engine.policy_version
    check_version(engine, version)
    message = f"serves policy version {version}, the trainer's is {version + 1}; call update_weigh"
    with pytest.raises(RolloutError, match=message):
        check_version(engine, version + 1)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


tensors = st.lists(
    st.tuples(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])),
    max_size=8,
)


@given(tensors, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 4000))
def test_tensors_come_out_as_they_went_in(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype, size: int
) -> None:
    sent = [torch.randint(0, 200, shape).to(kind) for shape, kind in kinds]
    read: dict[str, torch.Tensor] = {}
    named = [(str(index), tensor) for index, tensor in enumerate(sent)]
    for parts in chunks(named, dtype, size):
        entries = [entry for entry, _ in parts]
        assert all(entry.start % 64 == 0 for entry in entries)
        assert all(a.end <= b.start for a, b in pairwise(entries))
        assert entries[-1].end <= size or len(entries) == 1
        writer = SharedBuffer.create(max(entries[-1].end, 1))
        reader = SharedBuffer(writer.path, writer.size)
        writer.unlink()
        assert not Path(writer.path).exists()
        for entry, tensor in parts:
            entry.view(writer.bytes).copy_(tensor)
        read |= reader.read(entries)
    assert list(read) == [name for name, _ in named]
    for tensor, got in zip(sent, read.values(), strict=True):
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_no_room_is_an_error_that_names_the_way_out() -> None:
    """A file in memory without room for its pages would end whoever writes to it (SIGBUS)."""
    before = set(Path("/dev/shm").glob("hybridflyte-weights-*"))
    with pytest.raises(RolloutError, match=r"no room for 1073741824 MB.*lower bucket_mb"):
        SharedBuffer.create(1 << 50)
    assert set(Path("/dev/shm").glob("hybridflyte-weights-*")) <= before


START_S = 240.0  # importing vLLM on a busy machine takes most of it


PROMPTS = make_prompts(3, seed=2)


PARAMS = SamplingParams(n=2, max_new_tokens=10, seed=3)


OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": CONTEXT, "kv_cache_memory_mb": 32}


@torch.no_grad()
def change(model: nn.Module) -> None:
    """What stands for an optimizer step: the same on a whole model and on shares of it."""
    for tensor in local_tensors(model).values():
        tensor.mul_(1.02)


def errors(model: nn.Module, completions: list[Completion]) -> float:
    """The largest distance of a log-prob from transformers'."""
    return max(
        float(
            (reference_log_probs(model, PROMPTS[c.prompt_index], c.token_ids))
            .sub(torch.tensor(c.log_probs))
            .abs()
            .max()
        )
        for c in completions
    )


def swapped(shard_map: ShardMap) -> ShardMap:
    """The same shard_map with the ranks 0 and 1 exchanged."""
    parameters = {
        name: replace(
            one, shards=tuple(replace(h, ranks=tuple(1 - r for r in h.ranks)) for h in one.shards)
        )
        for name, one in shard_map.parameters.items()
    }
    return replace(shard_map, parameters=parameters)


def serve(family: str, parallel: dict[str, int], tp: int, reverse: bool = False) -> dict[str, Any]:
    """Bring a sharded policy's slices into vLLM's parameters twice, and decode each time."""
    rank, whole = dist.get_rank(), build(family)
    layout = Layout(**parallel)
    sharded = ShardedModel(
        build(family), Ranks.form(layout, "cpu"), ParallelConfig.model_validate(parallel)
    )
    to = rollout_layout(layout, tp=tp)
    groups = [group[::-1] for group in to.tp_groups()] if reverse else to.tp_groups()
    with torch.device("meta"):
        shape = build(family)
    engine = VllmEngine(
        shape, tensor_parallel_size=tp, rank_groups=groups, load=False, dtype="float32", **OPTIONS
    )
    result: dict[str, Any] = {"errors": [], "received": [], "refused": []}
    try:
        _refused(engine, result)
        source = gather_shard_map(sharded.module, rename=sharded.full_name)
        wanted = rollout_shard_map(
            source.shapes, to, ModelShape.of(whole.config), engine.dtype, fused=True
        )
        if reverse:
            wanted = swapped(wanted)
        resharding = plan_reshard(source, wanted)
        source = local_tensors(sharded.module, rename=sharded.full_name)
        exchange = Exchange(resharding.for_rank(rank), source, engine.parameters())
        pointers = [tensor.data_ptr() for tensor in engine.parameters().values()]
        for version in (1, 2):
            change(sharded.module)
            change(whole)
            engine.begin_update(version)
            _refused(engine, result)
            result["received"].append(exchange.run().received)
            engine.finish_update(version)
            done = engine.generate(PROMPTS, PARAMS)
            result["errors"].append(errors(whole, done))
            assert {c.policy_version for c in done} == {version}
        result["tokens"] = [c.token_ids for c in done]
        traffic = resharding.traffic.items()  # elements [from, to]
        result["planned"] = sum(d.itemsize * int(count[:, rank].sum()) for d, count in traffic)
        assert pointers == [tensor.data_ptr() for tensor in engine.parameters().values()]
    finally:
        engine.close()
    assert dist.is_initialized(), "the trainer's process group outlives vLLM"
    dist.barrier()
    return result


def _refused(engine: VllmEngine, result: dict[str, Any]) -> None:
    try:
        engine.generate(PROMPTS, PARAMS)
    except RolloutError as error:
        result["refused"].append(str(error))


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert max(result["errors"]) < 1e-4
        assert result["received"] == [result["planned"]] * 2
        assert "no weights yet" in result["refused"][0]
        assert "update to policy version 1 did not finish" in result["refused"][1]
        assert len(result["refused"]) == 3
        assert result["tokens"] == results[0]["tokens"]


needs_external_1 = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@pytest.mark.slow
@needs_external_1
@pytest.mark.parametrize(
    ("family", "parallel", "tp"), [("qwen2", {"fsdp": 2}, 2), ("llama", {"tp": 2}, 1)]
)
def test_an_exchange_writes_into_vllms_own_parameters(
    family: str, parallel: dict[str, int], tp: int
) -> None:
    results = run_ranks(2, serve, family, parallel, tp, timeout_s=START_S)
    check(results)
    assert all(result["planned"] > 0 for result in results)


@pytest.mark.slow
@needs_external_1
def test_a_group_may_have_its_ranks_in_any_order() -> None:
    results = run_ranks(2, serve, "qwen3", {"tp": 2}, 2, True, timeout_s=START_S)
    check(results)


def gather(tp: int) -> list[float]:
    """Serve an FSDP2 model as it is: each parameter is gathered when its turn comes."""
    whole, layout = build("qwen2"), Layout(fsdp=2)
    sharded = ShardedModel(build("qwen2"), Ranks.form(layout, "cpu"), ParallelConfig(fsdp=2))
    groups = [[0, 1]] if tp == 2 else [[0], [1]]
    engine = VllmEngine(sharded.module, tensor_parallel_size=tp, rank_groups=groups, **OPTIONS)
    try:
        found = [errors(whole, engine.generate(PROMPTS, PARAMS))]
        change(sharded.module)
        change(whole)
        engine.update_weights(sharded.module, 1)
        found.append(errors(whole, engine.generate(PROMPTS, PARAMS)))
        change(sharded.module)
        change(whole)
        engine.update_from(sharded.full_tensors(), 2)
        found.append(errors(whole, engine.generate(PROMPTS, PARAMS)))
    finally:
        engine.close()
    return found


@pytest.mark.slow
@needs_external_1
def test_sharded_models_are_gathered_tensor_by_tensor() -> None:
    for found in run_ranks(2, gather, 2, timeout_s=START_S):
        assert max(found) < 1e-4


def in_process() -> list[float]:
    """Each rank of a data-parallel policy has an engine of its own on its own storage."""
    model = build("qwen2")
    engine = VllmEngine(model, **OPTIONS)
    try:
        assert engine.shares_storage
        found = [errors(model, engine.generate(PROMPTS, PARAMS))]
        change(model)
        engine.update_weights(model, 1)
        found.append(errors(model, engine.generate(PROMPTS, PARAMS)))
    finally:
        engine.close()
    dist.barrier()
    return found


@pytest.mark.slow
@needs_external_1
def test_data_parallel_ranks_share_storage_each_on_its_own() -> None:
    for found in run_ranks(2, in_process, timeout_s=START_S):
        assert max(found) < 1e-4


def wrong_groups() -> str:
    try:
        VllmEngine(build("qwen2"), tensor_parallel_size=1, rank_groups=[[0], [1], [2]], **OPTIONS)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@needs_external_1
def test_groups_that_are_not_the_process_groups_ranks_are_refused() -> None:
    said = run_ranks(2, wrong_groups, timeout_s=START_S)[0]
    assert "are 3 ranks, the default process group has 2" in said


@pytest.mark.slow
@needs_external_1
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("parallel", "tp"), [({"fsdp": 2, "tp": 2}, 4), ({"pp": 2, "tp": 2}, 2), ({"fsdp": 4}, 2)]
)
def test_four_ranks(parallel: dict[str, int], tp: int) -> None:
    """With tp=4 key heads are on several ranks, and a group is not in the order of its ranks."""
    check(run_ranks(4, serve, "qwen2" if tp == 2 else "llama", parallel, tp, timeout_s=560.0))
