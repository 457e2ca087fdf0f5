"""Streams of a server: episodes, LoRA, training."""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
import torch
from fake_server import FakeServer, Handler, connect, drop, hang, serving, status
from rollout_models import VOCABULARY, build, make_prompts, qwen2, reference_log_probs
from server_process import vllm_url
from stream_checks import Found, drain, gather, texts, weights_of, with_n, worst_error, write
from tiny_engine import arithmetic_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.batch import Batch
from engine.config import LoRAConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import ASSISTANT, CHAT_TEMPLATE, END, PAD, USER
from engine.errors import RolloutError
from engine.models import adapter_parameters, add_adapters
from engine.models.quantize import quantize_linears
from engine.rollout.protocol import SamplingParams
from engine.rollout.server import ServerEngine
from engine.trainers.rl import RLTrainer
from engine.trainers.run_spec import check_lora

PROMPTS = dict(enumerate(make_prompts(6, seed=3)))


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(FakeServer(build("qwen2")))) for _ in range(2)]


@pytest.fixture
def engine(fakes: list[FakeServer]) -> Iterator[ServerEngine]:
    urls = tuple(fake.url for fake in fakes)
    engine = connect(fakes[0], build("qwen2"), url="", urls=urls, completions_per_request=2)
    yield engine
    engine.close()


