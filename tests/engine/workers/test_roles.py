"""Roles other than the actor, and their dispatch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from chat_templates import family_tokenizer
from probe_worker import Probe
from tiny_engine import arithmetic_rows, save_family, training_batch

from engine.batch import TOKENS, Batch
from engine.config import ActorConfig, CriticConfig, RewardConfig, RolloutConfig
from engine.data.collate import collate_completions, collate_prompts
from engine.data.templates import encode_prompt, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError, RewardError, WorkerError
from engine.trainers.step_metrics import step_metrics
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.reward_worker import RewardWorker
from engine.workers.role import (
    Dispatch,
    DispatchRule,
    ProcessState,
    WorkerContext,
    dispatch,
    dispatch_rule,
)
from engine.workers.rollout_worker import RolloutWorker


def critic(folder: Path, **changes: Any) -> CriticWorker:
    config = CriticConfig.model_validate({"optim": {"lr": 1e-2}} | changes)
    return CriticWorker(
        WorkerContext("critic"), model_path=str(folder), config=config, total_steps=50, seed=0
    )


def policy(folder: Path, **rollout: Any) -> tuple[ActorWorker, RolloutWorker]:
    process = ProcessState()
    actor = ActorWorker(
        WorkerContext("actor", process=process),
        model_path=str(folder),
        config=ActorConfig(use_kl_loss=False),
        temperature=rollout.get("temperature", 1.0),
        total_steps=10,
        seed=0,
    )
    engine = RolloutWorker(
        WorkerContext("rollout", process=process),
        model_path=str(folder),
        config=RolloutConfig.model_validate({"n": 4} | rollout),
        max_response_length=6,
        max_model_len=40,
        seed=0,
    )
    return actor, engine


def prompts(folder: Path, count: int = 3) -> Batch:
    tokenizer, rows = load_tokenizer(folder), arithmetic_rows(count)
    return collate_prompts(rows, [encode_prompt(tokenizer, row["prompt"]) for row in rows])


@pytest.mark.usefixtures("one_thread")
def test_critic_fits_its_returns(tmp_path: Path) -> None:
    worker, batch = critic(save_family("qwen2", tmp_path), cliprange_value=100.0), training_batch(6)
    start = worker.values(batch)["values"]
    assert start.eq(0).all(), "a new critic predicts 0"

    def error() -> float:
        mask = batch["response_mask"]
        off = (worker.values(batch)["values"] - batch["returns"]) * mask
        return float(off.square().sum() / mask.sum())

    before = error()
    for _ in range(20):
        metrics = worker.update(batch)
    assert error() < before / 3
    assert {"critic/grad_norm", "critic/vpred_mean", "critic/vf_clipfrac"} <= metrics.keys()
    assert (worker.values(batch)["values"][~batch["response_mask"].bool()] == 0).all()


@pytest.mark.usefixtures("one_thread")
def test_critic_update_doesn_t_depend_on_micro_batches(tmp_path: Path) -> None:
    """Gradients and metrics: AdamW would blow up the noise of weights with hardly a gradient."""
    folder, batch = save_family("llama", tmp_path), training_batch(10)
    results = []
    for budget in (64, 10_000):
        worker = critic(folder, max_tokens_per_micro_batch=budget)
        with torch.no_grad():
            worker.sharded.module.head.weight.copy_(torch.linspace(-1.0, 1.0, 32)[None])
        worker._accumulate(batch)
        gradients = {name: p.grad.clone() for name, p in worker.sharded.module.named_parameters()}
        results.append((gradients, worker.update(batch)))
    (few, facts), (one, same) = results
    for name, gradient in few.items():
        torch.testing.assert_close(gradient, one[name], rtol=1e-3, atol=1e-5)
    assert float(few["head.weight"].abs().max()) > 1e-2
    assert facts == pytest.approx(same, rel=1e-3, abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_reference_is_the_frozen_start(tmp_path: Path) -> None:
    folder = save_family("qwen2", tmp_path)
    actor, _ = policy_of(folder)
    options = {"temperature": 0.7, "max_tokens_per_micro_batch": 64}
    worker = ReferenceWorker(WorkerContext("reference"), model_path=str(folder), **options)  # type: ignore[arg-type]
    actor.temperature = 0.7
    batch = training_batch(6)
    first = worker.log_probs(batch)["ref_log_probs"]
    own = actor.log_probs(batch)["old_log_probs"]
    torch.testing.assert_close(first, own, atol=1e-5, rtol=0)
    actor.update(batch)
    assert torch.equal(worker.log_probs(batch)["ref_log_probs"], first)
    assert not any(p.requires_grad for p in worker.sharded.module.parameters())


def policy_of(folder: Path) -> tuple[ActorWorker, None]:
    actor = ActorWorker(
        WorkerContext("actor"),
        model_path=str(folder),
        config=ActorConfig(use_kl_loss=False),
        temperature=1.0,
        total_steps=10,
        seed=0,
    )
    return actor, None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_log_probs_are_the_actor_s(tiny_folder: Path, temperature: float) -> None:
    actor, rollout = policy(tiny_folder, temperature=temperature)
    batch = rollout.generate(prompts(tiny_folder))
    assert len(batch) == 12
    assert batch["group_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert list(batch.columns["ground_truth"][::4]) == ["0", "2", "4"]
    own = actor.log_probs(batch)["old_log_probs"]
    torch.testing.assert_close(own, batch["rollout_log_probs"], atol=5e-5, rtol=0)
    lengths = batch["response_mask"].sum(1)
    assert lengths.max() <= 6
    ends = (
        batch["responses"][torch.arange(12), lengths.long() - 1] == rollout.tokenizer.eos_token_id
    )
    assert torch.equal(batch["truncated"], ~ends)


@pytest.mark.usefixtures("one_thread")
def test_rollout_follows_the_policy_and_says_its_version(tiny_folder: Path) -> None:
    actor, rollout = policy(tiny_folder)
    first = rollout.generate(prompts(tiny_folder))
    again = policy(tiny_folder)[1].generate(prompts(tiny_folder))
    assert torch.equal(first["responses"], again["responses"])
    another = rollout.generate(prompts(tiny_folder))
    assert not torch.equal(first["input_ids"], another["input_ids"]), "fresh draws, same weights"
    advantages = torch.randn(first["responses"].shape, generator=torch.Generator().manual_seed(0))
    actor.update(first | {"advantages": advantages * first["response_mask"]})
    second = rollout.generate(prompts(tiny_folder))
    assert first["policy_version"].unique().tolist() == [0]
    assert second["policy_version"].unique().tolist() == [1]
    torch.testing.assert_close(
        actor.log_probs(second)["old_log_probs"], second["rollout_log_probs"], atol=5e-5, rtol=0
    )


@pytest.mark.usefixtures("one_thread")
def test_validation_samples_as_told_and_leaves_trainings_draws_as_they_are(
    tiny_folder: Path,
) -> None:
    how = {"val_kwargs": {"do_sample": True, "n": 2, "temperature": 0.7}}
    alone = policy(tiny_folder)[1].generate(prompts(tiny_folder))
    _, rollout = policy(tiny_folder, **how)
    first, second = (rollout.generate_validation(prompts(tiny_folder)) for _ in range(2))
    assert first["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(first["responses"], second["responses"]), "comparable between steps"
    assert not torch.equal(first["responses"][0], first["responses"][1])
    trained = rollout.generate(prompts(tiny_folder))
    assert torch.equal(alone["responses"], trained["responses"])
    greedy = policy(tiny_folder)[1].generate_validation(prompts(tiny_folder))
    assert len(greedy) == 3


@pytest.mark.usefixtures("one_thread")
def test_greedy_is_one_completion_a_prompt_and_repeats(tiny_folder: Path) -> None:
    _, rollout = policy(tiny_folder, top_k=2, top_p=0.5)
    first, second = (rollout.generate_greedy(prompts(tiny_folder)) for _ in range(2))
    assert len(first) == 3
    assert torch.equal(first["responses"], second["responses"])


def test_on_a_worker_it_is_an_ordinary_method() -> None:
    worker = Probe(WorkerContext("probe"))
    assert worker.nap(0.0) == 0.0
    assert worker.nap(seconds=0.0) == 0.0

    class Louder(Probe):
        @dispatch(Dispatch.RANK_ZERO)
        def whoami(self) -> tuple[str, int, int, int]:
            role, *numbers = super().whoami()
            return (role.upper(), *numbers)

    louder = cloudpickle.loads(cloudpickle.dumps(Louder))  # as Ray sends a class of a script
    assert louder(WorkerContext("probe")).whoami()[:3] == ("PROBE", 0, 1)
    assert dispatch_rule(louder, "whoami").mode is Dispatch.RANK_ZERO


def test_the_class_has_its_rule_and_its_words() -> None:
    rule = dispatch_rule(ReferenceWorker, "log_probs")
    writes = frozenset({"ref_log_probs"})
    assert rule == DispatchRule(Dispatch.DATA_PARALLEL, 1, True, frozenset(TOKENS), writes)
    assert ReferenceWorker.log_probs.__doc__ == "`ref_log_probs [B, R]`."


@pytest.mark.parametrize("method", ["unmarked", "missing"])
def test_other_methods_have_none(method: str) -> None:
    with pytest.raises(WorkerError, match=rf"Probe\.{method} can't be called on a group"):
        dispatch_rule(Probe, method)


TEXTS = ("#### 0", "1+1=2\n#### 3", "four #### 4")  # the answers are 0, 2, 4


HERE = __name__


def flaky(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """Can't score a text with `3`, and has no number for one with `four`."""
    if any("3" in text for text in completions):
        raise ValueError("no judge for 3")
    return [float("nan") if "four" in text else 0.5 for text in completions]


