"""The rows of data files that a run takes: mapped, not bad, and without control tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from engine.cli.forms import PPO
from engine.cli.ppo_program import Prompts, read_prompts
from engine.cli.resolve import resolve_file
from engine.data.loader import PromptLoader
from engine.data.rows import Truncation
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError
from engine.trainers.prompts import PromptStream


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
