"""The lm-evaluation-harness: what is asked of it, what is taken over, and the real one offline."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest

from engine.config import LMEvalConfig
from engine.errors import ConfigError, DataError, LineageError
from engine.evaluation.lm_eval import (
    HarnessScore,
    from_json,
    pairs,
    read_results,
    require_lm_eval,
    run_lm_eval,
    to_json,
)
from engine.evaluation.metrics import wilson_interval

PYTHON = os.environ.get("HYBRIDFLYTE_LM_EVAL_PYTHON", "")  # one that has lm_eval
RESULTS = {
    "results": {
        "sums": {
            "alias": "sums", "acc,none": 0.75, "acc_stderr,none": 0.1,
            "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A",
        },
        "words": {"word_perplexity,none": 31.5, "word_perplexity_stderr,none": float("nan")},
    },
    "versions": {"sums": 1.0, "words": 2},
    "n-samples": {"sums": {"original": 40, "effective": 20}},
}  # fmt: skip
ACC = HarnessScore("sums", "acc", 0.75, 0.1, "1.0", 20)


def test_the_harnesss_figures_are_taken_over_with_their_errors() -> None:
    assert read_results(RESULTS) == [
        ACC,
        HarnessScore("sums", "exact_match (strict-match)", 0.5, None, "1.0", 20),
        HarnessScore("words", "word_perplexity", 31.5, None, "2", None),
    ]
    interval = ACC.interval(0.95)
    assert interval is not None
    assert interval == wilson_interval(15, 20, 0.95)
    all_right = HarnessScore("t", "acc", 1.0, 0.0, "", 5).interval(0.95)
    assert all_right is not None
    assert all_right.low == pytest.approx(0.566, abs=1e-3), "though its standard error is 0"
    perplexity = HarnessScore("t", "word_perplexity", 31.5, 2.0, "", 20).interval(0.95)
    assert perplexity is not None
    assert (perplexity.low, perplexity.high) == pytest.approx((27.58, 35.42), abs=1e-2)
    f1 = HarnessScore("t", "f1", 0.51, 0.1, "", 20).interval(0.95)
    assert f1 is not None
    assert f1.low == pytest.approx(0.51 - 1.96 * 0.1, abs=1e-4), "no count of 20 is 0.51 of them"
    assert HarnessScore("t", "m", 1.0, None, "", None).interval(0.95) is None


def test_scores_survive_their_file_and_are_paired_by_metric() -> None:
    other = HarnessScore("sums", "f1", 0.5, None, "1.0", 20)
    scores = {"warm_start": [ACC], "rl": [ACC, other]}
    text = to_json(scores, 0.95)
    assert from_json(text, "there") == scores
    assert pairs(scores, "warm_start", "rl") == [(ACC, ACC)]
    for torn in ("{", "{}", '{"models": {"rl": [{"task": 1}]}}'):
        with pytest.raises(LineageError, match=r"lm_eval\.json can't be read"):
            from_json(torn, "lm_eval.json")


def stand_in(folder: Path, body: str) -> str:
    """A program that is called as Python is, with `-m lm_eval …`."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\nargs = sys.argv[1:]\n{body}"
    )
    program.chmod(0o755)
    return str(program)


