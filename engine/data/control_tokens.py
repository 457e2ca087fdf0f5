"""Control tokens that people, tools and models spell in their texts stay plain text.

A tokenizer reads the spelling of a special token, such as `<|im_end|>`, as the token, no matter who
wrote it: `ControlTokens` finds such spellings and encodes them as plain text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from tokenizers import Tokenizer

from engine.data.cells import row_numbers, texts_of
from engine.data.rows import CONVERSATIONS
from engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    cells = [[row[name] for name in CONVERSATIONS if name in row] for row in rows]
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
        return any(self._spelled.search(t) or self._is_read(t) for t in texts_of(value))

    def _is_read(self, text: str) -> bool:
        """Whether the tokenizer reads a control token of another spelling, e.g. "[sep]"."""
        if not self._normalized or not isinstance(self._backend, Tokenizer):
            return False
        read = set(self._backend.encode(text, add_special_tokens=False).ids)
        return not read.isdisjoint(set(self.ids.values()) - {self._unknown})

    def example(self, value: object) -> str:
        """A control token that is spelled in `value`."""
        spelled = (m[0] for text in texts_of(value) for m in self._spelled.finditer(text))
        return next(spelled, next(iter(self.ids)))

    def removed_from(self, text: str) -> str:
        """The text without the control tokens that it spells."""
        return self._spelled.sub("", text)

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
