"""`HybridActor` on one rank: what is trained is what samples; names and state are the policy's."""

from __future__ import annotations

import copy

import pytest
import torch
from hybrid_cases import prompts, step
from tiny_engine import tiny_model

from engine import HybridActor
from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_backward_pass_after_generate_is_the_models_own(actor: HybridActor) -> None:
    plain = copy.deepcopy(actor.policy)
    ids = prompts()["input_ids"]
    sequences = actor.generate(ids, max_new_tokens=4)
    assert actor.train() is actor
    assert all(module.training for module in actor.policy.modules())
    actor.eval()
    loss = actor(input_ids=sequences, labels=sequences).loss
    loss.backward()
    expected = plain(input_ids=sequences, labels=sequences).loss
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(actor.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_seen_by_the_next_generate(actor: HybridActor, fused: bool) -> None:
    before, version = actor.generate(**prompts(), max_new_tokens=8), actor.policy_version
    step(actor, fused)
    after = actor.generate(**prompts(), max_new_tokens=8)
    assert not torch.equal(after, before)
    assert torch.equal(after, actor.policy.generate(**prompts(), max_new_tokens=8))
    assert actor.policy_version == version + 1
    actor.generate(**prompts(), max_new_tokens=8)
    assert actor.policy_version == version + 1  # nothing has changed since


def test_completions_carry_version_and_log_probs(qwen: HybridActor) -> None:
    step(qwen, fused=False)
    (done,) = qwen.rollout([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    logits = qwen(input_ids=torch.tensor([[5, 6, 7, *done.token_ids]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)
    assert done.policy_version == qwen.policy_version == 1


def test_generate_leaves_mode_and_weights_alone(actor: HybridActor) -> None:
    actor.train()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in actor.named_parameters()}
    actor.generate(**prompts(), max_new_tokens=3)
    assert actor.training
    assert all(module.training for module in actor.policy.modules())
    for name, parameter in actor.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_names_parameters_and_state_are_the_policys(actor: HybridActor) -> None:
    assert isinstance(actor, torch.nn.Module)
    ours, theirs = dict(actor.named_parameters()), dict(actor.policy.named_parameters())
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in ours)
    assert list(dict(actor.named_buffers())) == list(dict(actor.policy.named_buffers()))
    assert list(actor.state_dict()) == list(actor.policy.state_dict())
    assert actor.config is actor.policy.config
    with pytest.raises(AttributeError, match="no_such_thing"):
        actor.no_such_thing  # noqa: B018


def test_loaded_weights_and_another_dtype_are_seen(qwen: HybridActor) -> None:
    before = qwen.generate(**prompts(), max_new_tokens=8)
    other = tiny_model("qwen2", seed=4)
    qwen.load_state_dict(other.state_dict())
    after = qwen.generate(**prompts(), max_new_tokens=8)
    assert not torch.equal(after, before)
    assert torch.equal(after, other.generate(**prompts(), max_new_tokens=8))
    assert qwen.policy_version == 1
    qwen.to(torch.float64)
    assert next(qwen.policy.parameters()).dtype == torch.float64
    assert torch.equal(qwen.generate(**prompts(), max_new_tokens=8), after)


def test_a_copy_is_an_actor_of_its_own(qwen: HybridActor) -> None:
    twin = copy.deepcopy(qwen)
    before = qwen.generate(**prompts(), max_new_tokens=8)
    step(twin, fused=False)
    assert torch.equal(qwen.generate(**prompts(), max_new_tokens=8), before)
    assert not torch.equal(twin.generate(**prompts(), max_new_tokens=8), before)
    assert next(twin.parameters()) is next(twin.policy.parameters())


def test_a_closed_actor_serves_nothing(qwen: HybridActor) -> None:
    qwen.close()
    qwen.close()
    ids = prompts()["input_ids"]
    qwen(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(RolloutError, match="closed"):
        qwen.generate(**prompts())
