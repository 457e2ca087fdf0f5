"""The stream over rollout servers: whole completions, each of one version; see `fake_server.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fake_server import FakeServer, Handler, connect, drop, hang, serving, status
from rollout_models import build, make_prompts
from stream_checks import Found, drain, gather, texts, weights_of, with_n, worst_error, write

from engine.errors import RolloutError
from engine.rollout.server import ServerEngine

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
