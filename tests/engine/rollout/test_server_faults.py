"""What the engine `server` makes of a network and a server that fail; see `fake_server.py`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_server import (
    FakeServer,
    Fault,
    connect,
    dribble,
    drop,
    garbled,
    half,
    hang,
    serving,
    status,
)
from rollout_models import build, make_prompts
from server_process import free_port

from engine.config.rollout_engines import ServerConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import SamplingParams
from engine.rollout.server import ServerEngine
from engine.rollout.server import client as client_module
from engine.rollout.server.client import Client

FAULTS: dict[str, tuple[Fault, str]] = {
    "500": (status(500, "CUDA out of memory"), "status 500: .*CUDA out of memory"),
    "503": (status(503, "loading", retry_after="0"), "status 503"),
    "429": (status(429, "slow down"), "status 429"),
    "connection reset": (drop, "RemoteProtocolError|ReadError"),
    "half an answer": (half, "RemoteProtocolError|ReadError"),
    "garbled JSON": (garbled, "which is not JSON"),
    "hang": (hang, "no answer within rollout.server.request_timeout_s=1.5"),
    "slow bytes": (dribble, "no answer within rollout.server.request_timeout_s=1.5"),
}
PROMPTS = make_prompts(4, seed=3)
PARAMS = SamplingParams(n=2, max_new_tokens=6, seed=5)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer(build("qwen2"))) as server:
        yield server


@pytest.fixture
def engine(fake: FakeServer) -> Iterator[ServerEngine]:
    engine = connect(fake, build("qwen2"))
    engine.generate([[5]], SamplingParams(max_new_tokens=1))  # connections are up
    yield engine
    engine.close()


Loops = Callable[[], list[threading.Thread]]


@pytest.fixture
def loops() -> Loops:
    """The threads that requests of this test's clients run on; other files' engines have theirs."""

    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "rollout-server"]

    before = running()
    return lambda: [thread for thread in running() if thread not in before]


def timed(fake: FakeServer, fault: Fault) -> ServerEngine:
    """An engine with a short deadline for a request, where the fault is to let it pass."""
    options: dict[str, Any] = {"request_timeout_s": 1.5} if fault in (hang, dribble) else {}
    return connect(fake, build("qwen2"), weights="none", **options)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_no_token_and_one_that_stays_is_named(fake: FakeServer, name: str) -> None:
    fault, message = FAULTS[name]
    engine = timed(fake, fault)
    expected = engine.generate(PROMPTS, PARAMS)
    before = fake.count("/v1/completions")
    fake.faults = [fault, fault]  # of one request, or of two
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert fake.count("/v1/completions") - before == len(PROMPTS) + 2
    fake.always = fault
    started = time.monotonic()
    with pytest.raises(RolloutError, match=rf"completions failed 3 times.*({message})"):
        engine.generate(PROMPTS, PARAMS)
    assert time.monotonic() - started < 15
    fake.always = None
    assert engine.generate(PROMPTS, PARAMS) == expected, "a later rollout works"
    engine.close()


def test_the_deadline_of_a_rollout_ends_it_and_names_the_latest_failure(fake: FakeServer) -> None:
    engine = connect(fake, build("qwen2"), timeout_s=2.0, max_retries=1000)
    fake.always = status(503, "overloaded")
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"within rollout.server.timeout_s=2.*503.*overloaded"):
        engine.generate(PROMPTS, PARAMS)
    assert time.monotonic() - started < 6
    engine.close()


def test_what_the_server_calls_wrong_is_not_tried_again(
    fake: FakeServer, engine: ServerEngine
) -> None:
    before = fake.count("/v1/completions")
    fake.always = status(400, "prompt too long")
    with pytest.raises(RolloutError, match=r"refused: status 400.*prompt too long"):
        engine.generate([[5]], PARAMS)
    assert fake.count("/v1/completions") == before + 1


def test_the_first_failure_ends_the_requests_that_hang(fake: FakeServer) -> None:
    engine = connect(fake, build("qwen2"))
    fake.faults = [hang, hang, hang, status(400, "no")]
    started = time.monotonic()
    with pytest.raises(RolloutError, match="status 400"):
        engine.generate(PROMPTS, PARAMS)
    assert time.monotonic() - started < 5, "a request's own deadline is 20 s"
    engine.close()


def test_a_server_s_wish_to_wait_is_granted(fake: FakeServer, engine: ServerEngine) -> None:
    fake.faults = [status(429, "wait", retry_after="1")]
    started = time.monotonic()
    engine.generate([[5]], PARAMS)
    assert time.monotonic() - started >= 1.0


def test_no_server_there() -> None:
    nobody = FakeServer(build("qwen2"), url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RolloutError, match=r"failed 3 times.*ConnectError.*server is up"):
        connect(nobody, build("qwen2"))


def test_another_kind_of_server(fake: FakeServer) -> None:
    with pytest.raises(RolloutError, match=r"models refused: status 404.*rollout.server.url"):
        connect(fake, build("qwen2"), url=f"{fake.url}/nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "needs rollout.server.url"),
        ({"url": "http://host:port"}, "rollout.server.url='http://host:port': Invalid port"),
        ({"url": "host:80"}, "url='host:80'"),
        (
            {"version_url": "http://host:port/x"},
            "version_url='http://host:port/x' is no addr",
        ),
        (
            {"reload_url": "http://host:port/x"},
            "reload_url='http://host:port/x' is no addr",
        ),
        ({"version_url": "http://[::1/x"}, "version_url='http://[^']*' is no address: .*IPv6"),
        ({"version_url": "host:80/x"}, "version_url='host:80/x' is no address: it is neither http"),
        ({"weights": "ftp"}, r"weights='ftp' is unknown.*folder, none, vllm"),
        ({"reload_url": ""}, "needs rollout.server.reload_url"),
        ({"weights": "vllm"}, "reload_url=/reload has no effect with weights=vllm"),
        ({"allow_fixed_policy": True}, "allow_fixed_policy=True has no effect"),
        ({"concurency": 3}, "unknown setting 'concurency'"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env='NO_SUCH_KEY' names an environment variable"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's context"),
    ],
)
def test_bad_settings_are_refused(
    loops: Loops, fake: FakeServer, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(fake, build("qwen2"), **options)
    assert fake.count("/reload") == 0
    assert loops() == [], "no thread is left behind"


def test_the_key_is_sent(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    connect(fake, build("qwen2"), api_key_env="ROLLOUT_KEY").close()
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}


@pytest.mark.parametrize("key", ["clé", "secret\n", "a\x7fb"])
def test_a_key_that_can_t_be_sent_is_refused_and_not_shown(
    loops: Loops, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", key)
    with pytest.raises(ConfigError, match=r"api_key_env='ROLLOUT_KEY'.*not ASCII") as refusal:
        connect(fake, build("qwen2"), api_key_env="ROLLOUT_KEY")
    assert key not in str(refusal.value)
    assert loops() == []


def test_what_is_no_address_is_not_tried_again(fake: FakeServer) -> None:
    client = Client(ServerConfig(url=fake.url, max_retries=1000, backoff_s=30.0, timeout_s=5.0))
    for bad in ("http://host:port/x", "ftp://host/x"):
        with pytest.raises(ConfigError, match=rf"GET {bad} is no address: .*give a path"):
            client.run(lambda bad=bad: client.text("GET", bad), "a hook's question")
    client.close()


def test_no_thread_is_left_when_a_client_can_t_be_made(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**options: Any) -> None:
        raise OSError("no sockets left")

    monkeypatch.setattr(httpx, "AsyncClient", broken)
    with pytest.raises(OSError, match="no sockets left"):
        Client(ServerConfig(url="http://127.0.0.1:1"))
    assert loops() == []


def test_closing_waits_for_no_callback_that_hangs(
    loops: Loops,
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client_module, "_CLOSING_S", 0.2)
    held, released = threading.Event(), threading.Event()
    failures: list[str] = []

    def on_progress(done: int) -> None:
        held.set()
        released.wait(30)

    def rollout() -> None:
        try:
            engine.generate([[5]], SamplingParams(max_new_tokens=1), on_progress)
        except RolloutError as error:
            failures.append(f"{error}")

    engine = connect(fake, build("qwen2"))
    (thread,) = loops()
    work = threading.Thread(target=rollout, daemon=True)
    work.start()
    assert held.wait(10)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        engine.close()
        engine.close()
    assert time.monotonic() - started < 5
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "its connections were not closed within 0.2 s; it is left to the end of" in said[0]
    assert "its thread did not end within 0.2 s, as a callback such as on_progress" in said[1]
    released.set()
    thread.join(10)
    work.join(10)
    assert not thread.is_alive(), "it ends with the callback"
    assert failures == [f"{fake.url} can't be used for a rollout: the engine was closed"]


def test_connections_that_can_t_be_closed_are_named_and_the_thread_ends(
    loops: Loops,
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(self: httpx.AsyncClient) -> None:
        raise OSError("bad file descriptor")

    client = Client(ServerConfig(url=fake.url))
    monkeypatch.setattr(httpx.AsyncClient, "aclose", broken)
    with caplog.at_level(logging.WARNING):
        client.close()
    assert "its connections were not closed: OSError: bad file descriptor" in caplog.text
    assert loops() == []


def test_a_closed_engine_serves_nothing(loops: Loops, engine: ServerEngine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="can't serve: it was closed"):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(RolloutError, match="the engine was closed"):
        engine.update_weights(build("qwen2"), 1)
    assert loops() == []
