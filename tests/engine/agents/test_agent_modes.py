"""Episodes that are rolled out ahead of the trainer, by every engine that streams."""

from __future__ import annotations

import importlib.util
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_agent_rl import run, settings, trainer
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder

from engine.batch import Batch
from engine.checkpoint.store import find_latest
from engine.rollout.stream import take_partial_groups

pytestmark = pytest.mark.usefixtures("one_thread")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
VLLM = {"engine": "vllm", "kv_cache_memory_mb": 64, "max_num_seqs": 8}
FLOAT = "float32"  # in bfloat16 two engines round otherwise


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM on CPU has attention for heads of 32 and more."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return write_tiny_folder(folder, TINY_MODEL.model_copy(update={"hidden_size": 128}))


def ahead(mode: str, placement: str = "local", steps: int = 4, **rollout: Any) -> Any:
    run = {"mode": mode, "total_training_steps": steps}
    return settings(placement, trainer=run, rollout=rollout)


def check_versions(history: list[dict[str, float]], batches: list[Batch], bound: int = 1) -> None:
    assert history[0]["staleness/max"] == 0
    for step, (metrics, batch) in enumerate(zip(history, batches, strict=True)):
        assert metrics["actor/grad_norm"] > 0
        assert metrics["episode/turns_mean"] == 3
        assert math.isfinite(metrics["rollout_corr/rollout_is_mean"])
        kept = batch["response_mask"].bool()
        versions = batch["token_versions"][kept]
        assert 0 <= step - int(versions.min()) <= bound  # what a step learns from
        assert int(versions.max()) <= step
        assert metrics["staleness/max"] == step - int(versions.min())
        # A token that the present weights drew has weight 1; another one its own ratio.
        ratios = (batch["old_log_probs"] - batch["rollout_log_probs"])[kept].exp()
        assert bool((ratios[versions == step] - 1).abs().lt(1e-3).all())
        if bool((versions < step).any()):
            assert float((ratios[versions < step] - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("placement", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_episodes_ahead_of_the_trainer_stay_within_the_bound(
    tiny_folder: Path, request: pytest.FixtureRequest, mode: str, placement: str
) -> None:
    if placement == "ray":
        request.getfixturevalue("ray_cluster")
    history, batches = run(tiny_folder, ahead(mode, placement))
    check_versions(history[:-1], batches[:4])
    if mode == "one_step_off":
        assert [metrics["staleness/max"] for metrics in history[:-1]] == [0, 1, 1, 1]
    assert history[-1]["validation/episode/turns_mean"] == 3


@pytest.mark.slow
def test_ranks_on_ray_save_the_episodes_of_their_step(
    tiny_folder: Path, tmp_path: Path, ray_cluster: None
) -> None:
    slow = {"name": "digit_games:SavedGame", "options": {"delay": 0.2}}
    config = settings(
        "ray",
        rollout={"agent": {"environment": slow, "save_freq_s": 0.05}},
        trainer={"total_training_steps": 1},
    )
    seen: set[str] = set()
    with trainer(tiny_folder, config) as subject:
        folder, ended = tmp_path / "episodes", threading.Event()

        def watch() -> None:
            while not ended.wait(0.02):
                seen.update(path.name for path in folder.glob("rollout-*"))

        watching = threading.Thread(target=watch)
        watching.start()
        subject.fit(checkpoint_dir=tmp_path)
        ended.set()
        watching.join()
    assert seen == {"rollout-00000-of-00001.safetensors"}
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_episodes_under_way_resume_with_an_async_run(tiny_folder: Path, tmp_path: Path) -> None:
    """Those that are over, and those that aren't, are in the checkpoint and are learned from."""
    slow = {"name": "digit_games:SavedGame", "options": {"delay": 0.3}}
    chosen: list[str] = []

    def config() -> Any:
        made = ahead("async", steps=12, agent={"environment": slow, "concurrency": 8})
        keep = {"save_freq": 1, "max_checkpoints_to_keep": 12}
        return made.model_copy(update={"trainer": made.trainer.model_copy(update=keep)})

    def has_begun(step: int, total: int, metrics: dict[str, float]) -> None:
        found = find_latest(tmp_path)
        begun = [] if found is None else [one for one in found.state["prompts"]["begun"] if one]
        if any(one["sequences"] for tree in begun for one in tree["episodes"]):
            assert found is not None
            chosen.append(found.folder)
            raise KeyboardInterrupt

    with trainer(tiny_folder, config()) as first:
        first.on_step = has_begun
        with pytest.raises(KeyboardInterrupt):
            first.fit(checkpoint_dir=tmp_path)
    batches: list[Batch] = []
    with trainer(tiny_folder, config()) as second:
        second.load_checkpoint(chosen[0])
        saved = {
            prompt.columns["prompt"][0][0]["content"]: partial.episodes
            for prompt in second.source.prompts._resumed
            for partial in take_partial_groups(prompt)[1]
            if partial is not None
        }
        second.on_rollouts = lambda split, step, batch: batches.append(batch)
        second.fit(2)
    gone_on = 0
    for batch in batches:
        for row, prompt in enumerate(batch.columns["prompt"]):
            ids = batch["responses"][row].tolist()
            for tree in saved.get(prompt[0]["content"], ()):
                begun = tree["sequences"][0]["token_ids"].tolist()
                if begun and ids[: len(begun)] == begun:
                    drawn = tree["sequences"][0]["log_probs"]
                    own = batch["rollout_log_probs"][row][: len(begun)]
                    gone_on += torch.equal(own, drawn)
    assert gone_on > 0


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_vllm_plays_ahead_of_the_trainer(wide_folder: Path, ray_cluster: None, mode: str) -> None:
    history, batches = run(wide_folder, ahead(mode, "ray", **VLLM), dtype=FLOAT)
    check_versions(history[:-1], batches[:4])


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_vllm_and_native_play_the_same_greedy_episodes(wide_folder: Path, own: bool) -> None:
    found: dict[str, Batch] = {}
    for engine in ("native", "vllm"):
        rollout: dict[str, Any] = VLLM if engine == "vllm" else {}
        if engine == "vllm" and own:
            rollout = rollout | {"vllm": {"in_process": False}, "tensor_parallel_size": 2}
        with trainer(wide_folder, settings(rollout=rollout), FLOAT) as subject:
            subject.on_rollouts = lambda split, step, batch, e=engine: found.update({e: batch})
            subject.validate(arithmetic_rows(6))
    ours, theirs = found["vllm"], found["native"]
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(ours[name], theirs[name]), name
    assert theirs.columns["episode_turns"].tolist() == [3] * 6
    torch.testing.assert_close(
        ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4, rtol=1e-4
    )


@needs_vllm
@pytest.mark.slow
def test_vllm_samples_what_the_trainer_learns_from(wide_folder: Path) -> None:
    rollout = VLLM | {"agent": {"num_workers": 1}}
    history, batches = run(
        wide_folder, settings(rollout=rollout, actor={"old_log_probs": "trainer"}), dtype=FLOAT
    )
    assert [metrics["staleness/max"] for metrics in history[:2]] == [0, 0]
    for batch in batches[:2]:
        kept = batch["response_mask"].bool()
        torch.testing.assert_close(
            batch["old_log_probs"][kept], batch["rollout_log_probs"][kept], atol=1e-4, rtol=1e-4
        )
