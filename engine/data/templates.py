"""Messages and responses to tokens and back: the one place that knows chat templates.

`turn_format` states, by rendering a template, what its generation prompt opens of the assistant's
turn and what ends one. `encode_turn` is a turn as it is learned, after the prompt that the policy
will see. `encode_continuation` makes the tokens that follow a sampled turn, which keeps its ids:
encoding it again could change them (BPE is no bijection).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.data.chat_template import (
    MARKERS,
    Message,
    check_roles,
    check_tools_shown,
    marked_parts,
    plain_lines,
    refusals,
    render,
)
from engine.data.collate import SFTExample
from engine.data.control_tokens import control_tokens
from engine.data.rows import answered_messages, is_continued
from engine.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] = (),
) -> list[int]:
    """Encode chat messages up to where the assistant speaks.

    Where the last message is the assistant's, its text begins the turn. `tools` are JSON schemas. A
    tokenizer without a chat template gets plain text, "Question: …\\nAnswer:", and no tools. Raises
    DataError for a role that neither `ROLES` nor the template has, and for an empty text.
    """
    check_roles(tokenizer, messages)
    chat, encode = _escaped(tokenizer, messages)
    if not tokenizer.chat_template:
        ids = encode(plain_lines(chat), add_special_tokens=True)
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
    return encode(_generation_text(tokenizer, chat, tools), add_special_tokens=False)


def _generation_text(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
) -> str:
    """The template's text up to where the assistant speaks, or goes on."""
    before = answered_messages(chat)
    if chat and not before:
        raise DataError("a prompt is the assistant's message alone; put the user's before it")
    text = render(tokenizer, before, tools, True)
    for begun in chat[len(before) :]:
        _check_plain(begun)
        opening = turn_format(tokenizer).opening
        text += _after_opening(opening, str(begun["content"]), is_whole=False)
    if not text:
        raise DataError("the chat template makes no tokens of the prompt; change its messages")
    return text


def _escaped(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[dict[str, object]], Callable[..., list[int]]]:
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


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] = (),
) -> list[int]:
    """Encode a whole conversation, as the reward `reward_model` reads it, without padding tokens.

    A tokenizer without a chat template gets the last prompt and the response on lines of their own.
    """
    check_roles(tokenizer, messages)
    chat, encode = _escaped(tokenizer, messages)
    if tokenizer.chat_template:
        text = render(tokenizer, chat, tools, False)
        check_tools_shown(text, tools)
        if str(chat[-1].get("reasoning_content") or "").strip() not in text:
            raise _thought_left_out()
        ids = encode(text, add_special_tokens=False)
    else:
        _check_plain(messages[-1])
        text = "\n".join(str(message["content"]) for message in chat[-2:])
        ids = encode(text, add_special_tokens=True)
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    return ids


def encode_steps(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    steps: Sequence[str],
    separator: str,
    tools: Sequence[Mapping[str, object]] = (),
) -> tuple[list[int], list[int]]:
    """Encode a conversation whose response are `steps`, joined by `separator`.

    Returns its tokens, as `encode_conversation`, and the index of each step's last one.
    """

    def encode(*texts: str) -> list[int]:
        answer = {"role": "assistant", "content": separator.join(texts)}
        return encode_conversation(tokenizer, [*prompt, answer], tools)

    ids = encode(*steps)
    begins = (encode(*steps[:i], "") for i in range(1, len(steps)))
    return ids, [*(common_length(ids, begin) - 1 for begin in begins), len(ids) - 1]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[Message]],
    name: str,
    numbers: Sequence[int] = (),
) -> list[list[int]]:
    """Encode the prompts of the table `name`, whose rows have these `numbers`; without any: from 0.

    Raises DataError that names the first row which the chat template refuses, and ModelError for a
    template that is wrong by itself.
    """
    encoded = encode_short_prompts(tokenizer, prompts, 1 << 40, name, numbers)
    return [ids for ids in encoded if ids is not None]


