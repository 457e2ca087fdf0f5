"""Other starts and engines: saved models, real GSM8K rows, PPO, vLLM."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from flyte_runs import (
    NO_WARM_START,
    ONE_STEP,
    REPOSITORY,
    STAGES,
    WORKFLOW,
    Asked,
    Outcome,
    Place,
    settings,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.data.tokenizer import load_tokenizer
from engine.storage.artifacts import read_manifest
from engine.storage.digests import tree_digest

REAL_GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k"


def assert_complete(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)


def test_without_a_warm_start_rl_begins_with_the_model_as_it_is(asked: Asked) -> None:
    folder, outcome = asked.start, asked.outcome
    assert outcome.code == 0, outcome.text
    assert outcome.stages[:5] == ["dataset", "start_model", "reward_audit", "rl", "evaluation"]
    start, trained = (Path(outcome.summary["artifacts"][stage]) for stage in ("sft", "rl"))
    assert read_manifest(start).digest == tree_digest(folder)
    dtypes = [json.loads((f / "config.json").read_text())["dtype"] for f in (start, trained)]
    assert dtypes == ["float32", "bfloat16"], "as it is; in RL as model.dtype says"
    assert outcome.summary["start_model"] == str(folder)
    assert "pass@1 start model" in outcome.out
    assert "warm start" not in outcome.out.replace("no warm start", "")
    assert f"the start model {folder} solves almost none" in outcome.out
    assert "from scratch" not in outcome.out
    page = Path(outcome.summary["report"]).read_text()
    assert "the start model</h1>" in page
    assert "warm start" not in page


def test_a_dry_run_warns_of_high_rates_and_few_rows_and_refuses_long_prompts(
    place: Place, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("qwen2")
    sizes = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 1 << 19}
    (folder / "config.json").write_text(json.dumps(sizes))  # a dry run doesn't load weights
    config = settings(ONE_STEP, {"data": {"test_size": 8}, "sft": {"optim": {"lr": 1e-5}}})
    command = ("run", str(WORKFLOW), "rlhf", "--model", str(folder), "--config", config)
    outcome = place.pyflyte(*command, variables={"HYBRIDFLYTE_DRY_RUN": "1"})
    assert outcome.code == 0, outcome.text
    assert "plan: rl.actor.optim.lr=0.0005 suits small models from scratch" in outcome.out
    assert "plan: sft.optim.lr" not in outcome.out
    assert "plan: data.test_size=8 is less than promote.minimum_problems=" in outcome.out
    assert re.search(r"^rows      .*, test 8; longest prompt \d+ tokens$", outcome.out, re.M)
    config = settings(ONE_STEP, {"data": {"max_response_length": 510}})
    outcome = place.pyflyte(*command[:-1], config, variables={"HYBRIDFLYTE_DRY_RUN": "1"})
    assert outcome.code == 1
    assert "the longest prompt has " in outcome.err


@pytest.mark.slow
def test_without_a_warm_start_variables_of_the_chat_template_are_the_models(
    place: Place, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("llama")
    change = {"data": {"apply_chat_template_kwargs": {"loud": True}}}
    config = settings(ONE_STEP, NO_WARM_START, change)
    outcome = place.run("--model", str(folder), "--config", config)
    assert outcome.code == 0, outcome.text
    start, trained = (Path(outcome.summary["artifacts"][stage]) for stage in ("sft", "rl"))
    assert "set loud" in str(load_tokenizer(start).chat_template)
    assert "set loud" in str(load_tokenizer(trained).chat_template)
    assert (start / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.slow
def test_a_saved_model_is_the_start(
    place: Place, model_folder: Callable[..., Path], kind: str
) -> None:
    folder = model_folder(kind)
    outcome = place.run("--model", str(folder), "--config", settings(ONE_STEP))
    assert_complete(outcome)
    trained = Path(outcome.summary["artifacts"]["rl"])
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.config.model_type == kind
    start: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == start.num_parameters()
    assert not model.lm_head.weight.equal(start.lm_head.weight)
    # Other weights in the same folder are another input.
    before = tree_digest(folder)
    with_noise(start).save_pretrained(folder)
    assert tree_digest(folder) != before
    again = place.run("--model", str(folder), "--config", settings(ONE_STEP))
    assert "sft" in again.stages


@pytest.mark.parametrize("start", ["a model", "scratch"])
@pytest.mark.slow
def test_a_warm_start_on_ranks(place: Place, model_folder: Callable[..., Path], start: str) -> None:
    config = settings(ONE_STEP, {"sft": {"parallel": {"fsdp": 2}, "threads": 2}})
    model = ("--model", str(model_folder("llama"))) if start == "a model" else ()
    command = ("run", str(WORKFLOW), "rlhf", "--config", config)
    outcome = place.pyflyte(*command, *model)
    assert_complete(outcome)
    trained = Path(outcome.summary["artifacts"]["sft"])
    assert AutoModelForCausalLM.from_pretrained(trained).config.model_type in ("llama", "qwen2")
    assert load_tokenizer(trained).eos_token_id is not None
    assert not [one for one in trained.iterdir() if one.is_dir()], "what ranks began with is gone"
    assert read_manifest(trained).config["sft"]["parallel"]["fsdp"] == 2


def with_noise(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    return model


def rows(count: int, thing: str) -> str:
    """Rows in the real files' format."""
    lines = (
        {
            "question": f"Ann has {n} {thing} and buys {n + 3} more. How many does she have now?",
            "answer": f"Ann has {n} + {n + 3} = <<{n}+{n + 3}={2 * n + 3}>>{2 * n + 3} {thing}.\n"
            f"#### {2 * n + 3}",
        }
        for n in range(1, count + 1)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


SMALL_DATA = {
    "data": {"sft_size": 64, "train_size": 32, "validation_size": 8, "test_size": 16},
}


@pytest.mark.slow
def test_gsm8k_from_a_folder(place: Place) -> None:
    folder = place.root / "gsm8k"
    folder.mkdir()
    (folder / "train.jsonl").write_text(rows(120, "apples"))
    (folder / "test.jsonl").write_text(rows(30, "pears"))
    config = settings(SMALL_DATA, ONE_STEP)
    outcome = place.run("--source", "gsm8k", "--path", str(folder), "--config", config)
    assert_complete(outcome)
    test = pd.read_parquet(Path(outcome.summary["artifacts"]["dataset"]) / "test.parquet")
    assert len(test) == 16
    assert all("pears" in prompt[0]["content"] for prompt in test["prompt"])
    # A row more is another content, so the stages that read it run again.
    with (folder / "train.jsonl").open("a") as file:
        file.write(rows(1, "plums"))
    again = place.run("--source", "gsm8k", "--path", str(folder), "--config", config)
    assert again.stages[0] == "dataset"


@pytest.mark.skipif(not REAL_GSM8K.is_dir(), reason=f"the real GSM8K files are not at {REAL_GSM8K}")
@pytest.mark.slow
def test_the_real_gsm8k_and_its_plain_verdict(place: Place) -> None:
    config = settings(SMALL_DATA, ONE_STEP, {"data": {"max_response_length": 96}})
    outcome = place.run("--source", "gsm8k", "--path", str(REAL_GSM8K), "--config", config)
    assert_complete(outcome)
    assert outcome.summary["pass_at_1"]["rl"] < 0.2
    assert "Both models are near 0" in outcome.out
    assert "--model FOLDER" in outcome.out


@pytest.mark.slow
def test_ppo_with_a_critic(place: Place) -> None:
    change = {"rl": {"algorithm": {"adv_estimator": "gae"}, "rollout": {"n": 1}}}
    outcome = place.run("--config", settings(change))
    assert_complete(outcome)
    metrics = pd.read_parquet(Path(outcome.summary["artifacts"]["rl"]) / "metrics.parquet")
    critic = [name for name in metrics.columns if name.startswith("critic/")]
    assert critic
    assert metrics[critic].notna().all(axis=None)
    assert metrics["step"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_rollout_by_vllm(place: Place) -> None:
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("vLLM on a CPU compiles kernels, and there is no C compiler")
    pytest.importorskip("vllm")
    change = {
        "model": {"hidden_size": 64},  # vLLM's smallest head on a CPU is 32 wide
        "rl": {"rollout": {"engine": "vllm", "n": 2}, "trainer": {"placement": "ray"}},
    }
    command = ["run", str(WORKFLOW), "rlhf", "--config", settings(ONE_STEP, change)]
    outcome = place.pyflyte(*command, timeout=900)
    progress = ("sft: ", "evaluate: ")  # how many lines of it depends on the machine
    assert [line for line in outcome.err.splitlines() if not line.startswith(progress)] == []
    assert_complete(outcome)
    assert "rollout by vllm" in outcome.out
