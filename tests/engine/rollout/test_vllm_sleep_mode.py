"""Sleep and wake of a vLLM engine: one order of calls, and no mixed or missing weights served."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import Subject, build, make_prompts, reference_log_probs, train

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams, check_version
from engine.rollout.vllm import VllmEngine
from engine.rollout.vllm.engine import SleepMode

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
