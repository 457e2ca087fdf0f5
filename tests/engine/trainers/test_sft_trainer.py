"""The warm start: it learns its rows, counts response tokens only, and repeats bit for bit."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import FAMILIES, family_tokenizer
from tiny_engine import TINY_MODEL, random_completions, tiny_model
from transformers import GenerationConfig, PreTrainedModel

from engine.checkpoint import find_latest
from engine.config import SFTConfig
from engine.data.templates import encode_prompt, encode_turn, stop_token_ids, turn_text
from engine.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    LockedCheckpointsError,
    PreemptedError,
)
from engine.models import build_model, save_model
from engine.rewards.answers import think_format
from engine.rollout.protocol import SamplingParams, create_engine
from engine.runtime.policy_runtime import saved_tokenizer
from engine.trainers.offline import SFTExample, SFTTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


def examples(rows: int, seed: int = 0) -> list[SFTExample]:
    return [SFTExample(p, r) for p, r in zip(*random_completions(rows, seed), strict=True)]


def trainer(model: PreTrainedModel, seed: int = 0, **changes: Any) -> SFTTrainer:
    values = {"threads": 1, "train_batch_size": 8, "optim": {"lr": 1e-2}} | changes
    return SFTTrainer(model, 0, SFTConfig.model_validate(values), seed=seed)


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_overfits_a_handful_of_rows() -> None:
    model, rows = tiny_model("qwen2"), examples(6)
    history: list[tuple[int, int, dict[str, float]]] = []
    subject = trainer(
        model, max_steps=30, train_batch_size=6, validate_every=15, optim={"lr": 2e-2}
    )
    subject.on_step = lambda *facts: history.append(facts)
    final = subject.fit(rows, examples(4, seed=9))
    assert history[0][2]["sft/loss"] > 3.0
    assert final["sft/loss"] < 0.05
    assert [step for step, _, _ in history] == list(range(1, 31))
    assert {total for _, total, _ in history} == {30}
    assert [s for s, _, m in history if "sft/validation_loss" in m] == [15, 30]
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
            said = logits[len(row.prompt_ids) - 1 : -1].argmax(-1).tolist()
            assert said == row.response_ids


@pytest.mark.parametrize("name", ["qwen2.5-base", "r1-distill", "llama3"])
def test_it_learns_to_end_a_turn_and_to_think_once_where_the_template_has_it_so(
    name: str, tmp_path: Path
) -> None:
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    said = {a: f"<think>\n{a} and 1\n</think>\n<answer>{a + 1}</answer>" for a in (2, 4, 7)}
    asked = {a: [{"role": "user", "content": f"{a} plus 1?"}] for a in said}
    rows = [
        SFTExample(*encode_turn(tokenizer, asked[a], {"role": "assistant", "content": said[a]}))
        for a in said
    ]
    shape = TINY_MODEL.model_copy(update={"max_position_embeddings": 256})
    model = build_model(shape, tokenizer, seed=0)
    trainer(model, max_steps=30, train_batch_size=3, optim={"lr": 2e-2}).fit(rows)
    engine = create_engine("native", model.eval(), max_model_len=256)
    stops = stop_token_ids(tokenizer, model.config)
    params = SamplingParams(max_new_tokens=80, temperature=0.0, stop_token_ids=stops)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in asked.values()]
    done = engine.generate(prompts, params)
    engine.close()
    end = tokenizer.convert_tokens_to_ids(family.end)
    assert {(c.finish_reason, c.token_ids[-1], c.token_ids.count(end)) for c in done} == {
        ("stop", end, 1)
    }
    texts = [turn_text(tokenizer, p, c.token_ids) for p, c in zip(prompts, done, strict=True)]
    form = r"<think>\n\d and 1\n</think>\n<answer>\d</answer>"
    assert [text for text in texts if not re.fullmatch(form, text)] == []
    assert think_format([], texts, ground_truth=[None] * 3) == [1.0, 1.0, 1.0]
    save_model(model, tokenizer, tmp_path)
    saved = saved_tokenizer(str(tmp_path), model)
    assert model.generation_config is not None
    save_model(model, saved, tmp_path)
    ends = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert end in (ends if isinstance(ends, list) else [ends])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_loss_is_the_mean_over_learned_tokens_only(every: int, packing: bool) -> None:
    """All of a response, or every second token of it, as between a conversation's turns."""
    model, rows = tiny_model("llama"), examples(5)
    rows = [
        row._replace(learned=[i % every == 0 for i in range(len(row.response_ids))]) for row in rows
    ]
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row.prompt_ids + row.response_ids])
            logs = model(input_ids=ids).logits[0].log_softmax(-1)
            start = len(row.prompt_ids) - 1
            for offset, token in enumerate(row.response_ids[::every]):
                total -= float(logs[start + every * offset, token])
            tokens += len(row.response_ids[::every])
    subject = trainer(model, max_steps=1, train_batch_size=5, packing=packing)
    assert subject.validation_loss(rows) == pytest.approx(total / tokens, rel=1e-5)
    assert subject.fit(rows, [])["sft/loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_micro_batches_don_t_change_the_step() -> None:
    results = []
    for budget in (64, 8192):
        model = tiny_model("qwen2")
        trainer(model, max_steps=1, train_batch_size=16, max_tokens_per_micro_batch=budget).fit(
            examples(16), []
        )
        results.append(weights(model))
    assert (results[0] - results[1]).abs().quantile(0.99) < 1e-6


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_seed_fixes_every_bit(family: str) -> None:
    def run(seed: int, disturbance: int) -> torch.Tensor:
        torch.manual_seed(disturbance)
        model = tiny_model(family)
        trainer(model, seed=seed, max_steps=6).fit(examples(20), examples(3))
        return weights(model)

    first = run(0, 1)
    assert torch.equal(first, run(0, 2))
    assert not torch.equal(first, run(1, 1))


def test_validation_has_no_dropout_and_leaves_the_mode() -> None:
    model = tiny_model("gpt2").train()
    subject = trainer(model)
    rows = examples(4)
    assert subject.validation_loss(rows) == subject.validation_loss(rows)
    assert model.training


def test_steps_by_epochs_or_by_number() -> None:
    subject = trainer(tiny_model("qwen2"), epochs=2.5, train_batch_size=8)
    assert subject.total_steps(20) == 8  # 2.5 epochs of 3 batches
    assert subject.total_steps(3) == 3  # one batch of 3 rows an epoch
    assert trainer(tiny_model("qwen2"), max_steps=7).total_steps(1000) == 7


def test_every_row_comes_once_an_epoch_in_a_new_order() -> None:
    subject = trainer(tiny_model("qwen2"), train_batch_size=4)
    batches = subject._batches(examples(12), 6)
    epochs = [[row for batch in batches[i : i + 3] for row in batch] for i in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]


def test_nothing_to_train_on() -> None:
    with pytest.raises(DataError, match=r"no rows; check data\.sft_size"):
        trainer(tiny_model("qwen2")).fit([], [])


def test_divergence_stops_the_run() -> None:
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[3:] = float("nan")
    with pytest.raises(DivergedError, match="diverged"):
        trainer(model, max_steps=3).fit(examples(4), [])


def test_a_diverged_run_is_not_saved_and_goes_on_with_a_lower_learning_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, constant = examples(6), {"schedule": "constant", "warmup_ratio": 0.0}
    first = trainer(tiny_model("qwen2"), **SAVING | {"optim": {"lr": 1e-2} | constant})

    def diverge() -> None:
        with torch.no_grad():
            next(first.model.parameters())[0, 0] = float("inf")

    stopped(first, 4, diverge)
    with pytest.raises(
        DivergedError, match=rf"not finite: .*the last good step is .*{tmp_path}/step_2"
    ):
        first.fit(rows, [], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_2"}
    again = trainer(tiny_model("qwen2"), **SAVING | {"optim": {"lr": 1e-3} | constant})
    assert again.fit(rows, [], tmp_path)["sft/lr"] == 1e-3
    assert "step_2: settings changed: sft.optim.lr is 0.01 there and 0.001 here" in caplog.text
    found = find_latest(tmp_path)
    assert found is not None
    assert found.state["changed_settings"] == [
        {"step": 2, "setting": "sft.optim.lr", "before": 0.01, "after": 0.001}
    ]


def test_a_folder_that_another_run_has_is_refused(tmp_path: Path) -> None:
    rows = examples(6)
    first = trainer(tiny_model("qwen2"), **SAVING)
    refused: list[int] = []

    def run_beside() -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                trainer(first.model, **SAVING).fit(rows, [], tmp_path)
            except LockedCheckpointsError:
                status = 0
            finally:
                os._exit(status)
        refused.append(os.waitpid(child, 0)[1])

    stopped(first, 3, run_beside)
    first.fit(rows, [], tmp_path)
    assert refused == [0]


def stopped(subject: SFTTrainer, at: int, act: Callable[[], None]) -> None:
    """Have `act` done right after step `at`."""

    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == at:
            act()

    subject.on_step = on_step


def raise_interrupt() -> None:
    raise KeyboardInterrupt


SAVING = {"max_steps": 8, "save_freq": 2, "train_batch_size": 4, "validate_every": 3}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_killed_warm_start_goes_on_bit_for_bit(tmp_path: Path, elsewhere: bool) -> None:
    rows, held_out = examples(10), examples(4, seed=9)
    whole = trainer(tiny_model("qwen2"), **SAVING)
    wanted = whole.fit(rows, held_out)
    first = trainer(tiny_model("qwen2"), **SAVING)
    stopped(first, 5, raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.fit(rows, held_out, tmp_path / "first")
    second = trainer(tiny_model("qwen2", seed=7), **SAVING)  # what it starts from leaves no trace
    started: list[int] = []
    second.on_step = lambda step, total, metrics: started.append(step)
    resumed: list[tuple[str, int]] = []
    second.on_resume = lambda folder, step: resumed.append((folder, step))
    if elsewhere:  # as a Flyte task's second attempt, which has a folder of its own
        found = second.fit(rows, held_out, tmp_path / "second", resume_from=tmp_path / "first")
    else:
        found = second.fit(rows, held_out, tmp_path / "first")
    assert started in ([5, 6, 7, 8], [3, 4, 5, 6, 7, 8])  # whether step 4 was durable already
    last = started[0] - 1
    assert resumed == [(str(tmp_path / "first" / f"step_{last}"), last)]
    assert torch.equal(weights(second.model), weights(whole.model))
    for name in ("sft/loss", "sft/lr", "sft/grad_norm"):
        assert found[name] == wanted[name]


def test_a_finished_warm_start_is_not_trained_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = examples(6)
    first = trainer(tiny_model("qwen2"), **SAVING)
    wanted = first.fit(rows, [], tmp_path)
    again = trainer(tiny_model("qwen2"), **SAVING)
    with caplog.at_level(logging.WARNING):
        assert again.fit(rows, [], tmp_path) == wanted
    assert "at step 8 of 8 already" in caplog.text
    assert torch.equal(weights(again.model), weights(first.model))


def test_sigterm_saves_the_step_and_ends_as_pre_empted(tmp_path: Path) -> None:
    rows = examples(6)
    before = signal.getsignal(signal.SIGTERM)
    first = trainer(tiny_model("qwen2"), **SAVING | {"save_freq": 100})
    stopped(first, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptedError, match=r"after step 3; .*step_3$"):
        first.fit(rows, [], tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    second = trainer(tiny_model("qwen2"), **SAVING | {"save_freq": 100})
    steps: list[int] = []
    second.on_step = lambda step, total, metrics: steps.append(step)
    second.fit(rows, [], tmp_path)
    assert steps == [4, 5, 6, 7, 8]


def test_the_deadline_after_sigterm_ends_a_step_that_hangs(tmp_path: Path) -> None:
    subject = trainer(tiny_model("qwen2"), **SAVING | {"preemption_grace_s": 0.3})

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30.0)

    stopped(subject, 3, hang)
    begin = time.monotonic()
    with pytest.raises(PreemptedError, match=r"saved in 0.3 s"):
        subject.fit(examples(6), [], tmp_path)
    assert time.monotonic() - begin < 10.0


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    rows = examples(6)
    trainer(tiny_model("qwen2"), **SAVING).fit(rows, [], tmp_path)
    changes = {"max_steps": 9, "optim": {"lr": 2e-2}}
    with pytest.raises(
        CheckpointError, match=r"settings: sft.max_steps is 8 there and 9 here; res"
    ):
        trainer(tiny_model("qwen2"), **SAVING | changes).fit(rows, [], tmp_path)
    with pytest.raises(CheckpointError, match=r"data.rows is 6 there and 5 here; res"):
        trainer(tiny_model("qwen2"), **SAVING).fit(rows[:5], [], tmp_path)


def test_a_checkpoint_of_other_start_weights_is_refused(tmp_path: Path) -> None:
    rows = examples(6)
    first, other = (trainer(tiny_model("qwen2"), **SAVING) for _ in range(2))
    first.start, other.start = "a" * 64, "b" * 64
    first.fit(rows, [], tmp_path)
    with pytest.raises(CheckpointError, match=r"other settings: start is 'a+' there"):
        other.fit(rows, [], tmp_path)
