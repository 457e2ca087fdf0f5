"""Messages and responses to tokens and back: the one place that knows chat templates.

A tokenizer reads the spelling of a special token, such as `<|im_end|>`, as the token, no matter who
wrote it: `ControlTokens` finds such spellings in what people, tools and models wrote, and encodes
them as plain text. `encode_continuation` makes the tokens that follow a sampled turn without
encoding the turn again, which would change its ids (BPE is no bijection).
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from engine.data.rows import row_numbers
from engine.errors import ConfigError, DataError, EngineError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_ENCODED = ("prompt", "response", "chosen", "rejected", "completion")  # columns that become tokens
_known: WeakKeyDictionary[PreTrainedTokenizerBase, ControlTokens] = WeakKeyDictionary()


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer, read once."""
    known = _known.get(tokenizer)
    if known is None or known.stamp != _stamp(tokenizer):
        known = _known[tokenizer] = ControlTokens(tokenizer)
    return known


def rows_spelling_control_tokens(
    rows: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    policy: str,
    where: str,
    numbers: Sequence[int] = (),
) -> list[int]:
    """The rows (from 0) of `where`, e.g. "train", with a control token spelled in their text.

    Of chat messages all texts count. With policy "fail" such rows raise DataError, which calls them
    by `numbers` (without any: from 0); "escape" and "drop" are the caller's to carry out.
    """
    control = control_tokens(tokenizer)
    cells = [[row[name] for name in _ENCODED if name in row] for row in rows]
    spelling = [i for i, row in enumerate(cells) if any(map(control.spelled_in, row))]
    if spelling and policy == "fail":
        shown = row_numbers([numbers[i] if numbers else i for i in spelling])
        raise DataError(
            f"{where}: {len(spelling)} of {len(rows)} rows ({shown}) spell control tokens of the "
            f"model such as {control.example(rows[spelling[0]])!r} in their text; correct them, or "
            "set data.control_tokens to escape (keep it as text) or drop"
        )
    return spelling


class ControlTokens:
    """The special tokens of a tokenizer, and encoding in which no other text becomes one.

    `stand_in` marks the spellings in what was written by others; a template is rendered around
    that; `encode` then makes tokens of the template's spellings and text of the marked ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.stamp = _stamp(tokenizer)
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        spellings = dict.fromkeys([*(str(t.content) for t in special), *self.stamp[1]])
        to_id: Any = tokenizer.convert_tokens_to_ids
        self.ids: dict[str, int] = {text: int(to_id(text)) for text in spellings}
        # The tokenizer itself would keep this object alive, and with it itself.
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._name = tokenizer.name_or_path
        self._normalized = any(token.normalized for token in special)
        self._unknown = tokenizer.unk_token_id
        # Digits, which a template's filters leave alone; nobody can guess them.
        mark = "".join(secrets.choice("0123456789") for _ in range(24))
        self._stand_ins = {text: f"{mark}{i:06d}" for i, text in enumerate(self.ids)}
        self._aliases = {text: f"<|{mark}-{i}|>" for i, text in enumerate(self.ids)}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._stood_in = re.compile(rf"{mark}\d{{6}}")
        self._twin: Tokenizer | None = None

    def spelled_in(self, value: object) -> bool:
        """Whether a text, or any text of messages, spells a control token."""
        return any(self._spelled.search(t) or self._is_read(t) for t in _texts(value))

    def _is_read(self, text: str) -> bool:
        """Whether the tokenizer reads a control token of another spelling, e.g. "[sep]"."""
        if not self._normalized or not isinstance(self._backend, Tokenizer):
            return False
        read = set(self._backend.encode(text, add_special_tokens=False).ids)
        return not read.isdisjoint(set(self.ids.values()) - {self._unknown})

    def example(self, value: object) -> str:
        """A control token that is spelled in `value`."""
        spelled = (m[0] for text in _texts(value) for m in self._spelled.finditer(text))
        return next(spelled, next(iter(self.ids)))

    def stand_in(self, value: object) -> Any:
        """`value` with stand-ins for the control tokens that its texts spell."""
        if isinstance(value, str):
            return self._spelled.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, Mapping):
            return {self.stand_in(key): self.stand_in(item) for key, item in value.items()}
        if isinstance(value, list | tuple | np.ndarray):
            return [self.stand_in(item) for item in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode text with stand-ins, which become the text that they stand for, never a token."""
        originals = {stand_in: spelling for spelling, stand_in in self._stand_ins.items()}
        text = self._spelled.sub(lambda match: self._aliases[match[0]], text)
        text = self._stood_in.sub(lambda match: originals[match[0]], text)
        twin = self._twin = self._twin or self._make_twin()
        return list(twin.encode(text, add_special_tokens=add_special_tokens).ids)

    def _make_twin(self) -> Tokenizer:
        """The same tokenizer, with control tokens that are spelled as their aliases."""
        try:
            spec = json.loads(self._backend.to_str())
            for token in spec["added_tokens"]:
                if alias := self._aliases.get(token["content"]):
                    token.update(content=alias, normalized=False, special=True)
            self._rename_in(spec["model"])
            spec.update(truncation=None, padding=None)
            twin = Tokenizer.from_str(json.dumps(spec))
            ids = {text: twin.token_to_id(alias) for text, alias in self._aliases.items()}
            if ids != self.ids:
                raise ValueError("the aliases have other ids")
        except Exception as error:  # a slow tokenizer, or tokenizers' bare Exception
            raise DataError(
                f"the tokenizer {self._name!r} can't keep control tokens that are spelled in a "
                "text apart from its own; set data.control_tokens=drop to leave such rows out"
            ) from error
        return twin

    def _rename_in(self, model: dict[str, Any]) -> None:
        """Rename control tokens in the vocabulary of tokenizer.json's model, in place."""
        names, vocabulary = self._aliases, model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
        else:  # Unigram: pairs of token and score
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if isinstance(unknown := model.get("unk_token"), str):
            model["unk_token"] = names.get(unknown, unknown)