def test_a_stream_gives_what_a_rollout_gives_whatever_the_order(engine: ServerEngine) -> None:
    params = with_n(3)
    done = engine.generate(list(PROMPTS.values()), params)
    expected = {(i // 3, i % 3): c.token_ids for i, c in enumerate(done)}
    stream = engine.stream(params)
    for key in (4, 0, 5, 2, 1, 3):
        stream.submit(key, PROMPTS[key])
    found = drain(stream)
    assert {name: c.token_ids for name, c in found.items()} == expected
    assert stream.step() == []
    stream.submit(4, PROMPTS[4])  # a key may be used again
    assert len(drain(stream)) == 3


def test_an_update_lets_what_was_sent_finish_and_versions_are_true(engine: ServerEngine) -> None:
    model, stream = build("qwen2"), engine.stream(with_n(3))
    found: Found = {}
    for version in (0, 1, 2):
        if version:
            write(model, weights_of("qwen2")[version])
            stream.update_weights(model, version)
        for key in (2 * version, 2 * version + 1):
            stream.submit(key, PROMPTS[key])
        gather(found, stream.step())
    drain(stream, found)
    assert len(found) == 18
    for c in found.values():
        assert set(c.token_versions or ()) == {c.policy_version}
    assert {c.policy_version for c in found.values()} == {0, 1, 2}
    assert worst_error("qwen2", {**PROMPTS}, found) < 1e-4


def test_what_is_unfinished_is_sampled_again_after_a_restart(
    engine: ServerEngine, fakes: list[FakeServer]
) -> None:
    stream = engine.stream(with_n(3))
    stream.submit(0, PROMPTS[0])
    expected = drain(stream)
    release = threading.Event()

    def late(handler: Handler) -> bool:
        release.wait(20)
        return False

    for fake in fakes:
        fake.always = late
    stream.submit(0, PROMPTS[0])
    [partial] = stream.partials()
    assert [part.completion_index for part in partial.completions] == [0, 1, 2]
    stream.close()
    release.set()
    again = engine.stream(with_n(3))
    part = partial.completions[2]
    again.submit(0, PROMPTS[0], resume=type(partial)(0, PROMPTS[0], [part]))
    assert drain(again) == {(0, 2): expected[0, 2]}


def test_a_server_that_dies_in_mid_stream_costs_nothing(
    engine: ServerEngine, fakes: list[FakeServer]
) -> None:
    stream = engine.stream(with_n(3))
    for key, prompt in PROMPTS.items():
        stream.submit(key, prompt)
    expected = texts(drain(stream))
    fakes[0].always = drop
    for key, prompt in PROMPTS.items():
        stream.submit(key, prompt)
    assert texts(drain(stream)) == expected


def test_a_restarted_server_s_answers_are_dropped(
    engine: ServerEngine, fakes: list[FakeServer]
) -> None:
    def forget(handler: Handler) -> bool:
        handler.fake.tag = ""
        return False

    stream = engine.stream(with_n(3))
    for fake in fakes:
        fake.always = forget
    stream.submit(0, PROMPTS[0])
    with pytest.raises(RolloutError, match=r"none of 2 rollout servers.*no tag"):
        drain(stream)
    assert stream.waiting + stream.in_flight > 0, "nothing is lost"


def test_servers_that_hang_end_the_stream_at_its_deadline(fakes: list[FakeServer]) -> None:
    engine = connect(fakes[0], build("qwen2"), timeout_s=2.0, max_retries=1000)
    stream = engine.stream(with_n(3))
    fakes[0].always = hang
    stream.submit(0, PROMPTS[0])
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"not answered within rollout.server.timeout_s=2"):
        drain(stream)
    assert time.monotonic() - started < 8
    with pytest.raises(RolloutError, match=r"not answered within rollout.server.timeout_s=2"):
        stream.update_weights(None, 1)
    engine.close()


def test_bad_requests_are_refused_by_name(engine: ServerEngine, fakes: list[FakeServer]) -> None:
    stream = engine.stream(with_n(3))
    with pytest.raises(RolloutError, match="empty"):
        stream.submit(0, [])
    for fake in fakes:
        fake.always = hang
    stream.submit(0, PROMPTS[0])
    with pytest.raises(RolloutError, match="in use"):
        stream.submit(0, PROMPTS[0])
    stream.close()
    with pytest.raises(RolloutError, match="was closed"):
        stream.step()
    fakes[0].always = fakes[1].always = status(400, "no")
    stream = engine.stream(with_n(3))
    stream.submit(0, PROMPTS[0])
    with pytest.raises(RolloutError, match="refused: status 400"):
        drain(stream)


def trainer(folder: Path, mode: str, **rollout: Any) -> RLTrainer:
    turns = {"multi_turn": {"enable": True, "max_turn_length": 6}}
    turns["agent"] = {"environment": "digit_games:DigitGame", "num_workers": 0}
    settings = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4} | turns | rollout,
            "reward": {"name": "environment"},
            "trainer": {
                "total_training_steps": 2,
                "train_batch_size": 2,
                "placement": "local",
                "mode": mode,
                "threads": 1,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 2, seed=0)
    return RLTrainer(folder, settings, loader, max_response_length=36, max_model_len=60)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_server_samples_the_turns(tiny_folder: Path, mode: str) -> None:
    rows = arithmetic_rows(5)
    found: dict[str, Batch] = {}
    batches: list[Batch] = []

    def greedy(name: str, subject: RLTrainer) -> None:
        subject.on_rollouts = lambda split, step, batch: found.update({name: batch})
        subject.validate(rows)
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)

    with trainer(tiny_folder, "sync") as native:
        greedy("native", native)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    with serving(FakeServer(model, context=64)) as fake:
        server = {"url": fake.url, "weights": "folder", "reload_url": "/reload"}
        with trainer(tiny_folder, mode, engine="server", server=server) as subject:
            greedy("server", subject)
            subject.fit()
            history = subject.history
    assert len(history) == 2
    ours, theirs = found["server"], found["native"]
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(ours[name], theirs[name]), name
    for step, batch in enumerate(batches):
        assert history[step]["episode/turns_mean"] == 3
        kept = batch["response_mask"].bool()
        fresh = kept & (batch["token_versions"] == step)
        assert bool(fresh.any()) or mode == "async"
        torch.testing.assert_close(
            batch["old_log_probs"][fresh], batch["rollout_log_probs"][fresh], atol=1e-4, rtol=1e-4
        )
        assert step - int(batch["token_versions"][kept].min()) <= 1


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_the_server_serves_base_and_adapters_as_one(quantize: str) -> None:
    model: Any = build("llama")
    if quantize:
        quantize_linears(model, quantize)
    add_adapters(model, LoRAConfig(rank=4, alpha=8.0), seed=1)
    prompts = make_prompts(3, seed=3)
    with serving(FakeServer(build("llama"))) as fake:
        engine = connect(fake, model)
        for version in (1, 2):
            _step(model, version)
            engine.update_weights(model, version)
            done = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=6, seed=2))
            assert {one.policy_version for one in done} == {version}
            for one in done:
                expected = reference_log_probs(model, prompts[one.prompt_index], one.token_ids)
                assert torch.allclose(torch.tensor(one.log_probs), expected, atol=1e-3)
        engine.close()


