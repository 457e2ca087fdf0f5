"""A run that was stopped and resumed is the run that was not; a lost worker costs no step."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from probe_worker import Probe
from refused_commits import refuse_commits
from thorough import and_slow
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM

from engine.checkpoint import Checkpoint, CheckpointDraft, CheckpointStore, find_latest
from engine.config import RLConfig, SamplingConfig
from engine.controller.local_groups import LocalHost, close_hosts
from engine.controller.worker_host import RoleSpec, WorkerHost
from engine.data.loader import PromptLoader
from engine.errors import (
    CheckpointError,
    DivergedError,
    LockedCheckpointsError,
    PreemptedError,
    WorkerError,
)
from engine.rollout.stream import take_partial_groups
from engine.storage.filesystem import process_start
from engine.storage.folder import Folder
from engine.trainers.prompts import PromptStream, Rollout
from engine.trainers.resume import run_settings, run_with_retries
from engine.trainers.rl import RLTrainer
from engine.workers.rollout_worker import GroupStream

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(
    folder: Path,
    placement: str = "local",
    longest: int = 6,
    sampling: SamplingConfig | None = None,
    **changes: Any,
) -> RLTrainer:
    values: dict[str, Any] = {
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "target_kl": 0.1, "horizon": 100},
        },
        "actor": {"optim": {"lr": 5e-3}, "ppo_mini_batch_size": 10},
        "critic": {"ppo_mini_batch_size": 10, "ppo_epochs": 1},
        "rollout": {"n": 4},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
    }
    for section, content in changes.items():
        values[section] = values.get(section, {}) | content
    values["trainer"] = {
        "total_training_steps": 6,
        "train_batch_size": 4,
        "placement": placement,
        "threads": 1,  # as this process has, for sums in the same order
        "save_freq": 2,
    } | changes.get("trainer", {})
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0, sampling=sampling)
    return RLTrainer(
        folder,
        RLConfig.model_validate(values),
        loader,
        max_response_length=longest,
        max_model_len=34 + longest,
    )


def facts(subject: RLTrainer) -> list[dict[str, float]]:
    """The history without times and what saving cost."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "checkpoint/", "async/"))}
        for row in subject.history
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same(first: Path, second: Path) -> None:
    a, b = weights(first), weights(second)
    assert all(torch.equal(a[name], b[name]) for name in a)


LIVE = SamplingConfig(pass_rate=(0.2, 1.0), pass_rate_recheck=0)


