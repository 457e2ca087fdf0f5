"""What is sampled of a step, and the table that is made of it."""

from __future__ import annotations

import pytest
import torch
from step_batches import step_batch, tokenizer

from engine.batch import Batch
from engine.samples.sample_files import SCHEMA
from engine.samples.writer import TokenTexts, as_table, pick, prompt_text

GROUPS = {f"{i}+{i}=": [f"{i}", f"{2 * i}", f"the answer is {2 * i}"] for i in range(6)}
REWARDS = [i / 18 for i in range(18)]


def prompts(batch: Batch) -> list[str]:
    return [messages[-1]["content"] for messages in batch.columns["prompt"]]


def test_groups_stay_whole_and_a_prompt_that_comes_again_is_taken_again() -> None:
    first = pick(step_batch(GROUPS, REWARDS), 1, "train", 6).rows
    assert len(first) == 6
    chosen = set(prompts(first))
    assert sorted(prompts(first)) == sorted(list(chosen) * 3)
    backwards = dict(reversed(GROUPS.items()))
    again = pick(step_batch(backwards, REWARDS), 7, "train", 6).rows
    assert set(prompts(again)) == chosen
    assert len(pick(step_batch(GROUPS, REWARDS), 1, "train", 4).rows) == 4
    assert len(pick(step_batch(GROUPS, REWARDS), 1, "train", 100).rows) == 18


def test_a_sample_is_a_copy_that_draws_no_random_numbers() -> None:
    batch = step_batch(GROUPS, REWARDS)
    before = torch.get_rng_state()
    sample = pick(batch, 1, "train", 3)
    assert torch.equal(before, torch.get_rng_state())
    kept = sample.rows["advantages"].clone()
    batch["advantages"].zero_()
    assert torch.equal(sample.rows["advantages"], kept)


def test_a_row_has_what_each_of_its_tokens_was_given() -> None:
    batch = step_batch({"2+2=": ["4", "the answer is 4"]}, [1.0, 0.0])
    first, second = as_table(pick(batch, 20, "train", 9), TokenTexts(tokenizer())).to_pylist()
    assert (first["step"], first["split"], first["policy_version"]) == (20, "train", 3)
    assert (first["prompt"], first["ground_truth"], first["data_source"]) == ("2+2=", "0", "sums")
    assert (first["completion"], first["tokens"]) == ("4", ["4"])
    assert (first["reward"], first["shaped_reward"], first["correct"]) == (1.0, 0.75, True)
    assert (first["reward.answer"], first["reward.brevity"]) == (1.0, 0.0)
    assert second["correct"] is False
    assert second["has_format"] is None, "this reward knows no format"
    assert "".join(second["tokens"]) == "the answer is 4"
    count = len(second["tokens"])
    assert count > 1
    assert second["advantages"] == [-0.5] * count
    assert second["rollout_log_probs"] == pytest.approx([-0.1 * (i + 1) for i in range(count)])
    assert second["old_log_probs"] == pytest.approx([-0.1 * (i + 1) + 0.01 for i in range(count)])
    assert second["ref_log_probs"] is None
    assert second["values"] is None


def test_every_sample_has_the_same_columns() -> None:
    rich = as_table(pick(step_batch({"a": ["b"]}, [1.0]), 1, "train", 9), TokenTexts(tokenizer()))
    batch = step_batch({"a": ["b"]}, [1.0], components=False)
    plain = Batch(
        {k: v for k, v in batch.as_dict().items() if k not in ("advantages", "old_log_probs")},
        {k: v for k, v in batch.columns.items() if k not in ("ground_truth", "data_source")},
    )
    poor = as_table(pick(plain, 0, "validation", 9), TokenTexts(tokenizer()))
    assert poor.schema.equals(SCHEMA)
    assert rich.select(SCHEMA.names).schema.equals(SCHEMA)
    assert poor.to_pylist()[0]["ground_truth"] == ""


def test_texts_that_utf_8_lacks_are_replaced() -> None:
    batch = step_batch({"a": ["b", "c"]}, [1.0, 0.0])
    odd = {"completion": ["half \ud83d", "\0"], "ground_truth": [{"x": ["\udc00", 1]}, None]}
    rows = as_table(pick(batch | Batch({}, odd), 1, "train", 9), TokenTexts(tokenizer()))
    first, second = rows.to_pylist()
    assert first["completion"] == "half ?"
    assert first["ground_truth"] == '{"x": ["?", 1]}'
    assert (second["completion"], second["ground_truth"]) == ("\0", "")


def test_chats_name_their_roles() -> None:
    assert prompt_text([{"role": "user", "content": "2+2="}]) == "2+2="
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2="}]
    assert prompt_text(chat) == "[system]\nBe short.\n\n[user]\n2+2="
