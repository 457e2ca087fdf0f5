"""Messages: every field that is known is kept, and any other is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from chat_templates import family_tokenizer

from engine.config import RowsConfig
from engine.data.messages import FIELDS, canonical_message, for_template, row_tools
from engine.data.preference_rows import preference_row
from engine.data.row_files import RowMapper, read_file_rows
from engine.data.rows import canonical_row
from engine.data.templates import encode_conversation, encode_prompt, encode_turn
from engine.errors import DataError

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("message", "canonical"),
    [
        ({"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "hi"}),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": "ab"},
        ),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLS),
        (
            {
                "role": "assistant",
                "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": None}}],
            },
            CALLS,
        ),
        (
            {"role": "assistant", "content": "7", "reasoning": "3+4", "tool_calls": None},
            {"role": "assistant", "content": "7", "reasoning_content": "3+4"},
        ),
        ({"role": "assistant", "content": "7", "weight": 0}, None),
        ({"role": "tool", "content": "7", "name": "add", "tool_call_id": "c1"}, None),
    ],
)
def test_known_fields_have_one_form(message: dict[str, Any], canonical: Any) -> None:
    assert canonical_message(message, "row 1") == (canonical or message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "a", "audio": {"id": 1}}, "the field 'audio', .*: remove it"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "the field 'tool_calls'"),
        ({"role": "user", "content": "a", "weight": 1}, "the field 'weight'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": ["a"]}, "a part of type 'str'"),
        ({"role": "user"}, "content of a message of the role 'user' is None"),
        (
            {"role": "assistant", "content": "a", "weight": 0.5},
            "weight of a message is 0.5; give 0",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "is no call of a tool"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            r"arguments of a tool's call are '\[1\]'; give an object",
        ),
        ({"role": "assistant", "content": "a", "reasoning_content": 5}, "reasoning_content of a"),
        ({"content": "a"}, "is no message"),
    ],
)
def test_what_would_be_lost_is_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"^row 1: .*{words}"):
        canonical_message(message, "row 1")


@pytest.mark.parametrize("name", FIELDS)
def test_no_stage_drops_a_field_that_it_does_not_know(name: str) -> None:
    """A message with one more field is refused wherever rows come from files."""
    odd = {"role": "user", "content": "2", f"{name}_2": "x"}
    said = {"role": "assistant", "content": "4"}
    with pytest.raises(DataError, match=f"d, row 1: column 'prompt'.*{name}_2"):
        canonical_row({"prompt": [odd], "ground_truth": "4"}, "d, row 1")
    rows: dict[Any, dict[str, Any]] = {
        "responses": {"messages": [odd, said]},
        "pairs": {"prompt": "2", "chosen": [odd, said], "rejected": "5"},
        "labels": {"prompt": [odd], "completion": "4", "label": True},
        "steps": {"prompt": [odd], "completions": ["4"], "labels": [True]},
    }
    for kind, row in rows.items():
        with pytest.raises(DataError, match=f"d, row 1: column .*{name}_2"):
            preference_row(RowMapper(RowsConfig()), kind, row, "d, row 1")


def test_rows_of_parquet_lose_what_is_none_in_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "2+2"}], "ground_truth": "4"},
        {
            "prompt": [
                {"role": "user", "content": "1+3"},
                {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "c1"}]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ],
            "ground_truth": "4",
        },
    ]
    pd.DataFrame(pa.Table.from_pylist(rows).to_pylist()).to_parquet(tmp_path / "rows.parquet")
    read = [
        row["prompt"] for row in read_file_rows(str(tmp_path / "rows.parquet"), RowsConfig()).rows
    ]
    assert read[0] == rows[0]["prompt"]
    assert [list(message) for message in read[1]] == [
        ["role", "content"],
        ["role", "content", "tool_calls"],
        ["role", "content", "tool_call_id"],
    ]
    text = family_tokenizer("qwen2.5").decode(encode_prompt(family_tokenizer("qwen2.5"), read[1]))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text


def test_arguments_have_the_form_that_a_template_reads() -> None:
    read = for_template({**CALLS, "weight": 1, "name": None})
    assert read["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert read.keys() == {"role", "content", "tool_calls"}
    assert for_template(read, as_text=True)["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize("cell", [None, [], "", "[]"])
def test_a_row_may_have_no_tools(cell: object) -> None:
    assert row_tools(cell, "row 1") == []


def test_tools_are_schemas_or_their_json() -> None:
    listed = [TOOL["function"] | {"description": None}]
    assert row_tools(listed, "row 1") == row_tools(pd.Series([listed]).iloc[0], "r") == [TOOL]
    assert row_tools('[{"name": "add", "parameters": {"type": "object"}}]', "row 1") == [TOOL]
    for cell, words in (("{", "is no JSON"), ([{"type": "function"}], "JSON schemas of functions")):
        with pytest.raises(DataError, match=f"row 1: column 'tools' .*{words}"):
            row_tools(cell, "row 1")


ASK = {"role": "user", "content": "1+3?"}


@pytest.mark.parametrize(
    ("name", "message", "written"),
    [
        ("qwen2.5", CALLS, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ("qwen3", {**CALLS, "reasoning_content": "R"}, "<think>\nR\n</think>\n\n<tool_call>"),
        ("qwen3", {**CALLS, "content": "So:"}, "<think>\n\n</think>\n\nSo:\n<tool_call>"),
        ("r1-distill", CALLS, "</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"),
        ("r1-distill", {**CALLS, "reasoning_content": "R"}, "R\n</think>\n\n<｜tool▁calls▁begin"),
        ("llama3", CALLS, '{"name": "add", "parameters": {"a": 1}}'),
        (
            "mistral",
            {**CALLS, "tool_calls": [CALL | {"id": "abcdefghi"}]},
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        ),
    ],
)
def test_calls_and_thoughts_are_written_as_the_template_has_them(
    name: str, message: dict[str, Any], written: str
) -> None:
    tokenizer = family_tokenizer(name)
    prompt, response, learned = encode_turn(tokenizer, [ASK], message)
    text = tokenizer.decode(response)
    assert text.replace("  ", " ").lstrip("\n").startswith(written)
    assert all(learned)
    assert prompt == encode_prompt(tokenizer, [ASK])


@pytest.mark.parametrize(
    ("name", "message", "words"),
    [
        ("gemma", CALLS, "leaves out tool_calls, of 'add'"),
        ("smollm2", CALLS, "leaves out tool_calls, of 'add'"),
        ("llama3", {**CALLS, "content": "So:"}, "leaves out content of a turn with tool_calls"),
        ("llama3", {**CALLS, "content": "", "reasoning_content": "R"}, "reasoning_content; write"),
        ("qwen2.5", {"role": "assistant", "content": "4", "reasoning_content": "R"}, "as <think>…"),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    name: str, message: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        encode_turn(family_tokenizer(name), [ASK], message)
    if "content of" not in words:  # a reward model reads whole conversations
        with pytest.raises(DataError, match=words):
            encode_conversation(family_tokenizer(name), [ASK, message])


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    answer = {"role": "assistant", "content": "4"}
    with pytest.raises(DataError, match="shows no tools, and the row has 'add'"):
        encode_turn(family_tokenizer("gemma"), [ASK], answer, [TOOL])
    shown = encode_turn(family_tokenizer("qwen2.5"), [ASK], answer, [TOOL])
    assert '"name": "add"' in family_tokenizer("qwen2.5").decode(shown.prompt_ids)
