"""Evaluation on ranks: what one process answers, whatever the number of copies and their ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny_engine import arithmetic_rows, write_tiny_folder

from engine.batch import Batch
from engine.config import EvaluateConfig, ParallelConfig
from engine.controller.local_groups import LocalGroup, LocalHost, close_hosts
from engine.controller.worker_host import RoleSpec, WorkerHost
from engine.errors import ConfigError, PlacementError, RolloutError, WorkerError
from engine.evaluation.decode import (
    check_evaluation_layout,
    evaluation_layout,
    gpus_of_copy,
    uses_ranks,
)
from engine.evaluation.scoring import evaluate_model
from engine.models import text_config
from engine.parallel.layout import Layout
from engine.rollout.protocol import SamplingParams
from engine.workers.evaluator import EvaluationWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")
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


def table(folder: Path, **settings: Any) -> pd.DataFrame:
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
    wanted = table(tiny_folder)
    for parallel in ({"dp": 3}, {"tp": 2}):
        pd.testing.assert_frame_equal(table(tiny_folder, parallel=parallel), wanted)


@pytest.mark.slow
def test_a_share_that_fails_or_dies_ends_the_evaluation_with_its_cause(
    tiny_folder: Path, ray_cluster: None
) -> None:
    with pytest.raises(RolloutError, match="the second share can't be decoded") as raised:
        table(tiny_folder, parallel={"dp": 2}, engine="failing_engines:Refusing")
    assert "evaluation rank 1: answer" in "".join(raised.value.__notes__)
    with pytest.raises(WorkerError, match=r"evaluation rank 1: answer.*died"):
        table(tiny_folder, parallel={"dp": 2}, engine="failing_engines:Dying")


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
