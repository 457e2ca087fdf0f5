import pytest
from transformers import PreTrainedTokenizerFast

from engine.data.tokenizer import train_tokenizer
from engine.data.word_problems import deal_problems, worked_answer


@pytest.fixture(scope="session")
def arithmetic_texts() -> list[str]:
    problems = deal_problems({"train": 1500}, 2, seed=0)["train"]
    return [p.question for p in problems] + [worked_answer(p) for p in problems]


@pytest.fixture(scope="session")
def tokenizer(arithmetic_texts: list[str]) -> PreTrainedTokenizerFast:
    return train_tokenizer(arithmetic_texts, vocab_size=512)
