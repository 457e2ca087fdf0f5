"""Pages of samples: their data, episodes, texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Page, browser, find_chromium
from digit_games import HOSTILE, digit_calls
from hypothesis import given
from hypothesis import strategies as st
from step_batches import step_batch, tokenizer
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.agents.call_parsers import parsed_action
from engine.agents.environment_protocol import Action, ToolCall
from engine.agents.episode import (
    Episode,
    EpisodeTokenizer,
    Transcript,
    load_episode,
    save_episode,
    turn_spans,
)
from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.samples import viewer
from engine.samples.sample_files import SampleFolder, SampleName
from engine.samples.viewer import PageData, page_of
from engine.samples.writer import RolloutLog, TokenTexts, as_table, pick
from engine.trainers.rl import RLTrainer


def add(
    data: PageData, step: int, answers: list[str], split: str = "train", **metrics: float
) -> None:
    rewards = [float(i % 2) for i in range(len(answers))]
    sample = pick(step_batch({"2+2=": answers}, rewards), step, split, 99)
    rows = [{"step": float(step), **metrics}] if metrics else []
    data.add(SampleName(step, split), as_table(sample, TokenTexts(tokenizer())), rows)


def shown(data: PageData) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(data.as_json())
    return content


def test_a_sample_is_told_once() -> None:
    data = PageData()
    add(data, 1, ["4 is the answer", "the answer is 5"])
    (sample,) = shown(data)["samples"]
    assert (sample["step"], sample["split"], sample["prompts"]) == (1, "train", ["2+2="])
    words = sample["vocabulary"]
    assert len(set(words)) == len(words)
    first, second = sample["rows"]
    assert "".join(words[token] for token in first["tokens"]) == "4 is the answer"
    assert (first["reward"], first["correct"], second["correct"]) == (0.0, False, True)
    assert first["parts"] == {"answer": 0.0, "brevity": 1.0}
    assert first["advantages"] == -0.5, "the same for all tokens"
    assert first["rollout_log_probs"][:2] == [-0.1, -0.2]
    assert first["ref_log_probs"] is None


def test_curves_have_each_step_once_and_their_last_point() -> None:
    data = PageData()
    table = as_table(
        pick(step_batch({"2+2=": ["4"]}, [0.0]), 1, "train", 9), TokenTexts(tokenizer())
    )
    for step in range(1, 1001):
        rare = {"validation/reward": 0.5} if step % 500 == 0 else {}
        row = {"step": float(step), "reward/mean": step / 1000}
        data.add(SampleName(step, "train"), table, [row | rare])
    curves = shown(data)["curves"]
    assert "step" not in curves
    steps, values = curves["reward/mean"]
    assert (steps[0], steps[-1], values[-1]) == (1, 1000, 1.0)
    assert steps == sorted(set(steps))
    assert len(steps) <= viewer.MAX_POINTS + 1
    assert curves["validation/reward"] == [[500, 1000], [0.5, 0.5]]


def test_a_long_run_shows_its_first_and_last_sample_and_some_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewer, "MAX_TOKENS", 100)
    data = PageData()
    for step in range(1, 201):
        add(data, step, ["4 4 4 4 4"])
        samples = shown(data)["samples"]
        steps = [sample["step"] for sample in samples]
        assert (steps[0], steps[-1]) == (1, step)
        assert sum(len(row["tokens"]) for s in samples for row in s["rows"]) <= 100
    gaps = {b - a for a, b in pairwise(steps[:-1])}
    assert len(gaps) == 1, "the steps between are evenly spread"
    assert len(steps) > 4
    assert shown(data)["leftOut"] == 200 - len(steps)
    assert len(data) == 200


def test_a_long_completion_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "MAX_TOKENS_A_ROW", 3)
    data = PageData()
    add(data, 1, ["1 2 3 4 5 6"])
    (row,) = shown(data)["samples"][0]["rows"]
    assert len(row["tokens"]) == len(row["rollout_log_probs"]) == 3
    assert row["length"] > 3


def test_hostile_text_stays_inside_of_its_element() -> None:
    data = PageData()
    nasty = "</script><script>alert(1)</script><!--\u2028 \u202e\0 & 'x'\""
    add(data, 1, [nasty], **{"</script>": 1.0})
    text = data.as_json()
    assert not set("<>&\u2028\0\u202e") & set(text)
    (sample,) = shown(data)["samples"]
    words = "".join(sample["vocabulary"][token] for token in sample["rows"][0]["tokens"])
    assert words == nasty.replace("\u202e", "\ufffd").replace("\0", "\ufffd")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_null(value: float) -> None:
    batch = step_batch({"a": ["4 5", "4"]}, [value, 1.0])
    data = PageData()
    sample = pick(batch, 1, "train", 9)
    data.add(SampleName(1, "train"), as_table(sample, TokenTexts(tokenizer())), [])
    first, _ = shown(data)["samples"][0]["rows"]
    assert first["reward"] is None
    assert set(first["advantages"]) == {None}


PROGRAM = find_chromium()


wants_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: `apt-get install chromium`, or set CHROMIUM"
)


TURNS = 8


class Played(NamedTuple):
    batch: Batch  # of the run's step
    table: list[dict[str, Any]]  # its sample
    file: Path  # the page


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("episodes")
    shape = TINY_MODEL.model_copy(update={"max_position_embeddings": 768})
    model = write_tiny_folder(folder / "model", shape)
    config = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo"},
            "actor": {"ppo_mini_batch_size": 2, "old_log_probs": "trainer"},
            "rollout": {
                "n": 2,
                "multi_turn": {
                    "enable": True,
                    "max_turn_length": 6,
                    "format": "digit_games:digit_calls",
                },
                "agent": {
                    "environment": {
                        "name": "digit_games:HostileGame",
                        "options": {"turns": TURNS},
                    },
                    "num_workers": 0,
                },
            },
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {"total_training_steps": 1, "train_batch_size": 2, "threads": 1},
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(4)), 2, 0)
    batches: list[Batch] = []
    with RLTrainer(model, config, loader, max_response_length=640, max_model_len=760) as trainer:
        trainer.on_rollouts = lambda split, step, batch: batches.append(batch)
        trainer.fit()
    batch = with_mixed_versions(batches[0])
    out = folder / "rollouts"
    with RolloutLog(out, lambda: load_tokenizer(model), every=1, rows=9, last_step=1) as log:
        log.rollouts("train", 1, batch)
        log.step_done([{"step": 1.0, "reward/mean": 0.5}])
    table, _ = SampleFolder(out).read(SampleName(1, "train"))
    file = folder / "page.html"
    file.write_text(page_of(SampleFolder(out)))
    return Played(batch, table.to_pylist(), file)


def with_mixed_versions(batch: Batch) -> Batch:
    """As if weights were updated while the last turns of the first row were sampled."""
    versions = batch["token_versions"].clone()
    versions[0, 40:] += 1
    return batch | Batch({"token_versions": versions})


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


def test_a_sample_of_episodes_says_what_was_sampled_and_what_it_earned(played: Played) -> None:
    given = played.batch["environment_rewards"]
    for row in played.table:
        turns = row["turns"]
        assert (row["episode_turns"], row["first_turn"], row["end"]) == (TURNS, 0, "done")
        assert len(turns) == TURNS
        sampled = np.zeros(len(row["tokens"]), dtype=bool)
        for turn in turns:
            sampled[turn["start"] : turn["stop"]] = True
            assert len(turn["calls"]) + len(turn["malformed"]) == 1
        assert sampled.tolist() == row["trained"]
        assert row["episode_reward"] == pytest.approx(sum(turn["reward"] for turn in turns))
        ends = pairwise(turns)
        between = ["".join(row["tokens"][a["stop"] : b["start"]]) for a, b in ends]
        assert all(f"{HOSTILE} {k + 1}" in text for k, text in enumerate(between))
        assert row["prompt"].startswith("<|user|>")
        assert row["prompt"].endswith("<|assistant|>")
    sums = sorted(row["episode_reward"] for row in played.table)
    assert sums == pytest.approx(sorted(given.sum(1).tolist()))
    versions = [row["token_versions"] for row in played.table if row["token_versions"]]
    assert [set(one) for one in versions] == [{0, 1}], "those of the others are all the same"


def test_tokens_that_training_leaves_out_are_told(played: Played) -> None:
    from engine.samples.writer import TokenTexts, as_table, pick

    mask = played.batch["response_mask"].clone()
    mask[1] = 0.0
    batch = played.batch | Batch({"response_mask": mask})
    texts = TokenTexts(load_tokenizer(played.file.parent / "model"))
    table = as_table(pick(batch, 1, "train", 9), texts).to_pylist()
    assert sorted(any(row["trained"]) for row in table) == [False, True, True, True]
    assert all(len(row["turns"]) == TURNS for row in table)


def first(selector: str, what: str = "textContent") -> str:
    return f"document.querySelector({selector!r}).{what}"


def every(selector: str, what: str = "textContent") -> str:
    return f"Array.from(document.querySelectorAll({selector!r})).map(e => e.{what})"


@wants_browser
def test_the_page_has_turns_calls_and_observations(page: Page, played: Played) -> None:
    page.open(played.file)
    assert page.run("document.querySelectorAll('article').length") == 4
    card = "document.querySelector('article')"
    heads = page.run(
        f"Array.from({card}.querySelectorAll('.turn > .head')).map(e => e.textContent)"
    )
    assert [head.split(" · ")[0] for head in heads] == ["turn 1", "turn 2", "turn 7", "turn 8"]
    assert all(" · trained · reward 0" in head or "reward 1" in head for head in heads)
    summary = page.run(f"{card}.querySelector('.fold > summary').textContent")
    assert summary.startswith("turns 3 to 6 · reward ")
    page.run(f"{card}.querySelector('.fold').open = true")
    page.run("new Promise(done => setTimeout(done, 50))")
    count = f"{card}.querySelectorAll('.turn').length"
    assert page.run(count) == TURNS
    page.run(f"{card}.querySelector('.fold').open = false")
    assert page.run(count) == TURNS, "opened again, they are there once"
    observed = page.run(f"{card}.querySelector('.observed').textContent")
    assert observed.startswith("environment · ")
    assert " tokens · not trained" in observed
    told = page.run(every(".calls li"))
    calls = [one for one in told if one.startswith("call <b>digits</b>")]
    malformed = [one for one in told if one.startswith("malformed: no digits in ")]
    assert len(calls) + len(malformed) == len(told)
    assert malformed
    assert all(one.endswith("<i>at all</i>") for one in malformed)
    badges = page.run(every("article:first-of-type .badges span"))
    assert {"8 turns", "ended: done"} <= set(badges)
    assert any(badge.startswith("by turns ") for badge in badges)
    assert any(badge.startswith("outcome ") for badge in badges)
    colour = [one for one in badges if one.startswith("advantage ")]
    assert colour in (["advantage −0.707"], ["advantage 0.707"]), "of sampled tokens alone"
    assert [one for one in page.run(every(".badges span")) if one.startswith("policy v")] == [
        "policy versions 0, 1"
    ]


@wants_browser
def test_what_an_environment_wrote_is_text_and_has_no_colour(page: Page, played: Played) -> None:
    page.complaints.clear()
    page.open(played.file)
    assert HOSTILE in page.run(first(".observed .answer"))
    assert any(HOSTILE[:60] in badge for badge in page.run(every(".badges span")))
    assert page.run("document.images.length + document.querySelectorAll('article i').length") == 0
    assert page.requests == [played.file.as_uri()]
    assert page.complaints == []
    shown = every(".observed .answer span", "style.backgroundColor")
    assert set(page.run(shown)) == {""}
    assert any(page.run(every(".turn > .answer span", "style.backgroundColor")))
    page.run(first(".observed .answer span", "click()"))
    words = page.run(first("p.token"))
    assert words.endswith("environment's, not trained")
    assert "log-prob" not in words
    page.run(first(".turn > .answer span", "click()"))
    assert "log-prob when sampled" in page.run(first("p.token"))
    assert "sampled, trained" in page.run(first("p.token"))


@wants_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_stands_outside_of_the_window(page: Page, played: Played, width: int) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=800, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
    try:
        page.open(played.file)
        assert page.run("document.scrollingElement.scrollWidth <= innerWidth") is True
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")


def test_rows_of_one_episode_have_their_own_turns() -> None:
    transcript = Transcript([1, 2])
    actions = [Action("a"), Action("b", tool_calls=(ToolCall("add", {"a": 1}),)), Action("c")]
    transcript.add_turn([5, 6], [-1.0, -1.0], [0, 0])
    transcript.sequences[-1].add_observation([7])
    transcript.add_turn([8], [-1.0], [0])
    transcript.branch([1, 2, 3])
    transcript.add_turn([9, 9], [-1.0, -1.0], [0, 0])
    episode = Episode(0, 0, 0, None, None, [], transcript=transcript, actions=actions)  # type: ignore[arg-type]
    whole, branch = (turn_spans(episode, one) for one in transcript.finished())
    assert [(turn["start"], turn["stop"]) for turn in whole] == [(0, 2), (3, 4)]
    assert [turn["calls"] for turn in whole] == [[], [("add", {"a": 1})]]
    assert [(turn["start"], turn["stop"]) for turn in branch] == [(0, 2)]
    assert branch[0]["calls"] == []
    transcript.add_reward(1.0)
    tree = save_episode(episode)
    reader = EpisodeTokenizer(tokenizer(), (), partial(parsed_action, digit_calls))
    again = Episode(0, 0, 0, reader, None, [])  # type: ignore[arg-type]
    assert load_episode(again, tree) is not None
    assert again.transcript is not None
    assert [one.turns for one in again.transcript.sequences] == [[(0, 2), (3, 4)], [(0, 2)]]
    assert len(again.actions) == 3, "read again from the ids that were saved"
    assert torch.tensor(transcript.finished()[0].sampled).tolist() == [True, True, False, True]


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