def test_the_harness_is_asked_for_the_tasks_on_the_folder_and_offline(
    tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    python = stand_in(
        tmp_path,
        "out = args[args.index('--output_path') + 1] + '/model'\n"
        "os.makedirs(out)\n"
        f"results = json.loads({json.dumps(json.dumps(RESULTS))})\n"
        "open(out + '/results_2026.json', 'w').write(json.dumps(results))\n"
        "print(json.dumps([args, os.environ['HF_DATASETS_OFFLINE']]))\n",
    )
    config = LMEvalConfig(
        tasks=("sums", "words"), python=python, include_path=str(tmp_path / "tasks"),
        num_fewshot=2, limit=20, apply_chat_template=True,
    )  # fmt: skip
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert run_lm_eval(tiny_folder, config, 7, scratch)[0] == ACC
    args, offline = json.loads((scratch / "log").read_text())
    assert offline == "1"
    given = dict(itertools.pairwise(args))
    assert args[:4] == ["-m", "lm_eval", "--model", "hf"]
    assert given["--tasks"] == "sums,words"
    assert given["--include_path"] == str(tmp_path / "tasks")
    assert (given["--num_fewshot"], given["--limit"], given["--seed"]) == ("2", "20", "7")
    assert args[-1] == "--apply_chat_template"
    model = dict(part.split("=") for part in given["--model_args"].split(","))
    assert model["pretrained"] == str(tiny_folder)
    # AutoTokenizer would split words as Qwen2 does, were config.json beside it.
    assert (Path(model["tokenizer"]) / "tokenizer.json").is_file()
    assert not (Path(model["tokenizer"]) / "config.json").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('no task named sums'); sys.exit(3)", "ended with status 3 .*no task named sums"),
        ("pass", "wrote no results"),
        ("time.sleep(60)", "took longer than evaluate.lm_eval.timeout_s=1"),
    ],
)
def test_a_harness_that_fails_or_hangs_is_a_sentence(
    tiny_folder: Path, tmp_path: Path, body: str, message: str
) -> None:
    config = LMEvalConfig(tasks=("sums",), python=stand_in(tmp_path, body), timeout_s=1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started = time.monotonic()
    with pytest.raises(DataError, match=message):
        run_lm_eval(tiny_folder, config, 0, scratch)
    assert time.monotonic() - started < 30


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path) -> None:
    require_lm_eval(LMEvalConfig())
    with pytest.raises(ConfigError, match="include_path='/nowhere' is no folder"):
        require_lm_eval(LMEvalConfig(tasks=("sums",), include_path="/nowhere"))
    for python in ("/nowhere/python", stand_in(tmp_path, "sys.exit(1)")):
        with pytest.raises(ConfigError, match=r"needs the lm-evaluation-harness, which .*python"):
            require_lm_eval(LMEvalConfig(tasks=("sums",), python=python))
    require_lm_eval(LMEvalConfig(tasks=("sums",), python=stand_in(tmp_path, "pass")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_harness_scores_a_local_task_offline(tiny_folder: Path, tmp_path: Path) -> None:
    if not PYTHON and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed (HYBRIDFLYTE_LM_EVAL_PYTHON names a Python with it)")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"question": f"{a}+{a}=", "right": a % 2} for a in range(20)]
    (tasks / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "sums.yaml").write_text(
        "task: local_sums\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tasks / 'sums.jsonl'}\n"
        "output_type: multiple_choice\ntest_split: test\ntarget_delimiter: ''\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: ["1", "2"]\ndoc_to_target: right\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "metadata:\n  version: 1.0\n"
    )
    config = LMEvalConfig(
        tasks=("local_sums",), include_path=str(tasks), python=PYTHON, timeout_s=600
    )
    require_lm_eval(config)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (score,) = run_lm_eval(tiny_folder, config, 0, scratch)
    assert (score.task, score.metric, score.documents) == ("local_sums", "acc", 20)
    assert score.stderr is not None
    assert score.value == pytest.approx(expected_accuracy(tiny_folder, rows))


def expected_accuracy(folder: Path, rows: list[dict[str, object]]) -> float:
    """The share of rows whose right choice is the likelier next token, by a forward pass."""
    import torch

    from engine.data.tokenizer import load_tokenizer
    from engine.models import load_model

    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    choices = [tokenizer.encode(text, add_special_tokens=False)[0] for text in ("1", "2")]
    hits = 0
    for row in rows:
        ids = tokenizer.encode(str(row["question"]), add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        hits += int(logits[choices].argmax()) == row["right"]
    return hits / len(rows)
