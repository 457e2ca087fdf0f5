"""What single tokens read as, so that those of a completion one after the other are its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a UTF-8 character, and so at most its tokens
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark of a space before a word


class TokenTexts:
    """Texts of tokens by a tokenizer of transformers; each token is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text a token. A character of several tokens is the first one's; theirs are empty."""
        alone = [self._alone(token) for token in ids]
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            texts.append(alone[start])
            if _BROKEN not in alone[start]:
                continue
            for end in range(start + 2, min(start + _LONGEST, len(ids)) + 1):
                together = self._decode(ids[start:end])
                if _BROKEN not in together:
                    texts[-1:] = [together, *[""] * (end - start - 1)]
                    break
        return texts

    def _alone(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token]) or f"<{token}>"
        return self._known[token]

    def _decode(self, ids: Sequence[int]) -> str:
        text = str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        # SentencePiece's decoders strip the space of a text's first word.
        spaced = str(self._tokenizer.convert_ids_to_tokens(int(ids[0]))).startswith(_WORD_START)
        return f" {text}" if spaced and not text.startswith(" ") else text
