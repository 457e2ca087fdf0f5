"""Rows of any file become canonical rows: columns, templates, a system message, refused text."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import RowsConfig
from engine.data.row_files import LONGEST_TEXT, RowMapper
from engine.errors import ConfigError, DataError


def mapped(raw: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return RowMapper(RowsConfig.model_validate(settings))(raw, "d.csv, row 2")


def test_columns_are_named_nested_and_templated() -> None:
    row = mapped(
        {"q": "1+1", "info": {"answer": {"value": "#### 2"}}, "prompt": "not this", "level": 3},
        columns={"prompt": "q", "ground_truth": "info.answer.value"},
        templates={
            "prompt": "{{ prompt }} = {{ '?' * level }}",
            "ground_truth": "{{ ground_truth.split('####')[1] | trim }}",
        },
        system_prompt="Be brief.",
        data_source="sums",
    )
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1 = ???"},
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (row["data_source"], row["level"], row["info"]) == (
        "sums",
        3,
        {"answer": {"value": "#### 2"}},
    )
    assert "q" not in row


def test_rows_of_verl_pass_as_they_are() -> None:
    verl = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    assert mapped(verl, system_prompt="Not this.", data_source="nor this") == verl


@pytest.mark.parametrize(
    ("raw", "settings", "message"),
    [
        ({"a": "x"}, {"columns": {"prompt": "q"}}, r"no column 'q' for data.columns.prompt; .*'a'"),
        ({"a": {"b": 1}}, {"columns": {"prompt": "a.b.c"}}, r"no column 'a\.b\.c'"),
        ({"question": "x"}, {}, r"no column 'prompt'; name one of \['question'\]"),
        ({"prompt": "a\0b"}, {}, "'prompt' has a NUL character at 1"),
        ({"prompt": "a", "ground_truth": "\0"}, {}, "'ground_truth' has a NUL"),
        ({"prompt": "x" * 10_000_000}, {}, "'prompt' has 10,000,000 characters, more than 4,000"),
        ({"prompt": [{"role": "user", "content": "x\0"}]}, {}, "'prompt' has a NUL"),
        ({"prompt": 7}, {}, "column 'prompt' is 7"),
        ({"q": "a"}, {"templates": {"prompt": "{{ p }}"}}, "UndefinedError: 'p' is undefined"),
        ({"q": None}, {"templates": {"prompt": "{{ q.split() }}"}}, "can't be rendered"),
        (
            {"q": "a"},
            {"templates": {"prompt": "{{ q.__class__.__mro__ }}"}},
            "SecurityError",
        ),
    ],
)
def test_a_row_without_a_form_is_refused(
    raw: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"^d\.csv, row 2: .*{message}") as caught:
        mapped(raw, **settings)
    assert len(str(caught.value)) < 400


def test_text_in_the_data_is_no_template_and_long_text_is_read() -> None:
    text = "{{ 7 * 7 }}" + "x" * (LONGEST_TEXT - 11)
    row = mapped({"q": text}, templates={"prompt": "{{ q }}"})
    assert row["prompt"][0]["content"] == text


def test_a_wrong_template_is_refused_before_any_row() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.templates\.prompt is not a Jinja2 template \(line 1"
    ):
        RowMapper(RowsConfig(templates={"prompt": "{{ q"}))
