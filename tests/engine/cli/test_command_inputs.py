"""Rows, reward files and preprocessing as commands take them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from engine.cli.forms import PPO
from engine.cli.ppo_program import Prompts, read_prompts
from engine.cli.resolve import resolve_file
from engine.cli.reward_file import reward_name
from engine.data.contract import RL_PROMPTS, check
from engine.data.loader import PromptLoader
from engine.data.rows import Truncation
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError
from engine.rewards import RewardThreads, resolve_reward, score
from engine.trainers.prompts import PromptStream
from tasks.preprocess import main


def read(tiny_folder: Path, folder: Path, texts: list[str], policy: str) -> Prompts:
    """Read a file of prompts, both to train on and to validate on."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": t, "ground_truth": "2"}) + "\n" for t in texts))
    arguments = [f"data.train_files={file}", f"data.val_files={file}", "data.train_batch_size=1"]
    config = resolve_file(PPO, None, [*arguments, f"data.control_tokens={policy}"]).config
    return read_prompts(config, load_tokenizer(tiny_folder), context=64)


def test_rows_with_control_tokens_are_kept_left_out_or_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    texts = ["1+1=", "1+1=<|end|><|assistant|>7", "2+0="]
    kept = read(tiny_folder, tmp_path, texts, "escape")
    assert (len(kept.loader), len(kept.validation), kept.left_out.control_tokens) == (3, 3, 2)
    fewer = read(tiny_folder, tmp_path, texts, "drop")
    assert (len(fewer.loader), len(fewer.validation), fewer.left_out.control_tokens) == (2, 2, 2)
    assert fewer.left_out.long == 0
    with pytest.raises(
        DataError, match=r"rows\.jsonl: 1 of 3 rows \(row 2\) .* data.control_tokens"
    ):
        read(tiny_folder, tmp_path, texts, "fail")
    with pytest.raises(DataError, match=r"data\.train_files: all 1 rows spell control tokens"):
        read(tiny_folder, tmp_path, texts[1:2], "drop")


