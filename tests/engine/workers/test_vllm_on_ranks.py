"""Rollout by vLLM on the policy's ranks, asleep between rollouts or not: it samples what one
rank's engine samples. Gloo ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import RankError, run_ranks
from test_rollout_on_ranks import PROMPTS, course, rows, same
from tiny_engine import TINY_MODEL, write_tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM

from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, save_model
from engine.parallel.layout import Layout
from engine.runtime.rollout_weights import (
    AdapterWeights,
    SharedWeights,
    StreamedWeights,
    VllmWeights,
)

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


SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
EXPERTS = {"num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
}


def other_folder(family: str, folder: str, to: Path) -> str:
    """A random model of `family` with the tokenizer of `folder`."""
    tokenizer = load_tokenizer(folder)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    values = SHAPE | OTHERS[family] | ids | {"bos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    return str(save_model(model, tokenizer, to))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel", "tp"),
    [
        ("phi3", {"tp": 2}, 2),
        ("mixtral", {"fsdp": 2}, 1),
        ("qwen3_moe", {"fsdp": 2}, 2),
    ],
)
def test_families_with_a_layout_of_their_own_in_vllm_are_loaded_tensor_by_tensor(
    folder: str, tmp_path: Path, family: str, parallel: dict[str, int], tp: int
) -> None:
    other = other_folder(family, folder, tmp_path / family)
    found = run(other, parallel, tp)
    assert {result["kind"] for result in found} == {StreamedWeights}
    wanted = rows(run(other, {}, 1))
    same(rows(found), wanted, 5e-3)  # Adam's first step makes much of experts' rounding
    half = len(wanted) // 2
    for (_, ours), (tokens, theirs) in zip(rows(found)[:half], wanted, strict=False):
        assert ours[: len(tokens)] == pytest.approx(theirs[: len(tokens)], abs=1e-4)


@pytest.mark.slow
def test_what_vllm_computes_by_transformers_classes_is_refused_in_process(
    folder: str, tmp_path: Path
) -> None:
    other = other_folder("gpt_neox", folder, tmp_path / "gpt_neox")
    with pytest.raises(RankError, match=r"no model of its own for GPTNeoXForCausalLM.*in_process="):
        run(other, {}, 1)
    found = rows(run(other, {}, 1, in_process=False))
    model = load_model(other)
    for row, (tokens, log_probs) in enumerate(found[: len(found) // 2]):
        ids = [*PROMPTS[row // 2], *tokens]
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [logs[len(ids) - len(tokens) - 1 + i, t].item() for i, t in enumerate(tokens)]
        assert log_probs[: len(tokens)] == pytest.approx(wanted, abs=1e-4)
