"""Texts of single tokens: one after the other they are the completion's text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_batches import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.samples.writer import TokenTexts

WORDS = st.text(st.sampled_from("a1 é€😀\n<&‮"), max_size=12)


@given(WORDS)
def test_texts_of_tokens_add_up(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    found = TokenTexts(tokenizer())(ids)
    assert len(found) == len(ids)
    assert "".join(found) == text


def test_a_character_of_several_tokens_is_the_first_one_s() -> None:
    ids = tokenizer().encode("1€2", add_special_tokens=False)
    assert TokenTexts(tokenizer())(ids) == ["1", "€", "", "", "2"]


@pytest.mark.parametrize("cut", [1, 2])
def test_half_a_character_stays_broken(cut: int) -> None:
    ids = tokenizer().encode("€", add_special_tokens=False)[:cut]
    assert TokenTexts(tokenizer())([*ids, *tokenizer().encode("1", add_special_tokens=False)]) == [
        "�"
    ] * cut + ["1"]


def test_special_tokens_and_unknown_numbers_can_be_seen() -> None:
    end = tokenizer().eos_token_id
    assert TokenTexts(tokenizer())([end, 10**6]) == [tokenizer().eos_token, "<1000000>"]


def test_spaces_of_sentencepiece_are_kept() -> None:
    backend = Tokenizer(models.WordLevel({"▁the": 0, "▁sum": 1, "s": 2}, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert TokenTexts(words)([0, 1, 2]) == [" the", " sum", "s"]
