"""`HybridActor.generate`: transformers' arguments, tokens, shapes, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_cases import PAD, prompts
from tiny_engine import VOCABULARY
from transformers import GenerationConfig

from engine import HybridActor
from engine.errors import ConfigError, DataError, EngineError, RolloutError

pytestmark = pytest.mark.usefixtures("one_thread")


def frequent(actor: HybridActor) -> list[int]:
    """Two tokens that greedy decoding of `prompts()` reaches in some rows, early in one of them."""
    new = actor.generate(**prompts(), max_new_tokens=12)[:, 9:]
    return [int(new[0, 3]), int(new[2, 7])]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_new_tokens": 12},
        {"max_length": 15},
        {"max_new_tokens": 12, "temperature": 3.0, "top_k": 2},  # greedy pays them no heed
        {"generation_config": GenerationConfig(max_new_tokens=5)},
        {"max_new_tokens": 6, "use_cache": False, "synced_gpus": False, "logits_processor": None},
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    actor: HybridActor, arguments: dict[str, Any]
) -> None:
    expected = actor.policy.generate(**prompts(), **arguments)
    found = actor.generate(**prompts(), **arguments)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pad", [PAD, None])
def test_rows_are_filled_up_after_their_end_token_as_transformers_does(
    actor: HybridActor, pad: int | None
) -> None:
    ends = {"eos_token_id": frequent(actor), "pad_token_id": pad, "max_new_tokens": 12}
    expected = actor.policy.generate(**prompts(), **ends)
    found = actor.generate(**prompts(), **ends)
    assert torch.equal(found, expected)
    filler = ends["eos_token_id"][0] if pad is None else pad
    assert (found[0, 9 + 4 :] == filler).all()  # the row ended: this is filling


def test_output_is_as_wide_as_the_longest_row(actor: HybridActor) -> None:
    whole = actor.generate(**prompts(), max_new_tokens=12)
    early = {"eos_token_id": whole[:, 9 + 2].tolist(), "pad_token_id": PAD}
    expected = actor.policy.generate(**prompts(), **early, max_new_tokens=12)
    found = actor.generate(**prompts(), **early, max_new_tokens=12)
    assert found.shape[1] <= 9 + 3
    assert torch.equal(found, expected)


def test_the_models_own_generation_config_counts_and_arguments_override_it(
    qwen: HybridActor,
) -> None:
    qwen.generation_config.max_length = 14
    qwen.generation_config.eos_token_id = frequent(qwen)[:1]
    assert torch.equal(qwen.generate(**prompts()), qwen.policy.generate(**prompts()))
    longer = {"max_new_tokens": 11, "eos_token_id": None}
    expected = qwen.policy.generate(**prompts(), **longer)
    assert torch.equal(qwen.generate(**prompts(), **longer), expected)
    assert expected.shape == (4, 20)


def test_padding_is_found_without_a_mask_as_transformers_does(qwen: HybridActor) -> None:
    ids = prompts()["input_ids"]
    for arguments in ({}, {"pad_token_id": PAD}, {"pad_token_id": PAD, "eos_token_id": PAD}):
        expected = qwen.policy.generate(ids, max_new_tokens=8, **arguments)
        assert torch.equal(qwen.generate(ids, max_new_tokens=8, **arguments), expected)


def test_without_prompts_it_starts_from_the_bos_token(qwen: HybridActor) -> None:
    expected = qwen.policy.generate(bos_token_id=7, max_new_tokens=5)
    assert torch.equal(qwen.generate(bos_token_id=7, max_new_tokens=5), expected)
    with pytest.raises(DataError, match="BOS"):
        qwen.generate(max_new_tokens=5)


def test_sampling_is_repeated_by_the_global_seed(actor: HybridActor) -> None:
    arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8}
    torch.manual_seed(5)
    first, second = (actor.generate(**prompts(), **arguments) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(actor.generate(**prompts(), **arguments), first)
    assert not torch.equal(first, second)
    assert first.shape == (12, 9 + 8)
    assert torch.equal(first[:, :9], prompts()["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in first[:3].tolist()}) > 1


@pytest.mark.parametrize(
    ("cut", "allowed"), [({"top_k": 3}, 3), ({"top_k": 0, "top_p": 0.3}, None), ({}, 50)]
)
def test_sampling_draws_from_the_tokens_that_transformers_keeps(
    qwen: HybridActor, cut: dict[str, Any], allowed: int | None
) -> None:
    row = prompts(1)["input_ids"]
    torch.manual_seed(0)
    arguments = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 1} | cut
    drawn = qwen.generate(row, num_return_sequences=3000, **arguments)[:, -1]
    kept = qwen.policy.generate(
        row, **arguments, return_dict_in_generate=True, output_scores=True
    ).scores[0][0]
    expected = kept.softmax(-1)
    assert set(drawn.unique().tolist()) <= set(expected.nonzero()[:, 0].tolist())
    if allowed is not None:
        assert int((expected > 0).sum()) == allowed
    found = drawn.bincount(minlength=VOCABULARY) / len(drawn)
    assert (found - expected).abs().sum() < 0.15  # total variation of 3,000 draws


REFUSED: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"repetition_penalty": 1.2},
    {"min_new_tokens": 2},
    {"stop_strings": "x"},
    {"bad_words_ids": [[3]]},
    {"return_dict_in_generate": True},
    {"output_logits": True},
    {"output_hidden_states": True},
    {"max_time": 1.0},
    {"stopping_criteria": [print]},
    {"streamer": object()},
    {"position_ids": torch.zeros(4, 9)},
    {"max_new_token": 5},
    {"do_sample": True, "min_p": 0.1},
    {"num_return_sequences": 2},
]


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda a: list(a)[-1])
def test_what_it_can_t_honour_is_refused_by_name(
    qwen: HybridActor, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=list(arguments)[-1]):
        qwen.generate(**prompts(), **arguments)


def test_a_penalty_in_the_models_generation_config_is_not_dropped_silently(
    qwen: HybridActor,
) -> None:
    qwen.generation_config.repetition_penalty = 1.1
    with pytest.raises(ConfigError, match=r"repetition_penalty=1\.1"):
        qwen.generate(**prompts())
    qwen.generate(**prompts(), repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"max_length": 9}, ConfigError, "max_length=9"),
        ({"max_new_tokens": 60}, ConfigError, "64 tokens of the model's context"),
        ({"do_sample": True, "temperature": 0.0}, ConfigError, "do_sample=False"),
        ({"do_sample": True, "top_p": 1.5}, RolloutError, "top_p"),
        ({"attention_mask": torch.ones(4, 8)}, DataError, "same shape"),
        ({"attention_mask": torch.eye(4, 9)}, DataError, "row 0 .* left"),
        ({"input_ids": torch.ones(4)}, DataError, r"\(4,\)"),
        ({"input_ids": torch.full((4, 9), VOCABULARY)}, RolloutError, "vocabulary of 97"),
        ({"inputs": torch.ones(4, 9)}, ConfigError, "inputs and input_ids"),
    ],
)
def test_a_bad_call_says_what_is_wrong(
    qwen: HybridActor, arguments: dict[str, Any], error: type[EngineError], words: str
) -> None:
    with pytest.raises(error, match=words):
        qwen.generate(**(prompts() | arguments))