def flaky_parts(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    scores = flaky(prompts, completions, **columns)
    return {"judge": scores, "length": [float(len(text)) for text in completions]}


def always_broken(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError("the judge is out")


def whole(
    prompts: Sequence[str], completions: Sequence[str], *, messages: Any = (), **columns: Any
) -> list[float]:
    """1 for a turn that begins with its thought, and answers the user's message."""
    rows = zip(prompts, completions, messages, strict=True)
    return [
        float(text.startswith("<think>") and [m["content"] for m in chat] == [prompt])
        for prompt, text, chat in rows
    ]


def by_mood(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    """Names its component after the first row's column `mood`."""
    return {columns["mood"][0]: [1.0] * len(completions)}


def completions(folder: Path, texts: Sequence[str] = TEXTS) -> Batch:
    tokenizer, rows = load_tokenizer(folder), arithmetic_rows(len(texts))
    source = collate_prompts(rows, [encode_prompt(tokenizer, row["prompt"]) for row in rows])
    ids = [encode_response(tokenizer, text) for text in texts]
    probs = [[0.0] * len(i) for i in ids]
    return collate_completions(source, range(len(texts)), ids, probs, pad_token_id=0)


def worker(folder: Path, name: str = "answer_match", **changes: Any) -> RewardWorker:
    config = RewardConfig.model_validate({"name": name, "isolation": "none"} | changes)
    return RewardWorker(WorkerContext("reward"), model_path=str(folder), config=config)


def totals(out: Batch) -> list[float]:
    return out["token_level_scores"].sum(1).tolist()


@pytest.mark.usefixtures("one_thread")
def test_reward_lands_on_the_last_token(tiny_folder: Path) -> None:
    batch = completions(tiny_folder)
    out = worker(tiny_folder).score(batch)
    scores, lengths = out["token_level_scores"], batch["response_mask"].sum(1).long()
    assert scores.dtype == torch.float32
    assert scores.shape == batch["responses"].shape
    assert totals(out) == [1.0, 0.0, 1.0]
    assert scores[0, lengths[0] - 1] == scores[2, lengths[2] - 1] == 1.0
    assert list(out.columns["completion"]) == list(TEXTS)
    assert list(out.columns["has_format"]) == [True, True, False]
    assert not out["reward_error"].any()
    assert not out["reward_failed"].any()
    assert list(out.columns["reward_error_cause"]) == ["", "", ""]
    assert "reward_components" not in out
    assert "reward_component_names" not in out


def test_a_turn_is_judged_with_what_its_prompt_has_opened(tmp_path: Path) -> None:
    """The template's own `<think>`, and what the row's prompt begins of the answer."""
    tokenizer = family_tokenizer("r1-distill")
    tokenizer.save_pretrained(tmp_path)
    rows, said = arithmetic_rows(2), "add</think> <answer>5</answer>"
    begun = {"role": "assistant", "content": "<think>First, "}
    rows[1]["prompt"] = [*rows[1]["prompt"], begun]
    source = collate_prompts(rows, [encode_prompt(tokenizer, row["prompt"]) for row in rows])
    ids = [encode_response(tokenizer, said, continues=True)] * 2
    batch = collate_completions(
        source, range(2), ids, [[0.0] * len(i) for i in ids], pad_token_id=3
    )
    role = worker(tmp_path, "think_format", components={"whole": {"name": f"{__name__}:whole"}})
    out = role.score(batch)
    assert list(out.columns["completion"]) == [f"<think>\n{said}", f"<think>\nFirst, {said}"]
    assert totals(out) == [2.0, 2.0]
    assert list(out.columns["has_format"]) == [True, True]


@pytest.mark.usefixtures("one_thread")
def test_components_are_weighed_and_kept(tiny_folder: Path) -> None:
    role = worker(tiny_folder, "answer_and_format", weights={"format": 0.25})
    out = role.score(completions(tiny_folder))
    assert out["reward_components"].dtype == torch.float32
    assert out["reward_components"].tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert totals(out) == [1.25, 0.25, 1.0]
    assert list(out.columns["reward_component_names"]) == [("answer", "format")] * 3


@pytest.mark.usefixtures("one_thread")
def test_weights_of_unknown_components_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['style'\].*\['answer', 'format'\]"):
        worker(tiny_folder, "answer_and_format", weights={"style": 1.0})
    with pytest.raises(ConfigError, match=r"its components are \[\]: correct or remove"):
        worker(tiny_folder, weights={"answer": 1.0})
    late = worker(tiny_folder, f"{HERE}:flaky_parts", weights={"style": 1.0})
    with pytest.raises(ConfigError, match=r"\['style'\].*\['judge', 'length'\]"):
        late.score(completions(tiny_folder))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("on_error", ["drop", "zero"])
@pytest.mark.parametrize("name", ["flaky", "flaky_parts"])
def test_a_failed_sample_scores_0_and_is_marked(
    tiny_folder: Path, name: str, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = worker(tiny_folder, f"{HERE}:{name}", on_error=on_error, weights={})
    out = role.score(completions(tiny_folder))
    assert out["reward_error"].tolist() == [False, True, True]
    assert out["reward_failed"].tolist() == [False, on_error == "drop", on_error == "drop"]
    assert list(out.columns["reward_error_cause"]) == ["", "raised", "not_finite"]
    if name == "flaky":
        assert totals(out) == [0.5, 0.0, 0.0]
    else:
        assert out["reward_components"].tolist() == [[0.5, 6.0], [0.0, 0.0], [0.0, 0.0]]
        assert totals(out) == [6.5, 0.0, 0.0]
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["engine.rewards"]


def parts_of_some(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    """`style` applies to texts with a line break alone, and nothing to those with `four`."""
    return {
        "length": [None if "four" in text else float(len(text)) for text in completions],
        "style": [2.0 if "\n" in text else None for text in completions],
    }


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_what_doesn_t_apply_is_neither_weighed_nor_logged_as_0(
    tiny_folder: Path, on_error: str
) -> None:
    batch = completions(tiny_folder)
    role = worker(tiny_folder, f"{HERE}:parts_of_some", on_error=on_error, weights={"style": 10})
    batch |= role.score(batch)
    assert totals(batch) == [6.0, float(len(TEXTS[1])) + 20, 0.0]
    assert batch["reward_error"].tolist() == [False, False, True]
    assert batch["reward_failed"].tolist() == [False, False, on_error == "drop"]
    assert list(batch.columns["reward_error_cause"]) == ["", "", "not_applicable"]
    assert batch["reward_components"].isnan().tolist() == [[False, True], [False] * 2, [False] * 2]
    batch |= Batch({"truncated": torch.zeros(3, dtype=torch.bool)})
    metrics = step_metrics(batch, 1.0)
    assert metrics["reward/style"] == 2.0, "the mean of the rows that it applies to"
    assert metrics["reward/length"] == (6 + len(TEXTS[1])) / 2


@pytest.mark.usefixtures("one_thread")
def test_with_fail_one_sample_ends_the_call(tiny_folder: Path) -> None:
    role = worker(tiny_folder, f"{HERE}:flaky", on_error="fail")
    with pytest.raises(RewardError, match="'flaky' raised ValueError: no judge for 3"):
        role.score(completions(tiny_folder))
    assert not role.score(completions(tiny_folder, ["#### 1", "x"]))["reward_error"].any()


@pytest.mark.usefixtures("one_thread")
def test_a_reward_that_ends_its_process_costs_its_sample_alone(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting_reward.py").write_text(
        "import os\n"
        "def reward(prompts, completions, **columns):\n"
        "    return [os._exit(3) if '3' in text else 0.5 for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    role = worker(tiny_folder, "exiting_reward:reward", isolation="process")
    try:
        out = role.score(completions(tiny_folder))
    finally:
        role.close()
    assert totals(out) == [0.5, 0.0, 0.5]
    assert out["reward_failed"].tolist() == [False, True, False]
    assert list(out.columns["reward_error_cause"]) == ["", "crashed", ""]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("on_error", ["drop", "zero", "fail"])
def test_a_reward_that_always_fails_ends_the_call(tiny_folder: Path, on_error: str) -> None:
    role = worker(tiny_folder, f"{HERE}:always_broken", on_error=on_error)
    with pytest.raises(RewardError, match="'always_broken' raised ZeroDivisionError: the judge"):
        role.score(completions(tiny_folder))


@pytest.mark.usefixtures("one_thread")
def test_component_names_must_stay(tiny_folder: Path) -> None:
    role, batch = worker(tiny_folder, f"{HERE}:by_mood"), completions(tiny_folder)
    happy = Batch(batch.as_dict(), {**batch.columns, "mood": ["happy"] * 3})
    mixed = Batch(batch.as_dict(), {**batch.columns, "mood": ["sad", "happy", "sad"]})
    sad = Batch(batch.as_dict(), {**batch.columns, "mood": ["sad"] * 3})
    assert role.score(happy).columns["reward_component_names"][0] == ("happy",)
    out = role.score(mixed)
    assert list(out.columns["reward_error_cause"]) == ["malformed", "", "malformed"]
    with pytest.raises(RewardError, match=r"\['sad'\] where components \['happy'\] was"):
        role.score(sad)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2]])  # row 1 fails before or after another
@pytest.mark.parametrize("name", ["answer_and_format", f"{HERE}:flaky", f"{HERE}:flaky_parts"])
def test_parts_equal_the_whole_even_where_one_has_no_score(
    tiny_folder: Path, name: str, order: list[int]
) -> None:
    batch = completions(tiny_folder).rows(order)
    whole = worker(tiny_folder, name).score(batch)
    role = worker(tiny_folder, name)
    parts = Batch.concat([role.score_part(batch.rows([i])) for i in range(3)])
    assert parts.names == whole.names
    for field in whole.names:
        torch.testing.assert_close(parts[field], whole[field], rtol=0, atol=0)
    assert {k: list(v) for k, v in parts.columns.items()} == {
        k: list(v) for k, v in whole.columns.items()
    }


@pytest.mark.usefixtures("one_thread")
def test_a_part_may_fail_as_a_whole(tiny_folder: Path) -> None:
    role = worker(tiny_folder, f"{HERE}:always_broken", weights={"unknown": 1.0})
    out = role.score_part(completions(tiny_folder))
    assert out["reward_failed"].all()
    assert totals(out) == [0.0, 0.0, 0.0]
    empty = role.score_part(completions(tiny_folder).rows([]))
    assert len(empty) == 0
    assert empty["reward_error"].dtype == torch.bool


@pytest.mark.usefixtures("one_thread")
def test_a_part_that_was_scored_must_have_the_components_of_the_others(tiny_folder: Path) -> None:
    named = worker(tiny_folder, f"{HERE}:flaky_parts").score(completions(tiny_folder, ["#### 1"]))
    plain = worker(tiny_folder, f"{HERE}:flaky").score(completions(tiny_folder, ["#### 1"]))
    with pytest.raises(DataError, match="reward_component_names"):
        Batch.concat([named, plain])