def _stamp(tokenizer: PreTrainedTokenizerBase) -> tuple[int, tuple[str, ...]]:
    """Changes when special tokens are added, or named otherwise."""
    return len(tokenizer), tuple(map(str, tokenizer.all_special_tokens))


def _texts(value: object) -> Iterator[str]:
    """Every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple | np.ndarray):
        for item in value:
            yield from _texts(item)


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
    chat, encode = _escaped(tokenizer, messages)
    if not tokenizer.chat_template:
        ids = encode(plain_lines(chat), add_special_tokens=True)
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
    return encode(render(tokenizer, chat, tools, True), add_special_tokens=False)


def _escaped(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[dict[str, Any]], Callable[..., list[int]]]:
    """Messages with stand-ins for control tokens that they spell, and what encodes their text."""
    control, chat = control_tokens(tokenizer), [dict(message) for message in messages]
    if control.spelled_in(messages):
        return control.stand_in(chat), control.encode
    return chat, tokenizer.encode


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
    """Encode a whole conversation, as the reward `reward_model` reads it, without padding tokens.

    A tokenizer without a chat template gets the last prompt and the response on lines of their own.
    """
    _check_roles(tokenizer, messages)
    chat, encode = _escaped(tokenizer, messages)
    if tokenizer.chat_template:
        ids = encode(render(tokenizer, chat, (), False), add_special_tokens=False)
    else:
        text = "\n".join(str(message["content"]) for message in chat[-2:])
        ids = encode(text, add_special_tokens=True)
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    return ids


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
    """Encode the prompts of the table `name`, whose rows have these `numbers`.

    Raises DataError that names the first row which the chat template refuses, and ModelError for a
    template that is wrong by itself.
    """
    return [
        encode_row(tokenizer, prompt, f"{name}, row {i}")
        for i, prompt in zip(numbers, prompts, strict=False)
    ]


def encode_short_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[Message]],
    limit: int,
    name: str,
    numbers: Iterable[int] = FROM_0,
) -> list[list[int] | None]:
    """Encode prompts as `encode_prompts` does; None for one of more than `limit` tokens."""
    # Megabytes would take minutes to encode.
    max_characters = 4 * limit * max(map(len, tokenizer.get_vocab()), default=1)
    encoded: list[list[int] | None] = []
    for i, prompt in zip(numbers, prompts, strict=False):
        where = f"{name}, row {i}"
        too_long = sum(len(message["content"]) for message in prompt) > max_characters
        if too_long and tokenizer.chat_template:  # which may leave messages out
            with refusals(tokenizer, where):
                too_long = len(render(tokenizer, prompt, (), True)) > max_characters
        ids = [] if too_long else encode_row(tokenizer, prompt, where)
        encoded.append(None if too_long or len(ids) > limit else ids)
    return encoded


def encode_row(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Message], where: str
) -> list[int]:
    """Encode a row's prompt as `encode_prompt` does; errors begin with `where`."""
    with refusals(tokenizer, where):
        ids = encode_prompt(tokenizer, prompt)
        if not ids:
            raise ValueError("it makes no tokens of it")
        return ids


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


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, continues: bool = False
) -> list[int]:
    """Encode a prompt in the model's own format, in which control tokens are control tokens.

    One that `continues` another gets no start token.
    """
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=not continues)]


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode what the assistant says, and the end token; one that the text spells is text."""
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
    """The token that ends a response; ModelError where none is defined."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token; set eos_token in its "
            "tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_config: object = None
) -> tuple[int, ...]:
    """The tokens at which sampling stops, ascending: the tokenizer's end token and a model's.

    `model_config` is a transformers model or generation config.
    """
    extra = getattr(model_config, "eos_token_id", None)
    extra = [] if extra is None else [extra] if isinstance(extra, int) else extra
    return tuple(sorted({end_token_id(tokenizer), *map(int, extra)}))


