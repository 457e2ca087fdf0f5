"""Text that spells a control token, such as `<|im_end|>`: found, and encoded as plain text.

A tokenizer reads the spelling of a special token as the token, no matter who wrote it. So what
people, tools and models wrote is told apart from what the chat template writes, and which rows
with such spellings a run takes (`data.control_tokens`) is decided here. Templates are in
`templates`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from tokenizers import Tokenizer

from engine.data.rows import row_numbers
from engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENCODED = ("prompt", "response", "chosen", "rejected", "completion")  # columns that become tokens
_known: WeakKeyDictionary[PreTrainedTokenizerBase, ControlTokens] = WeakKeyDictionary()


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """The control tokens of a tokenizer, read once."""
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

    Of chat messages all texts count, those of tool calls too. With policy "fail" such rows raise
    DataError, which calls them by `numbers` (without any: from 0); "escape" and "drop" are the
    caller's to carry out.
    """
    control = control_tokens(tokenizer)
    found = [
        i
        for i, row in enumerate(rows)
        if any(control.spelled_in(row[name]) for name in _ENCODED if name in row)
    ]
    if found and policy == "fail":
        shown = row_numbers([numbers[i] if numbers else i for i in found])
        raise DataError(
            f"{where}: {len(found)} of {len(rows)} rows ({shown}) spell control tokens of the "
            f"model such as {control.example(rows[found[0]])!r} in their text; correct them, or "
            "set data.control_tokens to escape (keep it as text) or drop"
        )
    return found


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
        found = (m[0] for text in _texts(value) for m in self._spelled.finditer(text))
        return next(found, next(iter(self.ids)))

    def stand_in(self, value: object) -> Any:
        """`value` with stand-ins for the control tokens that its texts spell."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: self._stand_ins[found[0]], value)
        if isinstance(value, Mapping):
            return {self.stand_in(key): self.stand_in(item) for key, item in value.items()}
        if isinstance(value, list | tuple | np.ndarray):
            return [self.stand_in(item) for item in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode text with stand-ins: they become the text that they stand for, never a token.

        Raises DataError for a tokenizer that can't tell the two apart.
        """
        originals = {stand_in: spelling for spelling, stand_in in self._stand_ins.items()}
        text = self._spelled.sub(lambda found: self._aliases[found[0]], text)
        text = self._stood_in.sub(lambda found: originals[found[0]], text)
        twin = self._twin = self._twin or self._make_twin()
        return list(twin.encode(text, add_special_tokens=add_special_tokens).ids)

    def _make_twin(self) -> Tokenizer:
        """The same tokenizer, with control tokens that are spelled as their aliases."""
        try:
            spec = json.loads(self._backend.to_str())
            for token in spec["added_tokens"]:
                if alias := self._aliases.get(token["content"]):
                    token.update(content=alias, normalized=False, special=True)
            _rename(spec["model"], self._aliases)
            spec.update(truncation=None, padding=None)
            twin = Tokenizer.from_str(json.dumps(spec))
            kept = all(twin.token_to_id(self._aliases[text]) == i for text, i in self.ids.items())
        except Exception as error:  # a slow tokenizer, or tokenizers' bare Exception
            raise self._inseparable() from error
        if not kept:
            raise self._inseparable()
        return twin

    def _inseparable(self) -> DataError:
        return DataError(
            f"the tokenizer {self._name!r} can't keep control tokens that are spelled in a text "
            "apart from its own; set data.control_tokens=drop to leave such rows out"
        )


def _stamp(tokenizer: PreTrainedTokenizerBase) -> tuple[int, tuple[str, ...]]:
    """Changes when special tokens are added, or named otherwise."""
    return len(tokenizer), tuple(map(str, tokenizer.all_special_tokens))


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in the vocabulary of tokenizer.json's model, in place."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
    else:  # Unigram: pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)


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
