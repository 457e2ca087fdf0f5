"""A tokenizer's chat template: its text of messages, its variables, and why it refuses a row."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from engine.data.messages import for_template
from engine.data.rows import is_continued
from engine.errors import ConfigError, DataError, EngineError, ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # e.g. {"role": "user", "content": "What is 2+3?"}
ROLES = ("system", "developer", "user", "assistant", "tool")  # and those that a template names


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    add_generation_prompt: bool,
) -> str:
    """Return the chat template's text of messages; DataError where it leaves out a tool's call."""
    has_calls = any("tool_calls" in message for message in messages)
    problem: Exception | None = None
    for as_none, as_text in _CALL_FORMS if has_calls else _CALL_FORMS[:1]:
        chat = [for_template(message, as_text=as_text) for message in messages]
        for message in chat if as_none else ():
            if "tool_calls" in message and not message.get("content"):
                message["content"] = None
        try:
            schemas = [dict(tool) for tool in tools] or None
            options: dict[str, Any] = {"tokenize": False, "tools": schemas}
            options["add_generation_prompt"] = add_generation_prompt
            text = str(tokenizer.apply_chat_template(chat, **options))
        except Exception as error:  # a template is code of the model's authors
            problem = problem or error
            continue
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        names = [str(call.get("function", call)["name"]) for call in calls]
        left_out = [name for name in names if name not in text]
        if not left_out:
            return text
        problem = problem or DataError(
            f"the chat template leaves out tool_calls, of {left_out[0]!r}; remove them, or give "
            "the model another template"
        )
    assert problem is not None
    raise problem


# Forms of a call that templates want: empty content as None, and arguments as JSON text.
_CALL_FORMS = ((False, False), (True, False), (False, True), (True, True))


def check_tools_shown(text: str, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError where a template's text leaves out a row's tools."""
    names = [str(tool["function"]["name"]) for tool in tools]
    if hidden := [name for name in names if name not in text]:
        raise DataError(
            f"the chat template shows no tools, and the row has {hidden[0]!r}; leave column "
            "'tools' out, or give the model another template"
        )


def with_template_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object]
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose chat template has variables, e.g. {"enable_thinking": False}.

    They are written into the template, so a tokenizer that is saved keeps them. Raises ConfigError
    without a template, and for a name that is no variable or that `apply_chat_template` fills.
    """
    if not variables:
        return tokenizer
    setting = "data.apply_chat_template_kwargs"
    if not isinstance(tokenizer.chat_template, str):
        raise ConfigError(
            f"{setting} needs a chat template, and the tokenizer {tokenizer.name_or_path!r} has "
            "none; remove it"
        )
    filled = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if not name.isidentifier() or name in filled or name == "messages":
            raise ConfigError(
                f"{setting}.{name} is no variable that a chat template leaves open; remove it"
            )
    head = "{%- set null = none -%}"  # so that JSON's literals are Jinja's
    for name, value in variables.items():
        literal = json.dumps(value, ensure_ascii=False)
        head += "{%- set " + f"{name} = {name} if {name} is defined else {literal}" + " -%}"
    copied = copy.copy(tokenizer)
    copied.chat_template = head + tokenizer.chat_template
    return copied


@contextmanager
def refusals(tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[None]:
    """Turn whatever a template raises into an error of ours."""
    name = tokenizer.name_or_path or "given"
    try:
        yield
    except EngineError as error:
        raise error.with_message(f"{where}: {error}") from error
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template of the tokenizer {name!r} is no valid template (line "
            f"{error.lineno}: {error.message}); correct chat_template in its folder"
        ) from error
    except Exception as error:  # a template is code of the model's authors
        raise DataError(
            f"{where}: the chat template of the tokenizer {name!r} refuses the prompt "
            f"({type(error).__name__}: {first_line(error)}); change its messages, or remove the row"
        ) from error


def check_roles(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
    """A template may write a role between control tokens, or as a part of one."""
    template = str(tokenizer.chat_template or "")
    for role in (message["role"] for message in messages):
        named = role.isidentifier() and re.search(f"""['"]{role}['"]""", template)
        if role not in ROLES and not named:
            raise DataError(
                f"a message has the role {role!r}, which the model's chat template doesn't name; "
                f"use one of {', '.join(ROLES)}"
            )


def plain_lines(messages: Sequence[Message]) -> str:
    """Messages as a tokenizer without a chat template gets them."""
    labels = {"user": "Question: ", "assistant": "Answer: "}
    lines = [labels.get(m["role"], "") + m["content"] for m in messages]
    return "\n".join(lines if is_continued(messages) else [*lines, "Answer:"])


MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marked_parts(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    start: int,
    length: int,
) -> list[tuple[int, int, bool]]:
    """The parts of a turn, `length` characters from `start` on: inside {% generation %}, or not."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = tokenizer.special_tokens_map
    rendered: Any = render_jinja_template(
        [[for_template(message) for message in chat]],
        tools=[dict(tool) for tool in tools] or None,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **special,
    )
    marked = [(first - start, last - start) for first, last in rendered[1][0]]
    edges = sorted({0, length, *(min(max(at, 0), length) for span in marked for at in span)})
    return [
        (first, last, any(begin <= first < end for begin, end in marked))
        for first, last in pairwise(edges)
    ]
