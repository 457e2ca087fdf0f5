"""Messages and responses to tokens and back: the one place that knows chat templates.

Padding and batching are elsewhere; training a tokenizer is in `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # e.g. {"role": "user", "content": "What is 2+3?"}


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Encode chat messages up to where the assistant speaks.

    A tokenizer without a chat template gets plain text, "Question: …\\nAnswer:", with the
    tokenizer's own start token where it has one.
    """
    if tokenizer.chat_template:
        ids: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return [int(i) for i in ids]
    ids = tokenizer.encode(_plain_text(messages), add_special_tokens=True)
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return [int(i) for i in ids]


def _plain_text(messages: Sequence[Message]) -> str:
    labels = {"user": "Question: ", "assistant": "Answer: "}
    lines = [labels.get(m["role"], "") + m["content"] for m in messages]
    return "\n".join([*lines, "Answer:"])


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode what the assistant says; the end token comes once, at the end."""
    end = end_token_id(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [int(i) for i in ids if i != end] + [end]


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


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_config: Any = None) -> tuple[int, ...]:
    """Return the tokens at which sampling stops, ascending.

    They are the tokenizer's end token and those that `model_config` (a transformers model or
    generation config) names; chat models often have more than one.
    """
    stops = {end_token_id(tokenizer)}
    extra = getattr(model_config, "eos_token_id", None)
    if extra is not None:
        stops.update([extra] if isinstance(extra, int) else extra)
    return tuple(sorted(int(i) for i in stops))