@torch.no_grad()
def _step(model: Any, seed: int) -> None:
    """What stands for a step that trains adapters alone."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model).values():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_a_run_with_adapters_may_sample_from_a_server() -> None:
    server = {"engine": "server", "server": {"url": "http://127.0.0.1:1"}}
    check_lora(LoRAConfig(rank=4), RLConfig.model_validate({"rollout": server}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the session's server, with one token a character."""
    path = tmp_path_factory.mktemp("policy")
    characters = string.printable[: VOCABULARY - 5]
    vocabulary = {word: i for i, word in enumerate([PAD, END, USER, ASSISTANT, "?", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    build("qwen2").save_pretrained(path)  # type: ignore[operator]
    return path


EPISODES = {
    "multi_turn": {"enable": True, "max_turn_length": 6},
    "agent": {"environment": "digit_games:DigitGame", "num_workers": 0},
}


def stream_trainer(folder: Path, mode: str, length: int = 6, **rollout: Any) -> RLTrainer:
    share = {"name": "tiny_engine:digit_share", "isolation": "none"}
    settings = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4} | rollout,
            "reward": {"name": "environment"} if "multi_turn" in rollout else share,
            "trainer": {
                "total_training_steps": 3,
                "train_batch_size": 4,
                "placement": "local",
                "mode": mode,
                "threads": 1,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, seed=0)
    return RLTrainer(
        folder, settings, loader, max_response_length=length, max_model_len=64, dtype="float32"
    )


def version_served() -> str:
    """Such as "v3"."""
    said: str = httpx.get(f"{vllm_url(qwen2)}/weight_info").json()["weight_version"]
    return said.split("-")[1]


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_each_step_samples_from_the_server_with_its_weights(folder: Path, mode: str) -> None:
    rows = arithmetic_rows(6)
    with stream_trainer(folder, "sync") as native:
        expected = native.validate(rows)
    served: list[str] = []
    with stream_trainer(folder, mode, engine="server", server={"url": vllm_url(qwen2)}) as subject:
        assert subject.validate(rows) == expected, "greedy completions don't depend on the engine"
        subject.on_step = lambda step, total, metrics: served.append(version_served())
        subject.fit()
        history = subject.history
        subject.validate(rows)
    if mode == "sync":
        assert served == ["v0", "v1", "v2"]
        assert version_served() == "v3", "validation is of the last weights"
    else:  # a step's completions are drawn during the one before
        assert served[-1] == "v1"
    for step, row in enumerate(history):
        assert row["staleness/max"] == (0.0 if mode == "sync" or step == 0 else 1.0)
        distance = row["rollout_corr/log_ppl_abs_diff"]  # of the trainer's from the sampler's
        assert (distance < 1e-5) == (row["staleness/max"] == 0.0), distance


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_server_samples_the_turns_of_episodes(folder: Path, mode: str) -> None:
    rows, found, batches = arithmetic_rows(6), list[Batch](), list[Batch]()
    for kind, more in (
        ("sync", {}),
        (mode, {"engine": "server", "server": {"url": vllm_url(qwen2)}}),
    ):
        with stream_trainer(folder, kind, 48, **EPISODES, **more) as subject:
            subject.on_rollouts = lambda split, step, batch: found.append(batch)
            subject.validate(rows)
            if more:
                subject.on_rollouts = lambda split, step, batch: batches.append(batch)
                subject.fit()
                history = subject.history
    theirs, ours = found
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(ours[name], theirs[name]), name
    assert len(batches) == 3
    for step, batch in enumerate(batches):
        assert history[step]["episode/turns_mean"] == 3
        assert history[step]["episode/end_done"] == 1
        kept = batch["response_mask"].bool()
        fresh = kept & (batch["token_versions"] == step)
        assert bool(fresh.any()) or mode == "async"
        torch.testing.assert_close(
            batch["old_log_probs"][fresh], batch["rollout_log_probs"][fresh], atol=1e-4, rtol=1e-4
        )
        assert 0 <= step - int(batch["token_versions"][kept].min()) <= 1
