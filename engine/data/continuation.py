"""The tokens that messages add after a turn of the policy; those of the turn are never made again.

A conversation goes on as: what was sampled, then what the chat template writes from the end of that
turn to where the policy speaks again. The template is asked about a stand-in for the turn, so that
nothing of what was sampled is decoded and encoded, which would change ids (BPE is no bijection).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.data.control_tokens import control_tokens
from engine.data.templates import Message, plain_lines, refusals, render
from engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, object]]

_TURN = "SampledTurn7f3a"  # what the policy is made to have said
_BEFORE = {"role": "user", "content": "?"}
_SAID: Message = {"role": "assistant", "content": _TURN}
# For a template in which tools answer only to calls; Mistral's wants ids of nine characters.
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call00000",
            "function": {"name": "tool", "arguments": {"text": _TURN}},
        }
    ],
}


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    ended_by: int | None,
    stop_ids: Sequence[int],
    tools: Tools = (),
) -> list[int]:
    """Ids that follow a sampled turn: its end, `messages`, and the start of the next turn.

    `ended_by` is the stop token that was sampled last (one of `stop_ids`), None for a turn that a
    length limit cut: it gets the template's end of turn. A stop token that was sampled is not
    written again, whichever it was. Raises DataError where the template refuses the messages.
    """
    control = control_tokens(tokenizer)
    escape = control.spelled_in(messages)
    chat: Sequence[Message] = [dict(message) for message in messages]
    if escape:
        chat = control.stand_in(chat)
    if tokenizer.chat_template:
        with refusals(tokenizer, "messages after a turn"):
            text = _after_turn(tokenizer, chat, stop_ids, tools)
    else:
        text = "\n" + plain_lines(chat)
    encode: Callable[..., list[int]] = control.encode if escape else tokenizer.encode
    ids = [int(i) for i in encode(text, add_special_tokens=False)]
    if not tokenizer.chat_template and ended_by is None:
        return [tokenizer.eos_token_id, *ids] if tokenizer.eos_token_id is not None else ids
    if ended_by is not None and ids and ids[0] in stop_ids:
        return ids[1:]
    return ids


def _after_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    stop_ids: Sequence[int],
    tools: Tools,
) -> str:
    """What the template writes from the end token of a turn on."""
    stops = [str(token) for token in tokenizer.convert_ids_to_tokens(list(stop_ids))]
    problem: Exception | None = None
    for turn in (_SAID, _CALLED):
        try:
            alone = render(tokenizer, [_BEFORE, turn], tools, False)
            whole = render(tokenizer, [_BEFORE, turn, *messages], tools, True)
        except Exception as error:  # a template is code of the model's authors
            problem = problem or error
            continue
        tail, rest = _behind_turn(alone), _behind_turn(whole)
        if tail is None or rest is None:
            continue
        ends = [tail.find(stop) for stop in stops if stop in tail]
        if ends:
            return rest[min(ends) :]
        if turn is _SAID:
            return rest  # a template without an end token
    if problem is not None:
        raise problem
    raise DataError("the chat template leaves out what the assistant said")


def _behind_turn(text: str) -> str | None:
    """The text behind the stand-in; None where it was left out."""
    return text.rpartition(_TURN)[2] if _TURN in text else None
