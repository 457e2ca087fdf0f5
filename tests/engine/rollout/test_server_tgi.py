"""TGI's format: prompts travel as text that must be read as the very same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer, connect, serving, words
from rollout_models import CONTEXT, VOCABULARY, build, make_prompts, reference_log_probs, train
from thorough import and_slow

from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import SamplingParams
from engine.rollout.server import ServerEngine

PROMPTS = make_prompts(3, seed=3)
plain = pytest.mark.parametrize("fake", [False], indirect=True, ids=["plain"])


@pytest.fixture(params=[False, True], ids=["plain", "bos"])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeServer]:
    """A server whose tokenizer puts a BOS token before each text, or not."""
    tokenizer = words(tmp_path / "tokenizer", VOCABULARY, bos=request.param)
    with serving(FakeServer(build("llama"), tokenizer)) as server:
        yield server


def tgi(fake: FakeServer, tmp_path: Path, **options: Any) -> tuple[ServerEngine, Any]:
    """An engine of the fake server's model, and that model."""
    settings = {"api": "tgi", "version_url": "/info", "tokenizer": str(tmp_path / "tokenizer")}
    model = build("llama")
    return connect(fake, model, **settings | options), model


def prompts_of(fake: FakeServer) -> list[list[int]]:
    """Prompts that this server can be sent: with a BOS token, where its tokenizer puts one."""
    assert fake.tokenizer is not None
    start = [0] if fake.tokenizer.bos_token_id is not None else []
    return [start + prompt for prompt in PROMPTS]


def test_completions_are_the_policy_s(fake: FakeServer, tmp_path: Path) -> None:
    engine, model = tgi(fake, tmp_path)
    prompts = prompts_of(fake)
    for version in (0, 1):
        done = engine.generate(prompts, SamplingParams(n=3, max_new_tokens=6, seed=2))
        assert [c.prompt_index for c in done] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert len({tuple(c.token_ids) for c in done}) == 9
        for c in done:
            expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
            assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
            assert (c.finish_reason, c.policy_version) == ("length", version)
        train(model, steps=2)
        engine.update_weights(model, version + 1)
    engine.close()


def test_the_text_of_a_group_is_asked_for_once(fake: FakeServer, tmp_path: Path) -> None:
    engine, _ = tgi(fake, tmp_path, concurrency=1)
    before = fake.count("/tokenize")
    engine.generate(prompts_of(fake)[:1], SamplingParams(n=4, max_new_tokens=2))
    assert fake.count("/tokenize") == before + 1
    engine.close()


@pytest.mark.parametrize(
    ("fake", "own_end"),
    and_slow([(False, (20, 21)), (True, ())], [(False, ()), (True, (20, 21))]),
    indirect=["fake"],
)
def test_stop_tokens_end_a_completion_whether_tgi_knows_them_or_not(
    fake: FakeServer, tmp_path: Path, own_end: tuple[int, ...]
) -> None:
    engine, _ = tgi(fake, tmp_path)
    fake.end_tokens = own_end
    stops = tuple(range(20, 40))
    done = engine.generate(
        prompts_of(fake), SamplingParams(n=4, max_new_tokens=8, stop_token_ids=stops)
    )
    ended = [c for c in done if c.finish_reason == "stop"]
    assert 2 < len(ended) < 12
    assert all(c.token_ids[-1] in stops for c in ended)
    assert not any(set(c.token_ids[:-1]) & set(stops) for c in done)
    assert all(len(c.token_ids) == len(c.log_probs) for c in done)
    engine.close()


@plain
def test_an_end_token_that_the_policy_doesn_t_know_is_refused(
    fake: FakeServer, tmp_path: Path
) -> None:
    engine, _ = tgi(fake, tmp_path)
    fake.end_tokens = tuple(range(20, 60))
    with pytest.raises(RolloutError, match=r"'eos_token'\) and on no token of stop_token_ids=\[1"):
        engine.generate(
            prompts_of(fake), SamplingParams(n=4, max_new_tokens=8, stop_token_ids=(1,))
        )
    engine.close()


def test_a_prompt_that_is_read_otherwise_is_refused(tmp_path: Path) -> None:
    """The trainer's tokenizer knows other words than the server's."""
    words(tmp_path / "tokenizer", VOCABULARY)
    (tmp_path / "theirs").mkdir()
    theirs = words(tmp_path / "theirs", 50)  # t50 and later are unknown to it
    with serving(FakeServer(build("llama"), theirs)) as fake:
        engine, _ = tgi(fake, tmp_path)
        engine.generate([[5, 49]], SamplingParams(max_new_tokens=1))
        with pytest.raises(RolloutError, match=r"reads the text of a prompt .*\[5, 50\].*\[5, 2\]"):
            engine.generate([[5, 50]], SamplingParams(max_new_tokens=1))
        engine.close()


@plain
def test_a_policy_without_a_tokenizer_needs_one_named(fake: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api='tgi' .*name a model folder in rollout.server.tok"):
        tgi(fake, tmp_path, tokenizer=str(tmp_path / "nothing"))


@plain
def test_a_shorter_context_is_refused(fake: FakeServer, tmp_path: Path) -> None:
    fake.context = 64
    with pytest.raises(ConfigError, match=f"context is 64 tokens and this run's {CONTEXT}"):
        tgi(fake, tmp_path)


@plain
def test_code_of_a_tokenizer_folder_is_never_run(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokenizer"
    (folder / "own.py").write_text(f"open({str(tmp_path / 'code-was-run')!r}, 'w')\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"no tokenizer in .* code of its own, which is never"):
        tgi(fake, tmp_path)
    assert not (tmp_path / "code-was-run").exists()
