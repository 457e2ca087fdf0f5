import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer
from engine.errors import ConfigError, ModelError

TRAIN = """
import json, sys
from engine.data.tokenizer import train_tokenizer
train_tokenizer(json.load(open(sys.argv[1])), 400).save_pretrained(sys.argv[2])
"""


def tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))


def test_digits_are_single_and_marks_compact(tokenizer: PreTrainedTokenizerFast) -> None:
    worked = "<<23+14=37>>37\n#### 37"
    assert tokens(tokenizer, worked) == [
        *["<<", "2", "3", "+", "1", "4", "=", "3", "7", ">>", "3", "7"],
        *["Ċ", "####Ġ", "3", "7"],
    ]
    multi_digit = [t for t in tokenizer.get_vocab() if sum(c.isdigit() for c in t) > 1]
    assert multi_digit == []


def test_problems_are_short(
    tokenizer: PreTrainedTokenizerFast, arithmetic_texts: list[str]
) -> None:
    half = len(arithmetic_texts) // 2
    questions = [len(tokenizer.encode(t)) for t in arithmetic_texts[:half]]
    answers = [len(tokenizer.encode(t)) for t in arithmetic_texts[half:]]
    assert max(questions) <= 35
    assert max(answers) <= 35


@given(text=st.text(max_size=40))
def test_every_text_survives_a_round_trip(text: str) -> None:
    tokenizer = ROUND_TRIP
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


ROUND_TRIP = train_tokenizer(["a b 1 2", "#### 5"], vocab_size=280)


def test_vocabulary_size_is_a_limit_and_ids_are_dense(arithmetic_texts: list[str]) -> None:
    tokenizer = train_tokenizer(arithmetic_texts, vocab_size=300)
    assert len(tokenizer) == 300
    assert sorted(tokenizer.get_vocab().values()) == list(range(300))
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.vocab_size=100 is too small.*260"):
        train_tokenizer(["a"], vocab_size=100)


@pytest.mark.slow
def test_the_same_texts_give_the_same_files_in_every_process(
    tmp_path: Path, arithmetic_texts: list[str]
) -> None:
    (tmp_path / "texts.json").write_text(json.dumps(arithmetic_texts))
    subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "texts.json"), str(tmp_path / "there")],
        env={**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    train_tokenizer(arithmetic_texts, 400).save_pretrained(tmp_path / "here")
    here = {f.name: f.read_bytes() for f in (tmp_path / "here").iterdir()}
    assert "tokenizer.json" in here
    assert here == {f.name: f.read_bytes() for f in (tmp_path / "there").iterdir()}


def test_saved_folder_loads_everywhere(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Tom has 23 apples."}]
    expected = tokenizer.apply_chat_template(messages, return_dict=False)
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.apply_chat_template(messages, return_dict=False) == expected
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
        assert loaded.padding_side == "left"
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    load_tokenizer(tmp_path).save_pretrained(tmp_path / "again")
    again = (tmp_path / "again" / "tokenizer.json").read_bytes()
    assert hashlib.sha256(again).hexdigest() == digest


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    bare = train_tokenizer(["a b c"], vocab_size=270)
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == bare.eos_token_id


def test_missing_and_broken_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ModelError, match="can't be loaded"):
        load_tokenizer(tmp_path)