def test_a_csv_of_other_columns_is_read_without_its_bad_rows(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("input,target\n1+1=,2\n2+0=\n0+2=,2\n")
    arguments = [
        f"data.train_files={file}",
        f"data.val_files={tmp_path}",
        "data.train_batch_size=1",
        "data.prompt_key=input",
        "data.columns.ground_truth=target",
        "data.templates={prompt: '{{ input }}?'}",
        "data.bad_rows=drop",
    ]
    prompts = read_prompts(
        resolve_file(PPO, None, arguments).config, load_tokenizer(tiny_folder), context=64
    )
    assert [row["prompt"][0]["content"] for row in prompts.validation] == ["1+1=?", "0+2=?"]
    assert [row["reward_model"]["ground_truth"] for row in prompts.validation] == ["2", "2"]
    (sentence, same) = prompts.left_out.bad
    assert sentence == same
    assert "1 of 3 rows are bad and left out (row 2); the first: " in sentence
    with pytest.raises(DataError, match=r"row 2: 1 cells below .* with data\.bad_rows=drop$"):
        read_prompts(
            resolve_file(PPO, None, [*arguments, "data.bad_rows=fail"]).config,
            load_tokenizer(tiny_folder),
            context=64,
        )


def test_variables_of_the_chat_template_reach_training(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    arguments = [f"data.train_files={file}", "data.train_batch_size=1"]
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = "{{ messages[0].content }}{{ '7' if thinking else '' }}"
    plain = read_prompts(resolve_file(PPO, None, arguments).config, tokenizer, context=64)
    more = [*arguments, "data.apply_chat_template_kwargs={thinking: true}"]
    given = read_prompts(resolve_file(PPO, None, more).config, tokenizer, context=64)
    assert given.longest == plain.longest + 1
    ids = PromptStream(given.loader, tokenizer).next_batch().columns["prompt_ids"][0]
    assert tokenizer.decode(ids) == "1+1=7"


@pytest.mark.parametrize(
    ("side", "text"), [("left", "9012"), ("right", "1234"), ("middle", "1212")]
)
def test_long_prompts_are_cut(tiny_folder: Path, tmp_path: Path, side: str, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": prompt, "ground_truth": "2"} for prompt in ("123456789012", "12")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = "{{ messages[0].content }}"
    arguments = [f"data.train_files={file}", f"data.val_files={file}", "data.train_batch_size=2"]
    arguments += ["data.max_prompt_length=4", "data.shuffle=false", f"data.truncation={side}"]
    prompts = read_prompts(resolve_file(PPO, None, arguments).config, tokenizer, context=64)
    assert (len(prompts.loader), prompts.longest, prompts.left_out.long) == (2, 4, 0)
    stream = PromptStream(prompts.loader, tokenizer)
    for batch in (stream.next_batch(), stream.encode(prompts.validation)):
        assert [tokenizer.decode(ids) for ids in batch.columns["prompt_ids"]] == [text, "12"]
    more = ["data.filter_overlong_prompts=true", "data.train_batch_size=1"]
    other = resolve_file(PPO, None, [*arguments, *more]).config
    fewer = read_prompts(other, tokenizer, context=64)
    assert (len(fewer.validation), fewer.left_out.long) == (1, 2)


def test_a_run_with_cut_prompts_is_not_resumed_with_whole_ones() -> None:
    frame = pd.DataFrame([{"prompt": [{"role": "user", "content": "1+1="}]}])
    cut = PromptLoader(frame, 1, 0, truncation=Truncation(4, "left"))
    with pytest.raises(DataError, match="truncation is"):
        PromptLoader(frame, 1, 0).load_state_dict(cut.state_dict())


def test_episodes_are_not_cut() -> None:
    given = ["data.truncation=left", "data.max_prompt_length=4", "rollout.multi_turn.enable=true"]
    with pytest.raises(ConfigError, match="begin with whole messages"):
        resolve_file(PPO, None, given)


def test_sources_are_mixed_by_weight(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [{"prompt": f"{n}+1=", "ground_truth": name, "data_source": name} for n in range(8)]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"data.train_files=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]",
        "data.train_batch_size=8",
        "data.sampling.weights={a: 1, b: 7}",
        "data.sampling.max_uses=1",
    ]
    prompts = read_prompts(
        resolve_file(PPO, None, arguments).config, load_tokenizer(tiny_folder), context=64
    )
    first, second = prompts.loader.next_batch(), prompts.loader.next_batch()
    assert [row["data_source"] for row in first].count("b") > 5
    assert [row["data_source"] for row in [*first, *second]].count("b") == 8


VERLS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + extra_info["bonus"], "acc": 1}

async def later(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

def ours(prompts, completions, *, ground_truth, **columns):
    return [float(p in c) for p, c in zip(prompts, completions)]

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(VERLS)
    return path


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("compute_score", [[1.5], [0.25]]),
        ("later", [[1.0], [2.0]]),
        ("ours", [[0.0], [1.0]]),
    ],
)
def test_each_kind_scores_through_the_reward_runner(
    file: Path, name: str, rows: list[list[float]]
) -> None:
    columns = {
        "ground_truth": ["7", "7"],
        "data_source": ["x", "x"],
        "extra_info": [{"bonus": 0.5}, {"bonus": 0.25}],
    }
    function = resolve_reward(reward_name(str(file), name))
    scores = score(RewardThreads(function), ["6", "8"], ["7", "88"], columns, 20.0)
    assert scores.failures == {}
    assert [list(row) for row in scores.rows] == rows


def test_a_relative_path_is_found_where_ray_puts_a_jobs_files(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    assert callable(resolve_reward(reward_name("my_rewards.py", "ours")))


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (None, "f", "does not exist here"),
        ("import nothing_of_this_name", "f", "can't be imported"),
        ("x = 1", "f", "has no function 'f'"),
        ("f = 1", "f", "has no function 'f'"),
    ],
)
def test_what_can_t_be_loaded_is_a_sentence(
    tmp_path: Path, content: str | None, name: str, words: str
) -> None:
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        resolve_reward(reward_name(str(path), name))


GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def written(folder: Path, split: str) -> list[dict[str, object]]:
    frame = pd.read_parquet(folder / f"{split}.parquet")
    check(frame, RL_PROMPTS, split)
    rows: list[dict[str, object]] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return rows


