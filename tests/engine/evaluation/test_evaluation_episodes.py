"""Evaluation on environments: episodes are played, judged as in RL, and compared in pairs."""

from __future__ import annotations

import importlib.util
import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder

from engine.agents.agent_loop import EpisodePlayer
from engine.agents.episode import EpisodeSummary, after_prompt, summarize
from engine.cli.rl_run import prompt_room
from engine.config import DataConfig, EvaluateConfig, PipelineConfig, RewardConfig, RLConfig
from engine.controller.local_groups import LocalGroup, LocalHost, close_hosts
from engine.controller.worker_host import RoleSpec, WorkerHost
from engine.data.collate import collate_prompts
from engine.data.contract import EVALUATION_ROWS, check
from engine.data.rows import EPISODE_COLUMNS
from engine.errors import ConfigError
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.decode import check_evaluation_layout
from engine.evaluation.scoring import evaluate_model, judge_episodes
from engine.evaluation.summary import EvaluationComparison, Statistics, compare_episodes, summarise
from engine.rewards import Scorer
from engine.rollout.protocol import SamplingParams
from engine.workers.evaluator import EpisodeEvaluationWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")
ENVIRONMENT = RewardConfig.model_validate("environment")
STATISTICS = Statistics(2, 0.95, 200, 0)


def settings(environment: str = "digit_games:DigitGame", **changes: Any) -> EvaluateConfig:
    values: dict[str, Any] = {
        "k": 2,
        "samples": 2,
        "bootstrap_samples": 100,
        "reward": "environment",
        "multi_turn": {"enable": True, "max_turn_length": 5},
        "agent": {"environment": environment, "num_workers": 0},
    }
    return EvaluateConfig.model_validate(values | changes)


def table(folder: Path, config: EvaluateConfig, name: str = "warm_start", **more: Any) -> Any:
    frame = pd.DataFrame(arithmetic_rows(5))
    return evaluate_model(folder, frame, name, config, max_response_length=30, seed=0, **more)  # type: ignore[arg-type]


def test_each_problem_is_an_episode_and_the_same_again(tiny_folder: Path) -> None:
    rows = table(tiny_folder, settings())
    check(rows, EVALUATION_ROWS, "rows")
    assert set(EPISODE_COLUMNS) < set(rows)
    assert list(rows["greedy_turns"]) == [3] * 5
    assert list(rows["sample_turns"]) == [3.0] * 5
    assert set(rows["greedy_end"]) == {"done"}
    for row in rows.to_dict("records"):
        lines = row["greedy_completion"].split("\nuser> ")
        assert lines[0].startswith("assistant> ")
        assert [line.split("\nassistant> ")[0] for line in lines[1:]] == ["1", "2"]
        assert row["greedy_score"] == pytest.approx(row["greedy_return"])
        assert 0 < row["greedy_length"] <= 15
    assert rows["sample_return"].nunique() > 1
    pd.testing.assert_frame_equal(rows, table(tiny_folder, settings()))


@pytest.mark.parametrize(("copies", "rows"), [(3, 7), (4, 2)])
def test_copies_of_the_model_share_the_episodes(tiny_folder: Path, copies: int, rows: int) -> None:
    config = settings()
    options = {
        "model_path": str(tiny_folder),
        "engine": "native",
        "max_model_len": 60,
        "seed": 5,
        "multi_turn": config.multi_turn,
        "agent": config.agent,
    }
    asked = collate_prompts(arithmetic_rows(rows), [[3, 4, 5 + row] for row in range(rows)])
    params = SamplingParams(n=2, max_new_tokens=30, seed=5)
    with closing(EpisodeEvaluationWorker(WorkerContext("evaluation"), **options)) as worker:  # type: ignore[arg-type]
        alone = worker.answer(asked, params).columns["episodes"]
    spec = RoleSpec("evaluation", EpisodeEvaluationWorker, options)
    with ExitStack() as stack:
        hosts = [LocalHost(WorkerHost([spec], rank, copies, threads=1)) for rank in range(copies)]
        for host in hosts:
            stack.callback(close_hosts, [host])
            host.host.build()
        shared = LocalGroup(spec, hosts).answer(asked, params).result().columns["episodes"]
    assert list(shared) == list(alone)
    assert len({one.text for one in alone}) > rows


def test_a_failed_environment_is_a_wrong_answer_that_is_counted(tiny_folder: Path) -> None:
    rows = table(tiny_folder, settings("digit_games:FaultyGame"))
    assert not rows["greedy_correct"].any()
    assert list(rows["errors"]) == [3] * 5
    assert set(rows["greedy_end"]) == {"failed"}


def test_an_environment_s_own_prompt_takes_nothing_from_the_response(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EpisodePlayer, "_warned", False)
    own = settings("digit_games:LongGame")
    assert set(table(tiny_folder, own)["greedy_end"]) == {"tokens"}
    [told] = [one.getMessage() for one in caplog.records if "episode begins" in one.getMessage()]
    assert "of 30 for its response; set data.max_prompt_length" in told
    caplog.clear()
    assert set(table(tiny_folder, own, max_prompt_length=34)["greedy_end"]) == {"done"}
    assert caplog.records == []
    rl = RLConfig.model_validate({"rollout": {"multi_turn": {"enable": True}}})
    assert (prompt_room(rl, 9, 34), prompt_room(rl, 9, 0), prompt_room(RLConfig(), 9, 34)) == (
        34,
        9,
        9,
    )


def episode(**changes: Any) -> EpisodeSummary:
    values: dict[str, Any] = {
        "text": "assistant> 5",
        "answer": "5",
        "turns": 1,
        "calls": 0,
        "malformed": 0,
        "reward": 0.6,
        "success": None,
        "end": "done",
        "tokens": 2,
        "truncated": False,
        "failed": False,
    }
    return EpisodeSummary(**values | changes)