def encode_short_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[Message]],
    limit: int,
    name: str,
    numbers: Sequence[int] = (),
) -> list[list[int] | None]:
    """Encode prompts as `encode_prompts` does; None for one of more than `limit` tokens."""
    # Megabytes would take minutes to encode.
    max_characters = 4 * limit * max(map(len, tokenizer.get_vocab()), default=1)
    encoded: list[list[int] | None] = []
    for i, prompt in enumerate(prompts):
        with refusals(tokenizer, f"{name}, row {numbers[i] if numbers else i}"):
            characters = sum(len(message["content"]) for message in prompt)
            if characters > max_characters and tokenizer.chat_template:  # it may leave some out
                characters = len(render(tokenizer, prompt, (), True))
            ids = encode_prompt(tokenizer, prompt) if characters <= max_characters else None
        encoded.append(None if ids is None or len(ids) > limit else ids)
    return encoded


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, continues: bool = False
) -> list[int]:
    """Encode a prompt in the model's own format; one that `continues` another gets no start."""
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=not continues)]


def encode_response(
    tokenizer: PreTrainedTokenizerBase, text: str, *, continues: bool = False
) -> list[int]:
    """Encode what the assistant says after a prompt, and its end; a token that it spells is text.

    What the template has opened (`<think>`) is not written again; a thought that the text doesn't
    have is closed. `continues`: the prompt has begun the text itself. Raises DataError for a
    thought after a prompt that has closed it.
    """
    said = text if continues else _after_opening(turn_format(tokenizer).opening, text)
    end, control = end_token_id(tokenizer), control_tokens(tokenizer)
    if control.spelled_in(said):
        return [*control.encode(control.stand_in(said)), end]
    return [*map(int, tokenizer.encode(said, add_special_tokens=False)), end]


def encode_turn(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    message: Message,
    tools: Sequence[Mapping[str, object]] = (),
) -> SFTExample:
    """The tokens of a prompt, and of the assistant's message after it as a policy samples them.

    They are what the template writes of it after the generation prompt, to its end token; outside
    of the template's {% generation %} they are not learned. Raises DataError as `encode_prompt` and
    `encode_response` do, and where the template leaves out what the message holds besides.
    """
    if is_continued(before) or not tokenizer.chat_template:  # which no template writes
        _check_plain(message)
        ids = encode_response(tokenizer, message["content"], continues=is_continued(before))
        return SFTExample(encode_prompt(tokenizer, before), ids, [True] * len(ids))
    check_roles(tokenizer, [*before, message])
    turns = turn_format(tokenizer)
    chat, encode = _escaped(tokenizer, [*before, message])
    opened = _generation_text(tokenizer, chat[:-1], tools)
    prompt = encode(opened, add_special_tokens=False)
    written = render(tokenizer, chat, tools, False)
    check_tools_shown(written, tools)
    rest = _rest_of_turn(turns, opened, written, chat[-1])
    end = max((rest.rfind(end) + len(end) for end in turns.ends if end in rest), default=0)
    more = () if end else (end_token_id(tokenizer),)  # of a template without any
    end = end or len(rest.removesuffix(turns.tail))
    start, ids, learned = len(written) - len(rest), [*prompt], list[bool]()
    is_marked = MARKERS.search(str(tokenizer.chat_template)) and written.endswith(rest)
    spans = marked_parts(tokenizer, chat, tools, start, end) if is_marked else [(0, end, True)]
    for first, last, learn in spans:
        # After the text before it, as the first token of a text may be another (SentencePiece).
        whole = encode(opened + rest[:last], add_special_tokens=False)
        joins = whole[: len(ids)] == ids
        part = whole[len(ids) :] if joins else encode(rest[first:last], add_special_tokens=False)
        ids, learned = ids + part, learned + [learn] * len(part)
    return SFTExample(prompt, [*ids[len(prompt) :], *more], learned + [True] * len(more))


def _check_plain(message: Message) -> None:
    """Refuse what only a template could write."""
    more = [name for name in ("tool_calls", "reasoning_content") if message.get(name)]
    if more:
        raise DataError(
            f"the assistant's message has {more[0]}, which needs a chat template and a turn that "
            "the prompt has not begun; remove it"
        )