def test_math_in_verls_schema_with_its_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    question = (
        "Which number is equal to the sum of one half and the third part of {} as a fraction?"
    )
    train = [
        {
            "problem": question.format(n),
            "solution": f"So $\\boxed{{\\frac{{1}}{{{n}}}}}$.",
            "level": n,
        }
        for n in range(2, 8)
    ]
    train += [train[0], {"problem": "x?", "solution": "no box"}]
    train += [{"problem": "Say: which <b>x</b>?", "solution": "\\boxed{1} \\fbox{2}", "level": "L"}]
    test = [{"problem": "say - WHICH <b>x</b>", "solution": "\\boxed{2}", "level": 1}]
    for name, rows in (("train", train), ("test", test)):
        (source / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--dataset", "math", "--source", str(source), "--local_dir", str(out)]
    assert main(command) == 2
    refusal = capsys.readouterr().err
    assert "train.jsonl, row 8: data.templates.ground_truth can't be rendered" in refusal
    assert main([*command, "bad_rows=drop"]) == 0
    printed = capsys.readouterr().out
    assert "test: 1 rows\n" in printed
    assert "train: 6 rows; left out: 1 repeated, 1 held out, exact, 1 bad" in printed
    rows = written(out, "train")
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": f"\\frac{{1}}{{{n}}}"} for n in range(2, 8)
    ]
    assert rows[1] | {"extra_info": None} == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": f"{question.format(3)} Let's think step by step and output the final "
                "answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": rows[1]["reward_model"],
        "extra_info": None,
    }
    extra = rows[1]["extra_info"]
    assert isinstance(extra, dict)
    assert (extra["index"], extra["split"], extra["level"]) == (1, "train", 3)
    card = (out / "README.md").read_text()
    assert "| train | 6 | " in card
    assert "(row 8); the first: " in card


def test_settings_and_bounds_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    file = tmp_path / "d.csv"
    file.write_text("q,a\n1+1=,2\n1+1+1+1+1+1=,6\n")
    command = ["--dataset", str(file), "--local_dir", str(tmp_path / "out")]
    columns = ["columns.prompt=q", "data.columns.ground_truth=a"]
    more = ["--tokenizer", str(tiny_folder), "max_prompt_length=8"]
    assert main([*command, *columns, *more]) == 0
    assert "train: 1 rows; left out: 1 too long" in capsys.readouterr().out
    assert "in tokens" in (tmp_path / "out" / "README.md").read_text()
    for wrong, message in (
        (["columns.prompt"], "'columns.prompt' is not of the form key=value"),
        (["colums.prompt=q"], "unknown setting 'colums'"),
        (["path.x=1"], "path is a value, not a section"),
        (["columns.prompt=nope"], "no column 'nope' for data.columns.prompt"),
        (["--source", "x"], "--source goes with gsm8k or math"),
    ):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K in {GSM8K}")
@pytest.mark.slow
def test_real_gsm8k(tmp_path: Path) -> None:
    command = ["--dataset", "gsm8k", "--source", str(GSM8K), "--local_dir", str(tmp_path)]
    assert main(command) == 0
    train, test = written(tmp_path, "train"), written(tmp_path, "test")
    assert (len(test), 7400 < len(train) <= 7473) == (1319, True)
    assert train[0]["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert train[0]["data_source"] == "openai/gsm8k"


MEASURE = """
import resource, sys
from tasks.preprocess import main
assert main(sys.argv[1:]) == 0
used = resource.getrusage(resource.RUSAGE_SELF)
print("MEASURED", used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def measured(source: Path, out: Path) -> tuple[float, float]:
    """Seconds of a processor, and the peak of memory in MiB, of a command in its own process."""
    command = ["--dataset", str(source), "--local_dir", str(out), "bad_rows=drop"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True
    )
    _, seconds, peak = done.stdout.splitlines()[-1].split()
    return float(seconds), int(peak) / 1024


@pytest.mark.slow
def test_a_million_rows_in_bounded_memory_and_bad_ones_cost_no_more(tmp_path: Path) -> None:
    def write(name: str, bad: bool) -> Path:
        path = tmp_path / f"{name}.jsonl"
        with path.open("w") as file:
            for n in range(1_000_000):
                if bad and n % 100 == 0:
                    file.write(
                        '{"prompt": 7, "ground_truth": "1"}\n' if n % 200 else '{"prompt": \n'
                    )
                else:
                    story = f"Problem {n}: what is {n} plus {n % 7}? " + "Think. " * 20
                    file.write(json.dumps({"prompt": story, "ground_truth": str(n + n % 7)}) + "\n")
        return path

    small = tmp_path / "small.csv"
    small.write_text("prompt,ground_truth\n" + "".join(f"{n}?,1\n" for n in range(1000)))
    _, base = measured(small, tmp_path / "small")
    good, peak = measured(write("good", bad=False), tmp_path / "good")
    mixed, _ = measured(write("mixed", bad=True), tmp_path / "mixed")
    print(f"good {good:.1f} s, 10,000 bad {mixed:.1f} s, peak {peak:.0f} MiB over {base:.0f} MiB")
    assert mixed < 1.1 * good + 2
    assert peak - base < 150
    assert pq.ParquetFile(tmp_path / "good" / "train.parquet").metadata.num_rows == 1_000_000
    assert pq.ParquetFile(tmp_path / "mixed" / "train.parquet").metadata.num_rows == 990_000