def test_success_is_what_the_environment_says_else_a_return_of_one() -> None:
    episodes = [
        episode(success=True),
        episode(success=False, reward=2.0),
        episode(reward=1.0),
        episode(reward=0.9),
        episode(success=True, failed=True),
    ]
    with closing(Scorer(ENVIRONMENT)) as scorer:
        judged = judge_episodes(scorer, episodes, ["?"] * 5, {"data_source": ["d"] * 5})
    assert [one.correct for one in judged] == [True, False, True, False, False]
    assert [one.score for one in judged] == [0.6, 2.0, 1.0, 0.9, 0.6]
    assert [one.failed for one in judged] == [False] * 4 + [True]
    truths = {"data_source": ["d"], "ground_truth": ["5"]}
    with closing(Scorer(RewardConfig.model_validate("exact_match"))) as scorer:
        (other,) = judge_episodes(scorer, [episode(success=False)], ["?"], truths)
    assert (other.correct, other.score) == (True, pytest.approx(1.6))


def test_what_is_compared(tiny_folder: Path) -> None:
    before = table(tiny_folder, settings())
    after = before.assign(
        model="rl", greedy_turns=2, greedy_calls=[1, 1, 1, 1, 0], greedy_malformed=0
    )
    found = {one.name: one for one in compare_episodes(before, after, STATISTICS)}
    assert found["turns, greedy"].before.mean == 3
    assert (found["turns, greedy"].change.mean, found["turns, greedy"].change.high) == (-1, -1)
    assert found["called a tool, greedy"].after.mean == 0.8
    assert "+80.0" in found["called a tool, greedy"].line()
    assert "3.00 → 2.00 (-1.00 [-1.00, -1.00])" in found["turns, greedy"].line()
    without = compare_episodes(before, before.assign(model="rl"), STATISTICS)
    assert [one.name for one in without] == [
        f"{what}, {how}" for how in ("greedy", "sampled") for what in ("turns", "return")
    ]
    comparison = summarise(before, after, STATISTICS)
    assert EvaluationComparison.from_dict(json.loads(comparison.to_json())) == comparison
    plain = before.drop(columns=list(EPISODE_COLUMNS))
    assert compare_episodes(plain, plain, STATISTICS) == []


def test_calls_are_counted_and_the_prompt_is_left_out() -> None:
    from engine.agents.call_parsers import resolve_call_parser
    from engine.agents.episode import Episode, EpisodeLimits, Transcript

    tokenizer: Any = None
    one = Episode(0, 0, 0, tokenizer, EpisodeLimits(9, 9), [1])
    one.transcript, one.end, one.info = Transcript([1]), "done", {"correct": True}
    one.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "of before"}]
    for text in ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>{", "5"):
        one.messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "x"}]
        one.transcript.add_turn([7], [-0.1], [0])
    one.messages.pop()
    found = summarize(one, resolve_call_parser("hermes"))
    assert (found.calls, found.malformed, found.turns, found.answer) == (1, 1, 3, "5")
    assert found.success is True
    assert found.text.startswith("assistant> <tool_call>")
    assert summarize(one, None).calls == 0
    assert after_prompt(one.messages, 0) == ()


def test_evaluation_plays_what_rl_plays() -> None:
    rollout = {"multi_turn": {"enable": True}, "agent": {"environment": "guessing"}}
    config = PipelineConfig.model_validate({"rl": {"rollout": rollout}})
    found = config.evaluation()
    assert found.runs_episodes
    assert found.environments.environment.name == "guessing"
    assert not PipelineConfig().evaluation().runs_episodes
    own = {"agent": {"environment": "arithmetic"}}
    both = PipelineConfig.model_validate({"rl": {"rollout": rollout}, "evaluate": own})
    assert both.evaluation().environments.environment.name == "arithmetic"


def test_what_changes_no_episode_leaves_evaluations_comparable() -> None:
    def comparable(prompt: int = 0, **agent: Any) -> Any:
        agent = {"environment": "guessing", **agent}
        data = DataConfig(max_prompt_length=prompt)
        return comparable_settings(data, settings(agent=agent), 0)

    assert comparable() == comparable(num_workers=3, concurrency=7)
    assert comparable() != comparable(environment="arithmetic")
    assert comparable() != comparable(prompt=50)
    of_one_turn = [
        comparable_settings(DataConfig(max_prompt_length=n), EvaluateConfig(), 0) for n in (0, 50)
    ]
    assert of_one_turn[0] == of_one_turn[1]


def test_what_does_not_play_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.parallel\.tp=2 with evaluate\.multi_turn"):
        check_evaluation_layout(settings(parallel={"tp": 2}))
    with pytest.raises(ConfigError, match=r"evaluate\.engine=failing_engines:Refusing with"):
        check_evaluation_layout(settings(engine="failing_engines:Refusing"))
    check_evaluation_layout(settings(engine="vllm"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_plays_the_episodes_that_the_native_engine_does(tmp_path: Path) -> None:
    wide = TINY_MODEL.model_copy(update={"hidden_size": 128})  # vLLM's heads on CPU: 32 and more
    folder = write_tiny_folder(tmp_path / "model", wide)
    ours, theirs = (table(folder, settings(engine=engine)) for engine in ("vllm", "native"))
    greedy = [name for name in ours if name.startswith("greedy_")]
    pd.testing.assert_frame_equal(ours[greedy], theirs[greedy])
    assert list(ours["sample_turns"]) == [3.0] * 5
    assert ours["sample_return"].nunique() > 1
