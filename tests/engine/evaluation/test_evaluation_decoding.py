"""Decoding for an evaluation: episodes, ranks."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder

from engine.agents.agent_loop import _warn_of_long_prompts
from engine.agents.episode import EpisodeSummary, after_prompt, summarize
from engine.batch import Batch
from engine.cli.rl_run import prompt_room
from engine.config import (
    DataConfig,
    EvaluateConfig,
    ParallelConfig,
    PipelineConfig,
    RewardConfig,
    RLConfig,
)
from engine.controller.local_groups import LocalGroup, LocalHost, close_hosts
from engine.controller.worker_host import RoleSpec, WorkerHost
from engine.data.collate import collate_prompts
from engine.data.contract import EVALUATION_ROWS, check
from engine.data.rows import EPISODE_COLUMNS
from engine.errors import ConfigError, PlacementError, RolloutError, WorkerError
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.decode import (
    check_evaluation_layout,
    evaluation_layout,
    gpus_of_copy,
    uses_ranks,
)
from engine.evaluation.scoring import evaluate_model, judge_episodes
from engine.evaluation.summary import (
    EvaluatedSet,
    Statistics,
    compare_episodes,
    read_sets,
    summarise,
    write_sets,
)
from engine.models import text_config
from engine.parallel.layout import Layout
from engine.rewards import Scorer
from engine.rollout.protocol import SamplingParams
from engine.workers.evaluator import EpisodeEvaluationWorker, EvaluationWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")


ENVIRONMENT = RewardConfig.model_validate("environment")


STATISTICS = Statistics(2, 0.95, 0)


def settings(environment: str = "digit_games:DigitGame", **changes: Any) -> EvaluateConfig:
    values: dict[str, Any] = {
        "k": 2,
        "samples": 2,
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
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_long_prompts.cache_clear()
    own = settings("digit_games:LongGame")
    assert set(table(tiny_folder, own)["greedy_end"]) == {"tokens"}
    [told] = [
        one.getMessage() for one in caplog.records if "an episode's prompt" in one.getMessage()
    ]
    assert "max_response_length=30 tokens for its response; set data.max_prompt_length" in told
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


def test_what_is_compared(tiny_folder: Path, tmp_path: Path) -> None:
    before = table(tiny_folder, settings())
    after = before.assign(
        model="rl", greedy_turns=2, greedy_calls=[1, 1, 1, 1, 0], greedy_malformed=0
    )
    found = {one.name: one for one in compare_episodes(before, after, STATISTICS)}
    assert found["turns, greedy"].before.mean == 3
    assert found["turns, greedy"].change.mean == -1
    assert -1 < found["turns, greedy"].change.high < 0, "five equal differences prove no width of 0"
    assert found["called a tool, greedy"].after.mean == 0.8
    assert "+80.0" in found["called a tool, greedy"].line()
    assert "3.00 → 2.00 (-1.00 [-1." in found["turns, greedy"].line()
    without = compare_episodes(before, before.assign(model="rl"), STATISTICS)
    assert [one.name for one in without] == [
        f"{what}, {how}" for how in ("greedy", "sampled") for what in ("turns", "return")
    ]
    comparison = summarise(before, after, STATISTICS)
    write_sets(tmp_path, [EvaluatedSet("test", comparison, [], known=0)])
    assert read_sets(tmp_path)[0].comparison == comparison
    plain = before.drop(columns=list(EPISODE_COLUMNS))
    assert compare_episodes(plain, plain, STATISTICS) == []


def test_calls_are_counted_and_the_prompt_is_left_out() -> None:
    from engine.agents.call_parsers import parsed_action, resolve_call_parser
    from engine.agents.episode import Episode, EpisodeLimits, Transcript

    tokenizer: Any = None
    one = Episode(0, 0, 0, tokenizer, EpisodeLimits(9, 9), [1])
    one.transcript, one.end, one.info = Transcript([1]), "done", {"correct": True}
    one.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "of before"}]
    for text in ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>{", "5"):
        one.messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "x"}]
        one.transcript.add_turn([7], [-0.1], [0])
        one.actions.append(parsed_action(resolve_call_parser("hermes"), text, (7,)))
    one.messages.pop()
    found = summarize(one)
    assert (found.calls, found.malformed, found.turns, found.answer) == (1, 1, 3, "5")
    assert found.success is True
    assert found.text.startswith("assistant> <tool_call>")
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


GREEDY, SAMPLED = (
    SamplingParams(max_new_tokens=12, temperature=0.0),
    SamplingParams(n=3, max_new_tokens=12, seed=5),
)


def options(folder: str, **more: Any) -> dict[str, Any]:
    return {"model_path": folder, "engine": "native", "max_model_len": 48, "seed": 5} | more


def prompts(count: int) -> Batch:
    rows = [[3 + (7 * i + j) % 60 for j in range(2 + i % 5)] for i in range(count)]
    return Batch({"group_ids": torch.arange(count)}, {"prompt_ids": rows})


def tokens(batch: Batch) -> list[tuple[list[int], bool]]:
    flags = batch["truncated"].tolist()
    return list(zip(map(list, batch.columns["token_ids"]), flags, strict=True))


def alone(folder: str, asked: Batch) -> list[list[tuple[list[int], bool]]]:
    worker = EvaluationWorker(WorkerContext("evaluation"), **options(folder))
    return [tokens(worker.answer(asked, params)) for params in (GREEDY, SAMPLED)]


@pytest.mark.parametrize(("copies", "rows"), [(3, 7), (3, 9), (4, 2)])
def test_shares_of_the_prompts_are_answered_as_by_one_process(
    tiny_folder: Path, copies: int, rows: int
) -> None:
    asked = prompts(rows)
    spec = RoleSpec("evaluation", EvaluationWorker, options(str(tiny_folder)))
    with ExitStack() as closing:
        hosts = [LocalHost(WorkerHost([spec], rank, copies, threads=1)) for rank in range(copies)]
        for host in hosts:
            closing.callback(close_hosts, [host])
            host.host.build()
        group = LocalGroup(spec, hosts)
        found = [tokens(group.answer(asked, params).result()) for params in (GREEDY, SAMPLED)]
    wanted = alone(str(tiny_folder), asked)
    assert found == wanted
    assert [len(one) for one in found] == [rows, 3 * rows]
    assert len({tuple(ids) for ids, _ in wanted[1][:3]}) > 1, "samples of a prompt differ"


def sharded(folder: str, rows: int) -> list[list[tuple[list[int], bool]]]:
    context = WorkerContext(
        "evaluation", dist.get_rank(), dist.get_world_size(), layout=Layout(tp=2)
    )
    worker = EvaluationWorker(context, **options(folder, tp=2))
    return [tokens(worker.answer(prompts(rows), params)) for params in (GREEDY, SAMPLED)]


def test_two_ranks_share_a_copy(tmp_path: Path) -> None:
    folder = str(write_tiny_folder(tmp_path / "model"))
    first, second = run_ranks(2, sharded, folder, 5)
    assert first == second == alone(folder, prompts(5))


def table_by_ranks(folder: Path, **settings: Any) -> pd.DataFrame:
    config = EvaluateConfig.model_validate({"k": 2, "samples": 3, **settings})
    done: list[int] = []
    rows = evaluate_model(
        folder,
        pd.DataFrame(arithmetic_rows(7)),
        "rl",
        config,
        max_response_length=8,
        seed=0,
        on_progress=done.append,
    )
    assert done == sorted(done)
    assert done[-1] == 7 * (1 + 3)
    return rows


@pytest.mark.slow
def test_ranks_of_ray_make_the_same_table(tiny_folder: Path, ray_cluster: None) -> None:
    wanted = table_by_ranks(tiny_folder)
    for parallel in ({"dp": 3}, {"tp": 2}):
        pd.testing.assert_frame_equal(table_by_ranks(tiny_folder, parallel=parallel), wanted)


@pytest.mark.slow
def test_a_share_that_fails_or_dies_ends_the_evaluation_with_its_cause(
    tiny_folder: Path, ray_cluster: None
) -> None:
    with pytest.raises(RolloutError, match="the second share can't be decoded") as raised:
        table_by_ranks(tiny_folder, parallel={"dp": 2}, engine="failing_engines:Refusing")
    assert "evaluation rank 1: answer" in "".join(raised.value.__notes__)
    with pytest.raises(WorkerError, match=r"evaluation rank 1: answer.*died"):
        table_by_ranks(tiny_folder, parallel={"dp": 2}, engine="failing_engines:Dying")


def shape(tmp_path: Path, **sizes: int) -> Any:
    from transformers import Qwen2Config

    Qwen2Config(**sizes).save_pretrained(tmp_path)
    return text_config(tmp_path)


def test_a_copy_takes_as_many_gpus_as_its_weights_need(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2}
    model = shape(tmp_path, hidden_size=384, intermediate_size=1024, vocab_size=4096, **heads)
    config, mib = EvaluateConfig(), 1 << 20
    weights = 2 * (2 * 4096 * 384 + 2 * (2 * 384 * 384 + 2 * 384 * 128 + 3 * 384 * 1024))
    assert gpus_of_copy(config, model, 4 * weights, 8) == 1
    assert gpus_of_copy(config, model, int(1.5 * weights), 8) == 2
    assert gpus_of_copy(config, model, int(0.6 * weights), 8) == 4
    assert gpus_of_copy(config, model, int(0.3 * weights), 8) == 4, (
        "its twelve heads are not split by 8"
    )
    with pytest.raises(PlacementError, match=r"evaluate can't fit: .* 4 of a machine's 8 GPUs"):
        gpus_of_copy(config, model, int(0.2 * weights), 8)
    assert weights < 16 * mib


def test_all_gpus_of_the_machine_are_taken(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EvaluateConfig()
    assert not uses_ranks(config)
    assert evaluation_layout(config, tiny_folder) == Layout()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    sizes = type("Properties", (), {"total_memory": 80 << 30})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: sizes)
    assert uses_ranks(config)
    assert evaluation_layout(config, tiny_folder) == Layout(dp=8)
    sizes.total_memory = 80 << 10
    assert evaluation_layout(config, tiny_folder) == Layout(dp=4, tp=2)
    one = EvaluateConfig(parallel=ParallelConfig())
    assert evaluation_layout(one, tiny_folder) == Layout()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallel": {"fsdp": 2}}, r"evaluate.parallel.fsdp=2 has no effect on decoding; set dp"),
        ({"parallel": {"tp": 2}, "engine": "server"}, r"tp=2 with evaluate.engine=server"),
        ({"parallel": {"tp": 3}}, r"tp=3 does not divide the model's num_attention_heads=4"),
    ],
)
def test_layouts_that_can_t_be(tiny_folder: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_evaluation_layout(EvaluateConfig.model_validate(settings), text_config(tiny_folder))


def test_a_model_of_another_family_is_not_split(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig

    GPTNeoXConfig().save_pretrained(tmp_path)
    config, model = EvaluateConfig(), text_config(tmp_path)
    said = r"evaluate.parallel.tp=2 with a model of type 'gpt_neox': .* dp for copies"
    with pytest.raises(ConfigError, match=said):
        check_evaluation_layout(EvaluateConfig(parallel=ParallelConfig(tp=2)), model)
    with pytest.raises(PlacementError, match=r"a copy can be on 1 of a machine's 8 GPUs of 8"):
        gpus_of_copy(config, model, 8 << 30, 8)