def _rest_of_turn(turns: TurnFormat, opened: str, written: str, message: Message) -> str:
    """Return what follows the prompt `opened` in `written`, a conversation with its answer."""
    content, thought = str(message["content"] or ""), str(message.get("reasoning_content") or "")
    answer = content.rpartition(_END_OF_THOUGHT)[2].strip()
    if message.get("tool_calls") and answer not in written:
        raise DataError("the chat template leaves out content of a turn with tool_calls; remove it")
    if written.startswith(opened):
        rest = written.removeprefix(opened)
    else:
        head = opened[: len(opened) - len(turns.opening)]
        if not written.startswith(head):
            raise DataError(
                "the chat template doesn't write an answer after what it writes for one to come; "
                "give the model another template"
            )
        rest = written.removeprefix(head)
        if _END_OF_THOUGHT in content and _END_OF_THOUGHT not in rest:  # it leaves thoughts out
            if not message.get("tool_calls"):
                return _after_opening(turns.opening, content + turns.tail)
            thought = content.partition(_END_OF_THOUGHT)[0].replace(_THOUGHT, "", 1)
    if thought.strip() in rest:
        return rest if written.startswith(opened) else _after_opening(turns.opening, rest)
    if _THOUGHT not in turns.opening:
        raise _thought_left_out()
    return _after_opening(
        turns.opening, f"{_THOUGHT}\n{thought.strip()}\n{_END_OF_THOUGHT}\n\n{rest.lstrip()}"
    )


_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


def _thought_left_out() -> DataError:
    return DataError(
        "the chat template leaves out reasoning_content; write it into content as "
        f"{_THOUGHT}…{_END_OF_THOUGHT}, or give the model another template"
    )


def _after_opening(opening: str, text: str, *, is_whole: bool = True) -> str:
    """Return a turn's text after the `opening` of its prompt; close a thought that it lacks."""
    begun, bare = text.lstrip(), opening.strip()
    if not bare:
        return text
    if begun.startswith(opening):
        return begun.removeprefix(opening)
    if begun.startswith(bare):
        return begun.removeprefix(bare).lstrip("\n")
    if _END_OF_THOUGHT in opening:
        if empty := _EMPTY_THOUGHT.match(text):
            return text[empty.end() :]
        if begun.startswith(_THOUGHT):
            raise DataError(
                "the assistant thinks in it, and the chat template's generation prompt has closed "
                "the thought; remove enable_thinking=false from the template's variables, or the "
                "thought"
            )
    elif is_whole and _THOUGHT in opening and _END_OF_THOUGHT not in text:
        return f"\n{_END_OF_THOUGHT}\n\n{text}"
    return text


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """What a chat template writes around what the assistant says."""

    header: str  # between the user's words and the turn, e.g. "<|end|><|assistant|>"
    opening: str  # of the turn itself, in the generation prompt already, e.g. "<think>\n"
    tail: str  # after what the assistant says, e.g. "<|im_end|>\n"
    ends: tuple[str, ...]  # tokens that end a turn, of words and of tool calls
    end_ids: tuple[int, ...]  # the same as ids; without any in the template the tokenizer's eos
    start_id: int | None = None  # the token that the header begins with, if it is a control token


_formats: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, TurnFormat]] = (
    WeakKeyDictionary()
)


def turn_format(tokenizer: PreTrainedTokenizerBase) -> TurnFormat:
    """What a tokenizer's template opens of the assistant's turn, and what ends one.

    Both are found by rendering it, once for a tokenizer; a template that refuses a question and an
    answer opens nothing, and its turns end with the tokenizer's eos.
    """
    stamp = (control_tokens(tokenizer).stamp, str(tokenizer.chat_template))
    known = _formats.get(tokenizer)
    if known is None or known[0] != stamp:
        known = _formats[tokenizer] = (stamp, _rendered_format(tokenizer))
    return known[1]


def _rendered_format(tokenizer: PreTrainedTokenizerBase) -> TurnFormat:
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    if not tokenizer.chat_template:
        return TurnFormat("Answer:", "", "", (), eos)
    asked = _rendered(tokenizer, [_QUESTION], True)
    answered = _rendered(tokenizer, [_QUESTION, _TURN_OF_TEXT], False)
    continued = _rendered(tokenizer, [_QUESTION, _TURN_OF_TEXT, _BEFORE], True)
    if _ASKED not in asked or _TURN not in answered:
        return TurnFormat("", "", "", (), eos)
    before = asked.rpartition(_ASKED)[2]
    texts = (text for text in (answered, continued) if _TURN in text)
    headers = (text.partition(_ASKED)[2].partition(_TURN)[0] for text in texts)
    header = before[: common_length(before, *headers)].partition(_THOUGHT)[0]
    tail = answered.rpartition(_TURN)[2]
    ends = _turn_ends(tokenizer, tail)
    header_ids = tokenizer.encode(header, add_special_tokens=False)
    return TurnFormat(
        header,
        before.removeprefix(header),
        tail,
        tuple(str(token) for token in tokenizer.convert_ids_to_tokens(ends)),
        tuple(ends) or eos,
        next((i for i in header_ids[:1] if i in tokenizer.added_tokens_decoder), None),
    )


