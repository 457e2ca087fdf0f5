"""Conversations as examples: which tokens are learned, and that they are those of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, family_tokenizer
from tokenizers import normalizers

from engine.config import RowsConfig
from engine.data.collate import SFTExample
from engine.data.templates import encode_prompt, encode_turn
from engine.data.training_examples import (
    conversation_examples,
    read_preferences,
    read_sft_examples,
)
from engine.errors import DataError
from engine.trainers.offline import collate_examples


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TALK = [user("1+1?"), says("2."), user("2+2?"), says("4."), user("4+4?"), says("8.")]


def learned_texts(tokenizer: Any, example: SFTExample) -> str:
    """What is learned, with | where it is interrupted."""
    assert example.learned is not None
    parts, last = [], False
    for token, learn in zip(example.response_ids, example.learned, strict=True):
        parts.append(tokenizer.decode([token]) if learn else "|" if last else "")
        last = learn
    return "".join(parts)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("qwen3", "r1-distill")])
def test_all_turns_are_one_example_where_the_template_only_appends(name: str) -> None:
    tokenizer, end = family_tokenizer(name), FAMILIES[name].end
    [example] = conversation_examples(tokenizer, TALK)
    said = learned_texts(tokenizer, example)
    assert said.replace(" ", "") == f"2.{end}|4.{end}|8.{end}"
    for i in (1, 3, 5):  # each turn stands after the very ids that a rollout's prompt has
        turn = encode_turn(tokenizer, TALK[:i], TALK[i])
        ids = example.prompt_ids + example.response_ids
        assert ids[: len(turn.prompt_ids)] == turn.prompt_ids == encode_prompt(tokenizer, TALK[:i])
        assert ids[len(turn.prompt_ids) :][: len(turn.response_ids)] == turn.response_ids
    [last] = conversation_examples(tokenizer, TALK, train_on="last")
    assert last == SFTExample(*encode_turn(tokenizer, TALK[:5], TALK[5]))


def test_turns_that_the_template_strips_later_are_examples_of_their_own() -> None:
    tokenizer = family_tokenizer("qwen3")
    talk = [user("1+1?"), says("<think>\nR\n</think>\n\n2."), user("2+2?"), says("4.")]
    first, second = conversation_examples(tokenizer, talk)
    assert learned_texts(tokenizer, first) == "<think>\nR\n</think>\n\n2.<|im_end|>"
    assert learned_texts(tokenizer, second) == "<think>\n\n</think>\n\n4.<|im_end|>"
    assert "R" not in tokenizer.decode(second.prompt_ids)
    # Tools answer within a turn of the user: the thought stays, and so does the example.
    call = {"name": "add", "arguments": "{}"}
    calls = says("", reasoning_content="Add.", tool_calls=[{"type": "function", "function": call}])
    played = [user("1+1?"), calls, {"role": "tool", "content": "2"}, says("2.")]
    [whole] = conversation_examples(tokenizer, played)
    assert learned_texts(tokenizer, whole).startswith("<think>\nAdd.\n</think>\n\n<tool_call>")
    assert "tool_response" not in learned_texts(tokenizer, whole)


def test_a_turn_of_weight_0_is_read_and_not_learned() -> None:
    tokenizer = family_tokenizer("qwen2.5")
    talk = [TALK[0], says("2.", weight=0), *TALK[2:]]
    [example] = conversation_examples(tokenizer, talk)
    assert learned_texts(tokenizer, example) == "4.<|im_end|>|8.<|im_end|>"
    assert "2." in tokenizer.decode(example.prompt_ids)
    nothing = [user("1"), says("2", weight=0)]
    for chat, train_on in ((nothing, "all"), ([*TALK[:5], says("8", weight=0)], "last")):
        with pytest.raises(DataError, match="nothing of it is learned, by the weights"):
            conversation_examples(tokenizer, chat, train_on=train_on)  # type: ignore[arg-type]


def test_marks_of_the_template_say_what_is_learned() -> None:
    """SmolLM3's marks hold the header too, which is given when a policy samples."""
    tokenizer = family_tokenizer("generation")
    [example] = conversation_examples(tokenizer, TALK)
    assert learned_texts(tokenizer, example) == "2.<|im_end|>|4.<|im_end|>|8.<|im_end|>"
    marked: Any = tokenizer.apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = example.prompt_ids + example.response_ids
    assert ids == marked["input_ids"][: len(ids)]
    start = len(example.prompt_ids)
    theirs = marked["assistant_masks"][start : len(ids)]
    assert example.learned is not None
    assert all(theirs[i] for i, learn in enumerate(example.learned) if learn)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- generation %}", "{{- '<|im_start|>assistant\\n' }}{%- generation %}"
    ).replace(
        "{{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}\n"
        "        {%- endgeneration %}",
        "{{- message.content }}{%- endgeneration %}{{- '<|im_end|>\\n' }}",
    )
    [without_end] = conversation_examples(tokenizer, TALK)
    assert learned_texts(tokenizer, without_end) == "2.|4.|8.|"
    assert without_end.response_ids == example.response_ids