@pytest.mark.parametrize(
    ("mode", "sampling", "steps"),
    and_slow([("one_step_off", None, 4), ("sync", LIVE, 6)], [("sync", None, 6)]),
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    tiny_folder: Path, tmp_path: Path, mode: str, sampling: SamplingConfig | None, steps: int
) -> None:
    run = {"mode": mode, "total_training_steps": steps}
    with trainer(tiny_folder, sampling=sampling, trainer=run) as whole:
        whole.fit(checkpoint_dir=tmp_path / "a")
        whole.save(tmp_path / "whole")
    with trainer(tiny_folder, sampling=sampling, trainer=run) as first:
        first.on_step = _stop_after(steps - 1)
        with pytest.raises(KeyboardInterrupt):
            first.fit(checkpoint_dir=tmp_path / "b")
    with trainer(tiny_folder, sampling=sampling, trainer=run) as second:
        second.fit(checkpoint_dir=tmp_path / "b")
        second.save(tmp_path / "resumed")
        assert second.step == steps
    assert facts(second) == facts(whole)
    assert_same(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_rollout_ahead_resumes_without_losing_a_prompt(
    tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    """What was sampled ahead and is whole is in the checkpoint; every prompt is seen once.

    An attempt in between that ends before its own first save hands on all that it was given.
    """
    seen: list[str] = []
    run = {"mode": mode, "total_training_steps": 4}

    def watched() -> RLTrainer:
        subject = trainer(tiny_folder, trainer=run)
        step = subject.dataflow.step

        def record(roles: Any, prompts: Any, algo: Any) -> Any:
            seen.extend(row[0]["content"] for row in prompts.columns["prompt"])
            return step(roles, prompts, algo)

        subject.dataflow = dataclasses.replace(subject.dataflow, step=record)
        return subject

    with watched() as first:
        first.on_step = _stop_after(3)
        with pytest.raises(KeyboardInterrupt):
            first.fit(checkpoint_dir=tmp_path / "a")
    assert len(seen) == 12
    del seen[8:]  # step 3 came after the last checkpoint
    with trainer(tiny_folder, trainer=run) as short:
        short.on_step = _stop_after(3)
        with pytest.raises(KeyboardInterrupt):
            short.fit(checkpoint_dir=tmp_path / "b", resume_from=tmp_path / "a")
    given, copied = find_latest(tmp_path / "a"), find_latest(tmp_path / "b")
    assert given is not None
    assert copied is not None
    assert copied.step == 2
    for name in ("queue", "prompts"):
        assert _plain(copied.state[name]) == _plain(given.state[name])
    with watched() as second:
        second.resume(tmp_path / "b")
        state = second.source.state_dict()
        kept = [Rollout.from_tree(tree).completions for tree in state["queue"]]
        again = [
            partial
            for prompt in second.source.prompts._resumed
            for partial in take_partial_groups(prompt)[1]
        ]
        if mode == "one_step_off":
            assert [len(done) for done in kept] == [16]
            assert set(kept[0]["policy_version"].tolist()) == {1}
        else:  # whole groups, the versions of their tokens with them
            assert all(len(done) == 4 and "token_versions" in done for done in kept)
            assert all(partial is not None and len(partial.completions) == 4 for partial in again)
        second.fit(checkpoint_dir=tmp_path / "b")
        assert second.step == 4
    assert sorted(seen) == sorted(row["prompt"][0]["content"] for row in arithmetic_rows(16))


def _plain(tree: Any) -> Any:
    """A tree whose tensors are lists."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return tree.tolist() if isinstance(tree, torch.Tensor) else tree


def test_partial_completions_continue_token_by_token(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`async`: what was decoded when the checkpoint was written is learned from after it."""
    decode = GroupStream.step

    def slowly(self: GroupStream) -> Any:
        time.sleep(0.02)
        return decode(self)

    monkeypatch.setattr(GroupStream, "step", slowly)

    def slow() -> RLTrainer:
        run = {"mode": "async", "total_training_steps": 14, "save_freq": 1}
        keep = {"max_checkpoints_to_keep": 14}
        return trainer(tiny_folder, longest=30, trainer=run | keep)

    def has_begun(step: int, total: int, metrics: dict[str, float]) -> None:
        found = find_latest(tmp_path)
        if found is not None and any(
            tree["lengths"] and max(tree["lengths"])
            for tree in found.state["prompts"]["begun"]
            if tree is not None
        ):
            chosen.append(found.folder)
            raise KeyboardInterrupt

    chosen: list[str] = []
    used: list[Any] = []
    with slow() as first:
        first.on_step = has_begun
        with pytest.raises(KeyboardInterrupt):
            first.fit(12, checkpoint_dir=tmp_path)
    with slow() as second:
        second.load_checkpoint(chosen[0])
        kept = {
            prompt.columns["prompt"][0][0]["content"]: partial
            for prompt in second.source.prompts._resumed
            for partial in take_partial_groups(prompt)[1]
            if partial is not None and partial.oldest_version is not None
        }
        step = second.dataflow.step

        def record(roles: Any, prompts: Any, algo: Any) -> Any:
            used.append((prompts, roles.rollout.generate(prompts).result()))
            return step(roles, prompts, algo)

        second.dataflow = dataclasses.replace(second.dataflow, step=record)
        begin = second.step
        second.fit(2)
    gone_on = 0
    for prompts, batch in used:
        for row, prompt in enumerate(prompts.columns["prompt"]):
            partial = kept.get(prompt[0]["content"])
            for index, part in enumerate(partial.completions if partial is not None else ()):
                ours, length = batch.rows([4 * row + index]), len(part.token_ids)
                for name, wanted in (
                    ("responses", part.token_ids),
                    ("token_versions", part.token_versions),
                    ("rollout_log_probs", part.log_probs),
                ):
                    assert ours[name][0, :length].tolist() == wanted
                rest = ours["response_mask"][0, length:].bool()
                assert (ours["token_versions"][0, length:][rest] >= begin).all()
                gone_on += length
    assert gone_on


def _stop_after(step: int) -> Any:
    def on_step(now: int, total: int, metrics: dict[str, float]) -> None:
        if now == step:
            raise KeyboardInterrupt

    return on_step


def test_dynamic_sampling_resumes_where_its_refills_ended(
    tiny_folder: Path, tmp_path: Path
) -> None:
    flow: dict[str, Any] = {
        "algorithm": {
            "adv_estimator": "grpo",
            "filter_groups": {"enable": True, "max_num_gen_batches": 3},
        },
        "critic": {"ppo_mini_batch_size": 0, "ppo_epochs": 2},  # the defaults: there is none
        "reward": {"name": "tiny_engine:sometimes_right", "isolation": "none"},
        "trainer": {"total_training_steps": 4},
    }
    with trainer(tiny_folder, **flow) as whole:
        whole.fit(checkpoint_dir=tmp_path / "a")
    with trainer(tiny_folder, **flow) as first:
        first.fit(2, checkpoint_dir=tmp_path / "b")
    with trainer(tiny_folder, **flow) as second:
        second.fit(checkpoint_dir=tmp_path / "b")
    assert any(row["sampling/rollouts"] > 1 for row in facts(whole))
    assert facts(second) == facts(whole)


EACH_STEP = {"save_freq": 1}


def test_load_checkpoint_and_go_on(tiny_folder: Path, tmp_path: Path) -> None:
    with trainer(tiny_folder, trainer=EACH_STEP) as whole:
        whole.fit(3, checkpoint_dir=tmp_path)
        wanted = facts(whole)
    with trainer(tiny_folder, trainer=EACH_STEP) as subject:
        subject.load_checkpoint(tmp_path / "step_2")
        assert subject.step == 2
        subject.fit(num_steps=1)
        assert facts(subject) == wanted


def test_a_setting_that_an_older_version_did_not_have_counts_with_its_default(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_top_p(self: RLTrainer) -> dict[str, object]:
        settings = run_settings(self.config, self.spec.max_response_length, self.spec.seed)
        return {name: value for name, value in settings.items() if name != "rl.rollout.top_p"}

    with monkeypatch.context() as older, trainer(tiny_folder) as first:
        older.setattr(RLTrainer, "_settings", without_top_p)
        first.fit(1, checkpoint_dir=tmp_path)
    with trainer(tiny_folder) as later:
        assert later.resume(tmp_path) is not None
        assert (later.step, later.changed_settings) == (1, [])
    with (
        trainer(tiny_folder, rollout={"top_p": 0.9}) as other,
        pytest.raises(CheckpointError, match=r"rl.rollout.top_p is 1.0 there and 0.9 here"),
    ):
        other.resume(tmp_path)


def test_a_checkpoint_of_other_settings_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with trainer(tiny_folder) as first:
        first.fit(1, checkpoint_dir=tmp_path)
    words = r"other settings: data.max_response_length is 6 there and 5 here, "
    words += r"rl.rollout.temperature is 1.0 there and 0.9 here; resume with"
    with (
        trainer(tiny_folder, longest=5, rollout={"temperature": 0.9}) as other,
        pytest.raises(CheckpointError, match=words),
    ):
        other.fit(checkpoint_dir=tmp_path)


def test_a_diverged_run_is_not_saved_and_goes_on_with_a_lower_learning_rate(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(lr: float, **changes: Any) -> RLTrainer:
        actor = {"optim": {"lr": lr}, "ppo_mini_batch_size": 0} | changes
        length = {"save_freq": 1, "total_training_steps": 3}
        return trainer(tiny_folder, trainer=length, actor=actor)

    with run(5e-3) as first:
        first.fit(1, checkpoint_dir=tmp_path)
    good = re.escape(f"the last good step is that of {tmp_path}/step_1:")
    with (
        run(1e39) as second,
        pytest.raises(DivergedError, match=rf"^actor rank 0: .* not finite: .*; {good}"),
    ):
        second.fit(checkpoint_dir=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1"}
    with run(1e-4, clip_ratio=0.1) as third:
        third.fit(checkpoint_dir=tmp_path)
        assert [row["actor/lr"] for row in third.history] == [5e-3, 1e-4, 1e-4]
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.state["changed_settings"] == [
        {"step": 1, "setting": "rl.actor.clip_ratio", "before": None, "after": 0.1},
        {"step": 1, "setting": "rl.actor.optim.lr", "before": 5e-3, "after": 1e-4},
    ]
    assert "rl.actor.optim.lr is 0.005 there and 0.0001 here" in caplog.text


def test_a_run_goes_on_from_another_runs_checkpoint_that_it_is_told(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """It is told the checkpoint or the folder of several."""
    with trainer(tiny_folder, trainer=EACH_STEP) as first:
        first.fit(1, checkpoint_dir=tmp_path / "a")
    events: list[tuple[str, int]] = []

    def go_on(told: Path, own: Path) -> None:
        run = {"resume_from": str(told), "total_training_steps": 2} | EACH_STEP
        with trainer(tiny_folder, trainer=run) as second:
            second.on_step = lambda step, total, metrics: events.append(("trained", step))
            second.on_resume = lambda folder, step: events.append((folder, step))
            second.fit(checkpoint_dir=own)
            assert second.step == 2

    for told, own in (("a/step_1", "b"), ("a", "c")):
        go_on(tmp_path / told, tmp_path / own)
        assert events == [(f"{tmp_path}/a/step_1", 1), ("trained", 2)]
        events.clear()
    shutil.rmtree(tmp_path / "a")
    go_on(tmp_path / "a", tmp_path / "c")  # from its own, whatever became of the other
    assert events == [(f"{tmp_path}/c/step_2", 2)]
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint and holds none; name a"):
        go_on(tmp_path / "a", tmp_path / "d")


def test_a_second_run_in_the_folder_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    root, seen = Folder(tmp_path), list[dict[str, Any]]()

    def look(step: int, total: int, metrics: dict[str, float]) -> None:
        [lock] = [name for name in root.entries() if name.startswith(".lock")]
        seen.append(json.loads(root.read(lock)))

    with trainer(tiny_folder, trainer={"total_training_steps": 1}) as subject:
        subject.on_step = look
        subject.fit(checkpoint_dir=tmp_path)
        assert [lock["pid"] for lock in seen] == [os.getpid()]
        other = seen[0] | {"pid": 1, "started": process_start(1)}
        root.write(".lock.json", [json.dumps(other).encode()])
        with pytest.raises(
            LockedCheckpointsError, match=r"is in use by another run \(process 1 on"
        ):
            subject.fit(checkpoint_dir=tmp_path)


def test_a_checkpoint_of_another_start_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Both have one shape and one path: no name or size tells them apart."""
    start = tmp_path / "start"
    shutil.copytree(tiny_folder, start)
    with trainer(start) as first:
        first.fit(1, checkpoint_dir=tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    model.save_pretrained(start)
    with trainer(start) as other, pytest.raises(CheckpointError, match="began with other weights"):
        other.fit(checkpoint_dir=tmp_path / "run")


def test_a_save_that_fails_costs_no_training(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    run = {"total_training_steps": 2} | EACH_STEP
    with trainer(tiny_folder, trainer=run) as subject, caplog.at_level(logging.WARNING):
        subject.fit(checkpoint_dir=tmp_path / "blocked")
        assert subject.step == 2
    assert "no checkpoint at step 1" in caplog.text


@pytest.mark.parametrize("refused", [[1], [2], [2, 2]], ids=str)
def test_a_refused_commit_costs_its_own_step_at_most(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: list[int]
) -> None:
    left = list(refused)
    refuse_commits(monkeypatch, left)
    with trainer(tiny_folder, trainer={"total_training_steps": 2} | EACH_STEP) as subject:
        assert subject.fit(checkpoint_dir=tmp_path / "run")
        subject.save(tmp_path / "model")
    assert not left
    found = find_latest(tmp_path / "run")
    assert found is not None
    assert found.step == (1 if refused == [2, 2] else 2)


def test_a_save_is_durable_when_the_interrupt_after_it_arrives(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = CheckpointStore.commit

    def slowly(self: CheckpointStore, draft: CheckpointDraft) -> Checkpoint:
        time.sleep(1.0)
        return commit(self, draft)

    monkeypatch.setattr(CheckpointStore, "commit", slowly)
    with trainer(tiny_folder, trainer={"save_freq": 1}) as subject:
        subject.on_step = _stop_after(2)
        with pytest.raises(KeyboardInterrupt):
            subject.fit(checkpoint_dir=tmp_path)
        found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_who_reports_a_step_sees_what_the_save_before_cost(
    tiny_folder: Path, tmp_path: Path
) -> None:
    seen: dict[int, set[str]] = {}

    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        seen[step] = {name for name in metrics if name.startswith("checkpoint/")}
        deadline = time.monotonic() + 30
        while step == 3 and find_latest(tmp_path) is None and time.monotonic() < deadline:
            time.sleep(0.05)

    with trainer(tiny_folder, trainer={"total_training_steps": 4}) as subject:
        subject.on_step = on_step
        subject.fit(checkpoint_dir=tmp_path)
        told = [name for row in subject.history for name in row if name.startswith("checkpoint/")]
    assert sorted(seen[3] | seen[4]) == [
        "checkpoint/bytes",
        "checkpoint/bytes_over_least",
        "checkpoint/stall_s",
        "checkpoint/write_s",
    ]
    assert not seen[1] | seen[2]
    assert sorted(told) == sorted(seen[3] | seen[4]), "once, and in the history too"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_killed_trainer_is_resumed_and_loses_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    from test_supervision import pid_of

    with trainer(tiny_folder) as whole:
        whole.fit(checkpoint_dir=tmp_path / "a")
        whole.save(tmp_path / "whole")
    struck: list[int] = []
    last: list[RLTrainer] = []

    def work(subject: RLTrainer) -> None:
        def strike(step: int, total: int, metrics: dict[str, float]) -> None:
            if step == 5 and not struck:
                struck.append(pid_of("actor"))
                os.kill(struck[0], signal.SIGKILL)

        subject.on_step = strike
        subject.fit(checkpoint_dir=tmp_path / "b")
        subject.save(tmp_path / "resumed")
        last.append(subject)

    run_with_retries(lambda: trainer(tiny_folder, "ray"), work, tmp_path / "b", max_attempts=2)
    assert struck
    assert facts(last[0]) == facts(whole)
    assert_same(tmp_path / "whole", tmp_path / "resumed")


def test_attempts_that_get_nowhere_end_with_the_cause(tiny_folder: Path, tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> RLTrainer:
        made.append(1)
        return trainer(tiny_folder)

    def work(subject: RLTrainer) -> None:
        raise WorkerError("the disk of rank 3 is gone")

    with pytest.raises(WorkerError, match="rank 3"):
        run_with_retries(make, work, tmp_path, max_attempts=3)
    assert len(made) == 3


def test_no_attempt_follows_one_whose_call_can_t_be_ended(
    tiny_folder: Path, tmp_path: Path
) -> None:
    made: list[int] = []

    def make() -> RLTrainer:
        made.append(1)
        return trainer(tiny_folder)

    def work(subject: RLTrainer) -> None:
        host = LocalHost(WorkerHost([RoleSpec("probe", Probe)], threads=1))
        host.submit(lambda: time.sleep(2.0))
        close_hosts([host], 0.1)
        raise WorkerError("probe rank 0: nap gave no result within 0.1 s")

    with pytest.raises(WorkerError, match="gave no result"):
        run_with_retries(make, work, tmp_path, max_attempts=3)
    assert len(made) == 1


def test_prompts_come_again_in_order(tiny_folder: Path) -> None:
    from engine.data.tokenizer import load_tokenizer

    def stream() -> PromptStream:
        loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
        return PromptStream(loader, load_tokenizer(tiny_folder))

    def text(batch: Any) -> list[str]:
        return [row[0]["content"] for row in batch.columns["prompt"]]

    first = stream()
    drawn = [first.next_prompt() for _ in range(7)]
    state = first.state_dict(unfinished=[drawn[4], drawn[6]])
    rest = [text(first.next_prompt()) for _ in range(6)]
    second = stream()
    second.load_state_dict(state)
    again = [text(second.next_prompt()) for _ in range(8)]
    assert again == [text(drawn[4]), text(drawn[6]), *rest]


def test_a_finished_run_says_so_and_trains_no_more(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"total_training_steps": 1}
    with trainer(tiny_folder, trainer=run) as first:
        first.fit(checkpoint_dir=tmp_path)
    with trainer(tiny_folder, trainer=run) as second, caplog.at_level(logging.WARNING):
        second.on_step = lambda *facts: pytest.fail("trained again")
        assert second.fit(checkpoint_dir=tmp_path) == {}
    assert "all 1 steps are done already; nothing to train" in caplog.text
    assert facts(second) == facts(first)


def test_sigterm_saves_the_step_and_another_folder_goes_on_from_it(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """As a pre-empted Flyte task and its next attempt, which has a checkpoint folder of its own."""

    def strike(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    run = {"save_freq": 100, "total_training_steps": 4}
    with trainer(tiny_folder, trainer=run) as whole:
        whole.fit()
    with trainer(tiny_folder, trainer=run) as first:
        first.on_step = strike
        with pytest.raises(PreemptedError, match=r"after step 2; .*a/step_2"):
            first.fit(checkpoint_dir=tmp_path / "a")
    with trainer(tiny_folder, trainer=run) as second:
        started: list[int] = []
        second.on_step = lambda step, total, metrics: started.append(step)
        resumed: list[tuple[str, int]] = []
        second.on_resume = lambda folder, step: resumed.append((folder, step))
        second.fit(checkpoint_dir=tmp_path / "b", resume_from=tmp_path / "a")
        assert started == [3, 4]
        assert resumed == [(str(tmp_path / "a" / "step_2"), 2)]
        assert facts(second) == facts(whole)
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"step_2", "step_4"}
