"""Messages and responses to tokens and back: the one place that knows chat templates.

What others wrote never becomes a control token (`control_tokens`): it is encoded as plain text.
Padding and batching are elsewhere; training a tokenizer is in `tokenizer`.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from engine.data.control_tokens import control_tokens
from engine.errors import ConfigError, DataError, EngineError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # e.g. {"role": "user", "content": "What is 2+3?"}
FROM_0 = range(sys.maxsize)
ROLES = ("system", "developer", "user", "assistant", "tool")  # and those that a template names


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] = (),
) -> list[int]:
    """Encode chat messages up to where the assistant speaks.

    `tools` are JSON schemas for the template to show. A tokenizer without a chat template gets
    plain text, "Question: …\\nAnswer:", with the tokenizer's own start token where it has one, and
    no tools. Raises DataError for a role that neither `ROLES` nor the template has.
    """
    _check_roles(tokenizer, messages)
    control = control_tokens(tokenizer)
    escape = control.spelled_in(messages)
    chat = [dict(m) for m in messages]
    if escape:
        chat = control.stand_in(chat)
    if tokenizer.chat_template:
        ids: Any = tokenizer.apply_chat_template(
            chat,
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=not escape,
            return_dict=False,
        )
        return control.encode(ids) if escape else [int(i) for i in ids]
    text = plain_lines(chat)
    encode: Callable[..., list[int]] = control.encode if escape else tokenizer.encode
    ids = encode(text, add_special_tokens=True)
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return [int(i) for i in ids]


def tool_tokens(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, object]]) -> int:
    """Tokens that showing `tools` adds to a prompt; 0 where the template shows none."""
    if not tools:
        return 0
    ask = [{"role": "user", "content": "?"}]
    return len(encode_prompt(tokenizer, ask, tools)) - len(encode_prompt(tokenizer, ask))


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    add_generation_prompt: bool,
) -> str:
    """The chat template's text of messages, whose own texts may still spell control tokens."""
    text: object = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )
    return str(text)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> list[int]:
    """Encode a whole conversation, as the reward `reward_model` reads it.

    A tokenizer without a chat template gets the last prompt and the response on lines of their own.
    Padding tokens at the end, which no classifier reads, are left out.
    """
    _check_roles(tokenizer, messages)
    control = control_tokens(tokenizer)
    escape, chat = control.spelled_in(messages), [dict(m) for m in messages]
    if escape:
        chat = control.stand_in(chat)
    templated = bool(tokenizer.chat_template)
    text: object = "\n".join(str(message["content"]) for message in chat[-2:])
    if templated:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    encode: Callable[..., list[int]] = control.encode if escape else tokenizer.encode
    ids = [int(i) for i in encode(text, add_special_tokens=not templated)]
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    return ids


def with_template_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object]
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose chat template has these variables where a call gives none.

    They are written into the template, so a tokenizer that is saved keeps them; e.g.
    {"enable_thinking": False}. Raises ConfigError without a chat template, and for a name that is
    no variable or that `apply_chat_template` fills itself.
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
    head = "".join(
        "{%- set " + f"{name} = {name} if {name} is defined else {_jinja(value)}" + " -%}"
        for name, value in variables.items()
    )
    copied = copy.copy(tokenizer)
    copied.chat_template = head + tokenizer.chat_template
    return copied


def _jinja(value: object) -> str:
    """A JSON value as a literal of a template."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_jinja(str(k))}: {_jinja(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja, value)) + "]"
    return "none" if value is None else repr(value)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[Message]],
    name: str,
    numbers: Iterable[int] = FROM_0,
) -> list[list[int]]:
    """Encode the prompts of the table `name` as `encode_prompt` does.

    Raises DataError that names the first row which the chat template refuses, and ModelError for a
    template that is wrong by itself. `numbers` are those of the rows.
    """
    return [
        _encode_row(tokenizer, prompt, f"{name}, row {i}")
        for i, prompt in zip(numbers, prompts, strict=False)
    ]


def encode_short_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[Message]],
    limit: int,
    name: str,
    numbers: Iterable[int] = FROM_0,
) -> list[list[int] | None]:
    """As `encode_prompts`, but None for a prompt of more than `limit` tokens.

    A text of four times the characters that `limit` of the longest token have isn't encoded at
    all, as megabytes would take minutes.
    """
    most = 4 * limit * max(map(len, tokenizer.get_vocab()), default=1)
    encoded: list[list[int] | None] = []
    for i, prompt in zip(numbers, prompts, strict=False):
        where = f"{name}, row {i}"
        written = sum(len(message["content"]) for message in prompt)
        too_long = written > most and _length(tokenizer, prompt, where) > most
        ids = [] if too_long else _encode_row(tokenizer, prompt, where)
        encoded.append(None if too_long or len(ids) > limit else ids)
    return encoded


def _encode_row(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Message], where: str
) -> list[int]:
    with refusals(tokenizer, where):
        ids = encode_prompt(tokenizer, prompt)
        if not ids:
            raise ValueError("it makes no tokens of it")
        return ids


def _length(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Message], where: str) -> int:
    """Characters of the prompt as the template writes it; it may leave messages out."""
    if not tokenizer.chat_template:
        return len(plain_lines(prompt))
    with refusals(tokenizer, where):
        chat = [dict(message) for message in prompt]
        return len(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


@contextmanager
def refusals(tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[None]:
    """Turn whatever a template raises into an error of ours."""
    name = tokenizer.name_or_path or "given"
    try:
        yield
    except EngineError as error:
        raise type(error)(f"{where}: {error}") from error
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template of the tokenizer {name!r} is no valid template (line "
            f"{error.lineno}: {error.message}); correct chat_template in its folder"
        ) from error
    except Exception as error:  # a template is code of the model's authors
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise DataError(
            f"{where}: the chat template of the tokenizer {name!r} refuses the prompt "
            f"({type(error).__name__}: {reason}); change its messages, or remove the row"
        ) from error


def _check_roles(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
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
    return "\n".join([*lines, "Answer:"])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a prompt that its author has put into the model's own format.

    Control tokens that it spells are control tokens: it is for text of the author's alone.
    """
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=True)]


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode what the assistant says; the end token comes once, at the end.

    An end token that the text itself spells is text like the rest.
    """
    end, control = end_token_id(tokenizer), control_tokens(tokenizer)
    if control.spelled_in(text):
        return [*control.encode(control.stand_in(text)), end]
    return [*map(int, tokenizer.encode(text, add_special_tokens=False)), end]


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of sampled tokens, special tokens removed."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends a response; raise ModelError where none is defined."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token; set eos_token in its "
            "tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_config: object = None
) -> tuple[int, ...]:
    """Return the tokens at which sampling stops, ascending.

    They are the tokenizer's end token and those that `model_config` (a transformers model or
    generation config) names; chat models often have more than one.
    """
    stops = {end_token_id(tokenizer)}
    extra = getattr(model_config, "eos_token_id", None)
    if extra is not None:
        stops.update([extra] if isinstance(extra, int) else extra)
    return tuple(sorted(int(i) for i in stops))