def _turn_ends(tokenizer: PreTrainedTokenizerBase, tail: str) -> list[int]:
    """The tokens that end a turn of words, which `tail` follows, and one of tool calls."""
    added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if i != tokenizer.unk_token_id}
    ends = [i for i in tokenizer.encode(tail, add_special_tokens=False) if i in added][:1]
    called = _rendered(tokenizer, [_QUESTION, _TURN_OF_A_CALL], False).rpartition(_TURN)
    ids = tokenizer.encode(called[2], add_special_tokens=False) if called[1] else []
    # Control tokens may close the list of calls before the one that ends the turn.
    special = [i for i in ids if i in added and added[i].special]
    return ends if set(special) & set(ends) else [*ends, *special[-1:]]


def common_length(*sequences: Sequence[object]) -> int:
    """How many items, e.g. tokens, all sequences begin with in common."""
    same = takewhile(lambda items: len({*items}) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in same)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool
) -> str:
    """The template's text, empty where it refuses the messages."""
    try:
        return render(tokenizer, messages, (), add_generation_prompt)
    except Exception:  # a template is code of the model's authors; `refusals` says why, of a row
        return ""


def opened_text(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    """What a prompt has written of the assistant's turn already, e.g. "<think>\\n"."""
    turns = turn_format(tokenizer)
    if not turns.header:
        return ""
    text = decode_response(tokenizer, _last_header(turns, prompt_ids), keep_control=True)
    opened = text.rpartition(turns.header)[2] if turns.header in text else ""
    return "" if any(end in opened for end in turns.ends) else opened


def _last_header(turns: TurnFormat, prompt_ids: Sequence[int]) -> list[int]:
    """The end of a prompt, so that no long one is decoded: from its last header on."""
    ids = list(prompt_ids)
    start = ids[::-1].index(turns.start_id) + 1 if turns.start_id in ids else len(ids)
    return ids[len(ids) - start :]


def turn_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    *,
    keep_control: bool = False,
) -> str:
    """The text of a whole turn: what its prompt has opened, and what was sampled after it."""
    said = decode_response(tokenizer, ids, keep_control=keep_control)
    opened = opened_text(tokenizer, prompt_ids)
    if not opened:
        return said
    before = _last_header(turn_format(tokenizer), prompt_ids)
    start, whole = (
        decode_response(tokenizer, tokens, keep_control=keep_control)
        for tokens in (before, [*before, *ids])
    )
    # Decoded alone, a text may lose the space that it begins with.
    return opened + (whole.removeprefix(start) if whole.startswith(start) else said)


def decode_response(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, keep_control: bool = False
) -> str:
    """Return the text of sampled tokens, special tokens removed unless they are kept."""
    text = tokenizer.decode(
        list(ids), skip_special_tokens=not keep_control, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a response, the template's or else the tokenizer's; or ModelError."""
    ends = turn_format(tokenizer).end_ids
    if not ends:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token; set eos_token in its "
            "tokenizer_config.json"
        )
    return ends[0]


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_config: object = None
) -> tuple[int, ...]:
    """The tokens at which sampling stops, ascending: the template's, the tokenizer's and a model's.

    `model_config` is a transformers model or generation config. Raises as `end_token_id` does.
    """
    extra = getattr(model_config, "eos_token_id", None)
    extra = [] if extra is None else [extra] if isinstance(extra, int) else extra
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ends = (end_token_id(tokenizer), *turn_format(tokenizer).end_ids)
    return tuple(sorted({*ends, *eos, *map(int, extra)}))


def add_stop_tokens(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let whoever samples by a generation config stop at the end of a turn, in place."""
    ends = turn_format(tokenizer).end_ids if tokenizer.chat_template else ()
    known = config.eos_token_id
    if not {*ends} <= ({known} if isinstance(known, int) else {*(known or ())}):
        config.eos_token_id = list(stop_token_ids(tokenizer, config))


_TURN = "SampledTurn7f3a"  # what the policy is made to have said
_ASKED = "AskedBefore5c1e"
_QUESTION: Message = {"role": "user", "content": _ASKED}
_BEFORE: Message = {"role": "user", "content": "?"}
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
        return [*turn_format(tokenizer).end_ids[:1], *ids]
    return ids[1:] if ended_by is not None and ids and ids[0] in stop_ids else ids


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