def test_marks_count_where_a_text_begins_with_a_space() -> None:
    tokenizer = family_tokenizer("mistral")
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
        "{%- else %}{%- generation %}{{- ' ' + m.content }}{%- endgeneration %}{{- eos_token }}"
        "{%- endif %}{%- endfor %}"
    )
    [example] = conversation_examples(tokenizer, TALK)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert example.prompt_ids + example.response_ids == whole
    assert learned_texts(tokenizer, example).replace(" ", "") == "2.|4.|8.|"


def test_a_turn_is_encoded_after_the_text_before_it() -> None:
    tokenizer = family_tokenizer("mistral")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")  # as SentencePiece's blank
    tokenizer.chat_template = "{%- for m in messages %}{{- m.content + '/' }}{%- endfor %}"
    prompt, response, _ = encode_turn(tokenizer, TALK[:1], TALK[1])
    text = "".join(f"{message['content']}/" for message in TALK[:2])
    whole = tokenizer.encode(text.removesuffix("/"), add_special_tokens=False)
    assert [*prompt, *response[:-1]] == whole


def test_rows_of_files(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen2.5")
    tool = {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    played = [
        user("1+1?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        says([{"type": "text", "text": "It is "}, {"type": "text", "text": "2."}]),
    ]
    rows = [{"messages": played, "tools": [tool]}, {"messages": TALK, "tools": None}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = RowsConfig(system_prompt="Add.")
    first, second = read_sft_examples([str(file)], tokenizer, config=config)
    assert '"name": "add"' in tokenizer.decode(first.prompt_ids)
    assert tokenizer.decode(first.prompt_ids).startswith("<|im_start|>system\nAdd.")
    assert learned_texts(tokenizer, first) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        "|It is 2.<|im_end|>"
    )
    assert learned_texts(tokenizer, second).count("|2") == 0
    bad = [{"messages": [*TALK, says("16.")]}, {"messages": [says("Hello"), *TALK]}]
    for row in bad:
        file.write_text(json.dumps(row))
        with pytest.raises(DataError, match="row 1: column 'messages' has an assistant's message"):
            read_sft_examples([str(file)], tokenizer)


def test_preferences_carry_the_same_messages(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chosen = says("", reasoning_content="Add.", tool_calls=[call])
    tools = [{"type": "function", "function": {"name": "add"}}]
    file = tmp_path / "pairs.jsonl"
    row = {"prompt": "1+1?", "chosen": [chosen], "rejected": [says("3")], "tools": tools}
    file.write_text(json.dumps(row))
    [pair] = read_preferences(str(file), tokenizer)
    good, bad = read_preferences(str(file), tokenizer, "labels")
    expected = encode_turn(tokenizer, [user("1+1?")], chosen, tools)
    assert (pair.prompt_ids, pair.responses[0]) == expected[:2]
    assert (good.prompt_ids, good.responses[0]) == expected[:2]
    assert tokenizer.decode(bad.responses[0]) == "<think>\n\n</think>\n\n3<|im_end|>"
    assert '"add"' in tokenizer.decode(pair.prompt_ids)


def test_tokens_that_are_not_learned_are_out_of_the_mask() -> None:
    tokenizer = family_tokenizer("qwen2.5")
    [example] = conversation_examples(tokenizer, TALK)
    batch = collate_examples([example, SFTExample([5], [6, 7])], 0)
    assert example.learned is not None
    assert batch["response_mask"].tolist() == [
        list(map(float, example.learned)),
        [1.0, 1.0] + [0.0] * (len(example.learned) - 2),
    ]
    assert batch["attention_mask"][0].all()
