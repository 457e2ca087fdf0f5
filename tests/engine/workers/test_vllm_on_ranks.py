"""Rollout by vLLM on the policy's ranks, asleep between rollouts or not: it samples what one
rank's engine samples. Gloo ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from test_rollout_on_ranks import course, rows, same
from tiny_engine import TINY_MODEL, write_tiny_folder

from engine.parallel.layout import Layout
from engine.runtime.rollout_weights import AdapterWeights, SharedWeights, VllmWeights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
OPTIONS: dict[str, Any] = {"engine": "vllm", "max_num_seqs": 16, "kv_cache_memory_mb": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vLLM on CPU has attention for heads of 32 and more."""
    folder: Path = tmp_path_factory.mktemp("vllm") / "model"
    return str(write_tiny_folder(folder, TINY_MODEL.model_copy(update={"hidden_size": 128})))


def run(folder: str, parallel: dict[str, int], tp: int, rank: int = 0, **vllm: Any) -> Any:
    options = OPTIONS | {"vllm": vllm}
    world = Layout(**parallel).world_size
    return run_ranks(world, course, folder, parallel, tp, rank, options, timeout_s=240.0)


@pytest.fixture(scope="module")
def alone(folder: str) -> list[Any]:
    return rows(run(folder, {}, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "tp", "kind", "settings"),
    [
        ({}, 1, SharedWeights, {"sleep": 2}),
        ({"dp": 2}, 1, SharedWeights, {"sleep": 1}),
        ({"fsdp": 2}, 2, VllmWeights, {"sleep": 2}),
        ({"tp": 2}, 1, VllmWeights, {}),
        ({"pp": 2}, 1, VllmWeights, {}),
    ],
)
def test_ranks_sample_what_one_rank_samples(
    folder: str,
    alone: list[Any],
    parallel: dict[str, int],
    tp: int,
    kind: type,
    settings: dict[str, Any],
) -> None:
    results = run(folder, parallel, tp, **settings)
    assert {result["kind"] for result in results} == {kind}
    same(rows(results), alone)


@pytest.mark.slow
def test_adapters_of_a_policy_are_merged_wherever_it_is(folder: str) -> None:
    one = run(folder, {}, 1, 4)
    two = run(folder, {"fsdp": 2}, 2, 4)
    assert {result["kind"] for result in two} == {AdapterWeights}
    same(rows(two), rows(one))
    own = run(folder, {}, 1, 4, lora="adapter")
    same(rows(own), rows(one))
