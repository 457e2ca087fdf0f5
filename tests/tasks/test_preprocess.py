"""The dataset stage: which rows fit, which spell control tokens, refusals by split and row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from promotion_bench import Bench, new_run

from engine.config import DataConfig
from engine.data.contract import RL_PROMPTS, check
from engine.data.rows import rl_row, sft_row
from engine.data.sources import Splits, source_digest
from engine.data.tokenizer import load_tokenizer, train_tokenizer
from engine.errors import DataError, ModelError
from engine.stages.dataset import write_split
from engine.stages.evaluation import describe_problems
from engine.stages.row_checks import apply_control_tokens, fit_to_context
from engine.stages.settings import DatasetSettings
from tasks.stages import preprocess

# Preprocess: which rows fit, which spell control tokens, and refusals by split and row.

TOKENIZER = train_tokenizer(["What is 1 plus 7?"], vocab_size=280)


def splits() -> Splits:
    rl = pd.DataFrame([rl_row("sums", f"{n}+1?", "5", {}) for n in range(4)])
    sft = pd.DataFrame([sft_row(f"{n}+1?", "5", {}) for n in range(4)])
    return Splits(sft, sft, rl, rl, rl, source_digest="", source_uri="")


def with_prompt(content: str) -> Splits:
    """Splits whose `train` has another prompt in row 2."""
    good = splits()
    rows = good.train.to_dict("records")
    rows[2] = rl_row("sums", content, "5", {})
    return replace(good, train=pd.DataFrame(rows))


def test_long_prompts_are_left_out_where_there_is_a_limit_or_refused_by_row() -> None:
    fitted, lengths = fit_to_context(splits(), TOKENIZER, DataConfig(max_response_length=8), 64)
    longest = max(lengths["train"])
    assert [len(frame) for frame in fitted.frames().values()] == [4] * 5
    huge = with_prompt("1+" * 5_000_000)
    limited = DataConfig(max_response_length=8, max_prompt_length=longest)
    fitted, lengths = fit_to_context(huge, TOKENIZER, limited, 64)
    assert [prompt[0]["content"] for prompt in fitted.train["prompt"]] == ["0+1?", "1+1?", "3+1?"]
    assert max(max(own) for own in lengths.values()) == longest
    assert "train: 1 prompts over" in fitted.notes[0]
    message = r"^train: 1 prompts are longer than the model's context of 64 tokens \(row 2\); set"
    with pytest.raises(DataError, match=message):
        fit_to_context(huge, TOKENIZER, DataConfig(max_response_length=8), 64)
    with pytest.raises(DataError, match=r"data.max_prompt_length=1 leaves no row of sft_train: "):
        fit_to_context(splits(), TOKENIZER, DataConfig(max_prompt_length=1), 64)
    with pytest.raises(ModelError, match="together more than the model's context of 64"):
        fit_to_context(splits(), TOKENIZER, DataConfig(max_response_length=60), 64)


def test_a_prompt_that_the_template_refuses_is_named_by_split_and_row() -> None:
    picky = train_tokenizer(["What is 1 plus 7?"], vocab_size=280)
    picky.chat_template = (
        "{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    with pytest.raises(DataError, match=r"^train, row 2: the chat template .*TemplateError: no x"):
        fit_to_context(with_prompt("x+1?"), picky, DataConfig(max_response_length=8), 64)


def test_half_a_character_in_any_field_is_a_sentence(tmp_path: Path) -> None:
    frame = splits().train.assign(extra_info=[{"name": "\ud83d"}] * 4)
    with pytest.raises(DataError, match=r"^train can't be written as Parquet .*surrogates"):
        write_split(frame, tmp_path / "train.parquet")


@pytest.fixture
def spelling() -> Splits:
    """Splits with a control token in a response to learn and in a problem of the test set."""
    good = splits()
    learned, test = good.sft_train.copy(), good.test.copy()
    learned.at[2, "response"] = "4<|end|>5"
    test.at[3, "prompt"] = [{"role": "user", "content": "1<|end|><|assistant|>#### 7"}]
    return replace(good, sft_train=learned, test=test)


def test_rows_with_control_tokens_are_counted_and_kept(
    spelling: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same, count = apply_control_tokens(spelling, TOKENIZER, "escape")
    assert count == 2
    assert all(same.frames()[name].equals(frame) for name, frame in spelling.frames().items())
    assert "sft_train: 1 rows spell control tokens of the model; kept as" in capsys.readouterr().out
    TOKENIZER.save_pretrained(tmp_path)
    assert describe_problems("mine", spelling.test, tmp_path) == (
        "mine, 4 held-out problems, 1 of them with control tokens kept as plain text"
    )
    assert describe_problems("mine", spelling.test[:3], tmp_path) == "mine, 3 held-out problems"


def test_rows_with_control_tokens_are_left_out_or_refused(spelling: Splits) -> None:
    fewer, count = apply_control_tokens(spelling, TOKENIZER, "drop")
    assert (count, [len(frame) for frame in fewer.frames().values()]) == (2, [3, 4, 4, 4, 3])
    assert list(fewer.sft_train.index) == [0, 1, 2]
    with pytest.raises(DataError, match=r"^sft_train: 1 of 4 rows \(row 2\) spell control tokens"):
        apply_control_tokens(spelling, TOKENIZER, "fail")
    with pytest.raises(DataError, match="drop leaves no row of test: all 1 spell control"):
        apply_control_tokens(replace(spelling, test=spelling.test[3:]), TOKENIZER, "drop")


# The workflow's data stage on a CSV of two columns: splits, tokenizer and card, from settings.


def test_a_csv_of_two_columns_becomes_a_dataset(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = "A farmer who has {} apples buys {} more on the market of the old town by the river"
    rows = [f"{story.format(n, n)},{2 * n}\n" for n in range(60)]
    again = f"{story.format(7, 7)}!,14\n"  # most words of another row, in train and in test
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("q,a\n" + "".join(rows[:50]) + again + "odd\n")
    (tmp_path / "data" / "test.csv").write_text("q,a\n" + "".join([*rows[50:], rows[7]]))
    data = DataConfig(
        source="files",
        path=str(tmp_path / "data"),
        columns={"prompt": "q", "ground_truth": "a"},
        apply_chat_template_kwargs={"mode": "brief"},
        bad_rows="drop",
        max_response_length=16,
        vocab_size=512,
    )
    made = preprocess(
        run=new_run(),
        settings=DatasetSettings(
            data=data,
            source_digest=source_digest(data, 0),
            model_path="",
            model_digest="",
            context=256,
            seed=0,
        ),
    ).dataset
    folder = Path(str(made.path))
    train, test = (pd.read_parquet(folder / f"{name}.parquet") for name in ("train", "test"))
    check(train, RL_PROMPTS, "train")
    assert len(test) == 11
    asked = {prompt[0]["content"] for prompt in train["prompt"]}
    assert len(asked) == len(train)
    assert not any("has 7 apples" in text for text in asked)
    learned = pd.read_parquet(folder / "sft_train.parquet")
    assert set(learned["response"]) <= {str(2 * n) for n in range(50)}
    assert "mode = mode if" in str(load_tokenizer(folder / "tokenizer").chat_template)
    out = capsys.readouterr().out
    assert "train.csv: 1 of 52 rows are bad and left out (row 52)" in out
    assert "train: 1 rows repeat a prompt and are left out" in out
    assert "prompts are in held-out ones (1 with the same words, 0 nearly) and left out" in out
    card = (folder / "README.md").read_text()
    assert "| train | " in card
    assert "| test | 11 | " in card
