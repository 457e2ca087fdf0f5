"""Preprocess: which prompts fit, and refusals that name split and row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from engine.config import DataConfig
from engine.data.rows import rl_row, sft_row
from engine.data.sources import Splits
from engine.data.tokenizer import train_tokenizer
from engine.errors import DataError, ModelError
from tasks.preprocess import fit_to_context, write_split

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
    longest = lengths["max_prompt_length"]
    assert [len(frame) for frame in fitted.frames().values()] == [4] * 5
    huge = with_prompt("1+" * 5_000_000)
    limited = DataConfig(max_response_length=8, max_prompt_length=longest)
    fitted, lengths = fit_to_context(huge, TOKENIZER, limited, 64)
    assert [prompt[0]["content"] for prompt in fitted.train["prompt"]] == ["0+1?", "1+1?", "3+1?"]
    assert lengths == {"max_prompt_length": longest}
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