_TURN = "SampledTurn7f3a"  # what the policy is made to have said
_BEFORE = {"role": "user", "content": "?"}
_TURN_OF_TEXT: Message = {"role": "assistant", "content": _TURN}
# For a template in which tools answer only to calls; Mistral's wants ids of nine characters.
_FUNCTION = {"name": "tool", "arguments": {"text": _TURN}}
_CALL = {"type": "function", "id": "call00000", "function": _FUNCTION}
_TURN_OF_A_CALL: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    ended_by: int | None,
    stop_ids: Sequence[int],
    tools: Sequence[Mapping[str, object]] = (),
) -> list[int]:
    """Ids that follow a sampled turn: its end, `messages`, and the start of the next turn.

    `ended_by` is the stop token that was sampled last (one of `stop_ids`), None for a turn that a
    length limit cut: it gets the template's end of turn. A stop token that was sampled is not
    written again, whichever it was. Raises DataError where the template refuses the messages.
    """
    chat, encode = _escaped(tokenizer, messages)
    if tokenizer.chat_template:
        with refusals(tokenizer, "messages after a turn"):
            text = _after_turn(tokenizer, chat, stop_ids, tools)
    else:
        text = "\n" + plain_lines(chat)
    ids = encode(text, add_special_tokens=False)
    if not tokenizer.chat_template and ended_by is None:
        return [tokenizer.eos_token_id, *ids] if tokenizer.eos_token_id is not None else ids
    if ended_by is not None and ids and ids[0] in stop_ids:
        return ids[1:]
    return ids


def _after_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    stop_ids: Sequence[int],
    tools: Sequence[Mapping[str, object]],
) -> str:
    """What the template writes from the end token of a turn on."""
    stops = [str(token) for token in tokenizer.convert_ids_to_tokens(list(stop_ids))]
    problem: Exception | None = None
    for turn in (_TURN_OF_TEXT, _TURN_OF_A_CALL):
        try:
            alone = render(tokenizer, [_BEFORE, turn], tools, False)
            followed = render(tokenizer, [_BEFORE, turn, *messages], tools, True)
        except Exception as error:  # a template is code of the model's authors
            problem = problem or error
            continue
        if _TURN not in alone or _TURN not in followed:
            continue
        tail, rest = alone.rpartition(_TURN)[2], followed.rpartition(_TURN)[2]
        ends = [tail.find(stop) for stop in stops if stop in tail]
        if ends:
            return rest[min(ends) :]
        if turn is _TURN_OF_TEXT:
            return rest  # a template without an end token
    if problem is not None:
        raise problem
    raise DataError("the chat template leaves out what the assistant said")
