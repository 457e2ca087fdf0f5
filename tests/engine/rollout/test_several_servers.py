"""Several servers, and training on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fake_server import FakeServer, Handler, connect, drop, hang, serving, status
from rollout_models import build, make_prompts, reference_log_probs, train
from server_process import free_port
from tiny_engine import arithmetic_rows
from torch import nn

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, EngineError, RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.server import ServerEngine, weights
from engine.rollout.server.weights import FixedPolicy
from engine.trainers.rl import RLTrainer

PROMPTS = make_prompts(6, seed=3)


PARAMS = SamplingParams(n=2, max_new_tokens=6, seed=5)


LOG = "engine.rollout.server.servers"


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(FakeServer(build("qwen2")))) for _ in range(3)]


def connect_all(fakes: list[FakeServer], model: nn.Module, **options: Any) -> ServerEngine:
    urls = tuple(fake.url for fake in fakes)
    return connect(fakes[0], model, **{"url": "", "urls": urls} | options)


@pytest.fixture
def engine(fakes: list[FakeServer]) -> Iterator[ServerEngine]:
    engine = connect_all(fakes, build("qwen2"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    """What one server gives."""
    with serving(FakeServer(build("qwen2"))) as fake:
        alone = connect(fake, build("qwen2"), weights="none")
        done = alone.generate(PROMPTS, PARAMS)
        alone.close()
    return done


def sampled(fake: FakeServer) -> int:
    return fake.count("/v1/completions") - fake.count("/reload")  # each delivery has a probe


def check_equal(done: list[Completion], expected: list[Completion]) -> None:
    """All equal but log-probs, which the batch that a server decodes may round otherwise."""
    assert [replace(c, log_probs=[]) for c in done] == [replace(c, log_probs=[]) for c in expected]
    for c, other in zip(done, expected, strict=True):
        assert c.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def check_serves(engine: ServerEngine, model: nn.Module, version: int) -> None:
    for c in engine.generate(PROMPTS, PARAMS):
        expected = reference_log_probs(model, PROMPTS[c.prompt_index], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
        assert c.policy_version == engine.policy_version == version


def test_requests_are_spread_and_which_server_answers_changes_no_token(
    fakes: list[FakeServer], expected: list[Completion], engine: ServerEngine
) -> None:
    before = [sampled(fake) for fake in fakes]
    check_equal(engine.generate(PROMPTS, PARAMS), expected)
    assert [sampled(fake) - b for fake, b in zip(fakes, before, strict=True)] == [2, 2, 2]


@pytest.mark.parametrize("fault", [drop, status(503, "loading")])
def test_what_a_dying_server_was_asked_for_is_sampled_by_the_others(
    fakes: list[FakeServer],
    expected: list[Completion],
    engine: ServerEngine,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Handler], bool],
) -> None:
    fakes[1].always = fault
    with caplog.at_level(logging.WARNING, LOG):
        check_equal(engine.generate(PROMPTS, PARAMS), expected)
    assert f"{fakes[1].url} is left out" in caplog.text
    # It answers again, with the weights that it was brought: the next rollout has it back.
    fakes[1].always = None
    before = sampled(fakes[1])
    check_equal(engine.generate(PROMPTS, PARAMS), expected)
    assert sampled(fakes[1]) > before


def test_a_restarted_server_costs_its_completions_alone(
    fakes: list[FakeServer], expected: list[Completion], engine: ServerEngine
) -> None:
    def forget(handler: Handler) -> bool:
        handler.fake.tag = ""
        return False

    fakes[2].faults = [forget]
    before = [sampled(fake) for fake in fakes]
    check_equal(engine.generate(PROMPTS, PARAMS), expected)
    asked = [sampled(fake) - b for fake, b in zip(fakes, before, strict=True)]
    assert asked[2] == 2
    assert sum(asked) == 8, "its two requests were sent again"
    check_equal(engine.generate(PROMPTS, PARAMS), expected)
    assert sampled(fakes[2]) - before[2] == 2, "it has no weights: it is asked for nothing"
    model = build("qwen2")
    train(model, steps=2)
    engine.update_weights(model, 1)
    check_serves(engine, model, 1)
    assert sampled(fakes[2]) - before[2] > 2, "the next weights bring it back"


def test_when_all_die_one_error_names_each_within_the_deadline(
    fakes: list[FakeServer], engine: ServerEngine
) -> None:
    for number, fake in enumerate(fakes):
        fake.always = status(503, f"cause {number}")
    started = time.monotonic()
    with pytest.raises(RolloutError, match="none of 3 rollout servers can be used") as failure:
        engine.generate(PROMPTS, PARAMS)
    assert time.monotonic() - started < 10
    for number, fake in enumerate(fakes):
        assert f"{fake.url}: " in str(failure.value)
        assert f"cause {number}" in str(failure.value)
    for fake in fakes:
        fake.always = None
    assert len(engine.generate(PROMPTS, PARAMS)) == 12, "a later rollout works"


def test_servers_that_hang_end_at_the_deadline(fakes: list[FakeServer]) -> None:
    engine = connect_all(fakes, build("qwen2"), timeout_s=2.0)
    for fake in fakes:
        fake.always = hang
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"rollout servers http.*timeout_s=2"):
        engine.generate(PROMPTS, PARAMS)
    assert time.monotonic() - started < 8
    engine.close()


def test_what_the_servers_call_wrong_is_asked_of_one_alone(
    fakes: list[FakeServer], engine: ServerEngine
) -> None:
    before = sum(map(sampled, fakes))
    for fake in fakes:
        fake.always = status(400, "prompt too long")
    with pytest.raises(RolloutError, match="refused: status 400"):
        engine.generate([[5]], PARAMS)
    assert sum(map(sampled, fakes)) == before + 1


def test_weights_are_written_once_and_brought_to_each(
    fakes: list[FakeServer], tmp_path: Path
) -> None:
    model = build("qwen2")
    engine = connect_all(fakes, model, weights_dir=str(tmp_path))
    train(model, steps=2)
    engine.update_weights(model, 1)
    check_serves(engine, model, 1)
    brought = [[b["path"] for _, path, b in f.seen if path == "/reload"] for f in fakes]
    assert brought[0] == brought[1] == brought[2]
    assert {str(path) for path in tmp_path.iterdir()} == set(brought[0])
    engine.close()


def test_a_server_that_takes_no_weights_serves_none_until_it_does(
    fakes: list[FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("qwen2")
    engine = connect_all(fakes, model)
    fakes[0].reload_fault = status(500, "no space")
    train(model, steps=2)
    with caplog.at_level(logging.WARNING, LOG):
        engine.update_weights(model, 1)
    assert "no space" in caplog.text
    before = sampled(fakes[0])
    check_serves(engine, model, 1)
    assert sampled(fakes[0]) == before, "it serves version 0"
    fakes[0].reload_fault = None
    train(model, steps=2)
    engine.update_weights(model, 2)
    check_serves(engine, model, 2)
    assert sampled(fakes[0]) > before
    for fake in fakes:
        fake.reload_fault = status(500, "no space")
    with pytest.raises(RolloutError, match=r"version 3: none of 3 .*no space"):
        engine.update_weights(model, 3)
    with pytest.raises(RolloutError, match="can't serve"):
        engine.generate(PROMPTS, PARAMS)
    engine.close()


def test_a_server_with_a_mixture_of_weights_is_left_out(fakes: list[FakeServer]) -> None:
    model = build("qwen2")
    engine = connect_all(fakes, model)
    fakes[1].spoil = lambda loaded: loaded.load_state_dict(build("qwen2").state_dict())
    train(model, steps=20)
    engine.update_weights(model, 1)
    before = sampled(fakes[1])
    check_serves(engine, model, 1)
    assert sampled(fakes[1]) == before
    engine.close()


def test_a_server_that_is_down_at_the_start_is_left_out(
    fakes: list[FakeServer], expected: list[Completion], caplog: pytest.LogCaptureFixture
) -> None:
    urls = (f"http://127.0.0.1:{free_port()}", fakes[0].url)
    with caplog.at_level(logging.WARNING, LOG):
        engine = connect_all(fakes, build("qwen2"), urls=urls)
    assert f"{urls[0]} is left out: it gives no answer" in caplog.text
    check_equal(engine.generate(PROMPTS, PARAMS), expected)
    engine.close()
    with pytest.raises(RolloutError, match="none of 2 rollout servers"):
        connect_all(fakes, build("qwen2"), urls=(urls[0], f"http://127.0.0.1:{free_port()}"))


def test_one_with_a_short_context_is_a_mistake_that_is_named(fakes: list[FakeServer]) -> None:
    fakes[2].context = 16
    with pytest.raises(ConfigError, match="context is 16 tokens"):
        connect_all(fakes, build("qwen2"))


def test_a_hook_that_knows_one_server_is_refused_for_several(fakes: list[FakeServer]) -> None:
    @weights.register_hook("of one server")
    class Own(FixedPolicy):
        fixed = False

    with pytest.raises(ConfigError, match=r"names 3 servers.*FolderWeights"):
        connect_all(fakes, build("qwen2"), weights="of one server", reload_url="")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://a", "urls": ("http://b",)}, "with rollout.server.urls"),
        ({"urls": ("http://a", "http://a")}, "in it twice"),
        ({"urls": ("10.0.0.7:8000",)}, "no address"),
        (
            {"urls": ("http://a", "http://b"), "reload_url": "http://c/reload"},
            "give a path, which is asked of each",
        ),
    ],
)
def test_addresses_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    own = {"weights": "folder", "reload_url": "/reload"}
    with pytest.raises(ConfigError, match=message):
        ServerEngine(build("qwen2"), **own | options)


@pytest.fixture
def fake_servers() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving(FakeServer(build("qwen2"), context=64))) for _ in range(2)
        ]


def trainer(folder: Path, fake_servers: list[FakeServer], mode: str, **changes: Any) -> RLTrainer:
    server = {
        "urls": [fake.url for fake in fake_servers],
        "weights": "folder",
        "reload_url": "/reload",
        "backoff_s": 0.01,
        "max_retries": 1,
        "timeout_s": 60.0,
    }
    settings = RLConfig.model_validate(
        {
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4, "engine": "server", "server": server} | changes,
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {
                "total_training_steps": 6,
                "train_batch_size": 4,
                "placement": "local",
                "mode": mode,
                "threads": 1,
            }
            | ({"max_rollout_restarts": 0} if mode == "async" else {}),
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, seed=0)
    return RLTrainer(
        folder, settings, loader, max_response_length=6, max_model_len=64, dtype="float32"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_server_that_dies_and_comes_back_costs_no_step(
    tiny_folder: Path, fake_servers: list[FakeServer], mode: str
) -> None:
    counts: list[int] = []
    with trainer(tiny_folder, fake_servers, mode) as subject:

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            counts.append(fake_servers[1].count("/v1/completions"))
            if step == 2:  # it takes no weights and answers nothing
                fake_servers[1].always, fake_servers[1].reload_fault = drop, drop
            if step == 4:
                fake_servers[1].always = fake_servers[1].reload_fault = None

        subject.on_step = on_step
        subject.fit()
        history = subject.history
    assert len(history) == 6
    for row in history:
        assert row["staleness/max"] <= (0.0 if mode == "sync" else 1.0)
        if mode != "sync" and row["staleness/max"] == 0.0:
            assert row["rollout_corr/log_ppl_abs_diff"] < 1e-4
    assert counts[1] > 0, "it was asked before"
    assert fake_servers[1].count("/v1/completions") > counts[3], "and after"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_when_all_servers_die_the_run_ends_with_one_error(
    tiny_folder: Path, fake_servers: list[FakeServer], mode: str
) -> None:
    with trainer(tiny_folder, fake_servers, mode) as subject:

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            for fake in fake_servers:
                fake.always = status(503, "out of memory")

        subject.on_step = on_step
        with pytest.raises(EngineError, match=r"none of 2 rollout servers.*out of memory"):
            subject.fit()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_parts_of_a_rollout_come_from_servers_too(
    tiny_folder: Path, fake_servers: list[FakeServer]
) -> None:
    with trainer(tiny_folder, fake_servers, "sync", parts=2) as subject:
        subject.fit(num_steps=2)
        assert [row["staleness/max"] for row in subject.history] == [0.0, 0.0]
    assert all(fake.count("/v1/completions") > 3 for fake in fake_servers)
