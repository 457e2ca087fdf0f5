"""A language model as a reward model: the log-probs that its training sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import TINY_MODEL, write_tiny_folder

from engine.data.templates import encode_prompt, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.errors import RewardError
from engine.models import build_model, load_model, save_model
from engine.rewards.model_based import likelihood

TEXTS = ["4", "four, which is 2+2", "5", "<|end|>"]
USER = {"role": "user", "content": "2+2?"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with one tokenizer."""
    place = tmp_path_factory.mktemp("likelihood")
    first = write_tiny_folder(place / "first")
    tokenizer = load_tokenizer(first)
    other = build_model(TINY_MODEL, tokenizer, seed=1)
    return [first, save_model(other, tokenizer, place / "second")]


def exact(folder: Path, text: str) -> torch.Tensor:
    """Log-probs of the tokens that training gives a response."""
    tokenizer = load_tokenizer(folder)
    prompt, answer = encode_prompt(tokenizer, [USER]), encode_response(tokenizer, text)
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = load_model(folder)(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    found = logits.double().log_softmax(1).gather(1, torch.tensor(answer)[:, None])
    return found[:, 0]


def scores(texts: list[str], **options: Any) -> list[float]:
    return likelihood(["2+2?"] * len(texts), texts, **options)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_it_is_the_log_prob_that_training_sees(folders: list[Path], batch_size: int) -> None:
    one, two = map(str, folders)
    own = {"model": one, "batch_size": batch_size}
    logs = [exact(folders[0], text) for text in TEXTS[:3]]
    assert scores(TEXTS[:3], **own) == pytest.approx([float(x.sum()) for x in logs], abs=1e-4)
    means = [2 * float(x.mean()) for x in logs]
    assert scores(TEXTS[:3], beta=2.0, per_token=True, **own) == pytest.approx(means, abs=1e-4)
    ratios = [
        float(x.sum() - exact(folders[1], t).sum()) for x, t in zip(logs, TEXTS, strict=False)
    ]
    assert scores(TEXTS[:3], reference=two, **own) == pytest.approx(ratios, abs=1e-4)
    assert all(abs(ratio) > 1e-3 for ratio in ratios)


def test_a_completion_can_t_end_itself(folders: list[Path]) -> None:
    early = scores([TEXTS[3]], model=str(folders[0]))[0]
    tokenizer = load_tokenizer(folders[0])
    assert tokenizer.eos_token == TEXTS[3]
    end = float(exact(folders[0], "")[-1])
    assert early < end - 1.0  # its letters are tokens of text, and cost something


def test_what_has_no_log_prob_is_refused(folders: list[Path], tmp_path: Path) -> None:
    longer = "4" * 5000
    for options, text, said in (
        ({}, "4", "needs reward.options.model"),
        ({"model": str(tmp_path)}, "4", "loaded as AutoModelForCausalLM"),
        ({"model": str(folders[0])}, longer, "lower data.max_response_length"),
    ):
        with pytest.raises(RewardError, match=said):
            scores([text], **options)
