"""Servers by their APIs: OpenAI, vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_server import FakeServer, Handler, connect, sampling, serving
from rollout_models import (
    CONTEXT,
    VOCABULARY,
    build,
    make_prompts,
    qwen2,
    reference_log_probs,
    train,
)
from server_process import vllm_url
from torch import nn

from engine.errors import ConfigError, DivergedRolloutError, EngineError, RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.server import ServerEngine
from engine.rollout.server.weights import WeightFolders

PROMPTS = make_prompts(3, seed=3)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer(build("qwen2"))) as server:
        yield server


def bodies(fake: FakeServer) -> list[dict[str, Any]]:
    """Completion requests since the probe of the engine's start."""
    return [body for _, path, body in fake.seen if path == "/v1/completions"][1:]


def test_groups_are_cut_into_requests_and_put_together_in_order(fake: FakeServer) -> None:
    engine = connect(fake, build("qwen2"), weights="none", completions_per_request=2, concurrency=1)
    progress: list[int] = []
    params = SamplingParams(n=5, max_new_tokens=4, temperature=0.8, top_k=7, top_p=0.9, seed=1)
    done = engine.generate(PROMPTS, params, progress.append)
    asked = bodies(fake)
    assert [(body["prompt"], body["n"]) for body in asked] == [
        (prompt, n) for prompt in PROMPTS for n in (2, 2, 1)
    ]
    assert len({body["seed"] for body in asked}) == 9, "no two requests share their noise"
    assert progress == [2, 4, 5, 7, 9, 10, 12, 14, 15]
    assert [c.prompt_index for c in done] == [i for i in range(3) for _ in range(5)]
    expected = [c for body in asked for c in fake.decode(body["prompt"], sampling(body))]
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert [c.log_probs for c in done] == [c.log_probs for c in expected]
    engine.close()


def test_no_more_requests_at_once_than_allowed(fake: FakeServer) -> None:
    lock, counts = threading.Lock(), {"now": 0, "most": 0}

    def count(handler: Handler) -> bool:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
        time.sleep(0.05)
        with lock:
            counts["now"] -= 1
        return False

    engine = connect(fake, build("qwen2"), weights="none", concurrency=3, completions_per_request=1)
    fake.always = count
    engine.generate(PROMPTS, SamplingParams(n=5, max_new_tokens=2))
    assert counts["most"] == 3
    engine.close()


def test_a_later_prompt_number_draws_what_it_would_among_all(fake: FakeServer) -> None:
    engine = connect(fake, build("qwen2"), weights="none")
    params = SamplingParams(n=2, max_new_tokens=5, seed=9)
    whole = engine.generate(PROMPTS, params)
    rest = engine.generate(
        PROMPTS[1:], SamplingParams(n=2, max_new_tokens=5, seed=9, first_prompt=1)
    )
    assert [c.token_ids for c in rest] == [c.token_ids for c in whole[2:]]
    engine.close()


def test_nan_logits_are_told(fake: FakeServer) -> None:
    engine = connect(fake, build("qwen2"), weights="none")
    with torch.no_grad():
        fake.model.get_parameter("model.layers.1.mlp.down_proj.weight").fill_(torch.nan)
    with pytest.raises(DivergedRolloutError, match="diverged"):
        engine.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=5))
    engine.close()


def choice(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Changes the first completion of an answer."""

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        change(answer["choices"][0])
        return answer

    return edit


def end_early(choice: dict[str, Any]) -> None:
    choice["token_ids"] = choice["token_ids"][:2]
    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:2]
    choice["finish_reason"] = "abort"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (choice(lambda c: c.pop("logprobs")), r"has no logprobs.token_logprobs"),
        (choice(lambda c: c.update(logprobs=None)), r"has no logprobs.token_logprobs"),
        (choice(lambda c: c.pop("token_ids")), r"has no token_ids: .*; use vLLM's server"),
        (choice(lambda c: c["token_ids"].pop()), r"5 tokens and 6 log-probs"),
        (choice(end_early), r"ended a completion .* after 2 of 6 tokens \('abort'\)"),
        (choice(lambda c: c["token_ids"].__setitem__(0, 100)), "token id 100, .*vocabulary of 100"),
        (lambda answer: answer | {"choices": answer["choices"][1:]}, "completions_per_request=1"),
        (lambda answer: {"object": "list"}, "answer has no choices"),
    ],
)
def test_answers_that_are_no_whole_completions(
    fake: FakeServer, edit: Callable[[Any], Any], message: str
) -> None:
    engine = connect(fake, build("qwen2"), weights="none")
    fake.edit = edit
    with pytest.raises(RolloutError, match=message):
        engine.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=6))
    engine.close()


def raw(fake: FakeServer) -> None:
    fake.raw_log_probs = True


def shorter(fake: FakeServer) -> None:
    fake.context = CONTEXT - 1


def another(fake: FakeServer) -> None:
    with torch.no_grad():
        for parameter in fake.model.parameters():
            parameter.mul_(0.7)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (raw, {}, RolloutError, "--logprobs-mode processed_logprobs"),
        (shorter, {}, ConfigError, f"context is {CONTEXT - 1} tokens and this run's {CONTEXT}"),
        (another, {"weights": "none"}, RolloutError, "serves another model or other weights"),
        (
            lambda fake: None,
            {"served_model": "qwen"},
            RolloutError,
            "served_model='qwen' is not served .*policy",
        ),
    ],
)
def test_servers_that_don_t_fit_are_refused_before_a_rollout(
    fake: FakeServer,
    change: Callable[[FakeServer], None],
    options: dict[str, Any],
    error: type[EngineError],
    message: str,
) -> None:
    change(fake)
    with pytest.raises(error, match=message):
        connect(fake, build("qwen2"), **options)


def test_the_distance_that_is_refused_is_a_setting(fake: FakeServer) -> None:
    another(fake)
    engine = connect(fake, build("qwen2"), weights="none", probe_tolerance=10.0)
    engine.close()
    engine = connect(fake, build("qwen2"), weights="none", probe_tolerance=0.0)
    assert fake.count("/v1/completions") == 1, "0 leaves the probe out"
    engine.close()


PARAMS = SamplingParams(n=2, max_new_tokens=6, seed=5)


VLLM_PROMPTS = make_prompts(3, seed=2)


@pytest.fixture
def url() -> Iterator[str]:
    """The server's address; afterwards it serves, whatever a test left behind."""
    address = vllm_url(qwen2)
    yield address
    open_engine(build("qwen2"), address).close()


def open_engine(model: nn.Module, url: str, **options: Any) -> ServerEngine:
    return ServerEngine(model, url=url, **{"backoff_s": 0.05, "max_retries": 2} | options)


def check_log_probs(
    model: nn.Module, prompts: list[list[int]], completions: list[Completion]
) -> None:
    for c in completions:
        expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


def served(url: str) -> str:
    said: str = httpx.get(f"{url}/weight_info").json()["weight_version"]
    return said


def paused(url: str) -> bool:
    said: bool = httpx.get(f"{url}/is_paused").json()["is_paused"]
    return said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_server_says_which_version_it_serves(url: str) -> None:
    model = build("qwen2")
    engine = open_engine(model, url)
    for version in (1, 4):
        train(model, steps=2)
        engine.update_weights(model, version)
        assert served(url).startswith(f"policy-v{version}-")
        check_log_probs(model, VLLM_PROMPTS, engine.generate(VLLM_PROMPTS, PARAMS))
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_prefix_of_older_weights_is_used(url: str) -> None:
    """Prompts of several cache blocks; the conformance suite's are shorter than one."""
    model = build("qwen2")
    engine = open_engine(model, url)
    prompts = [(prompt * CONTEXT)[:110] for prompt in VLLM_PROMPTS]
    for version in range(1, 4):
        for _ in range(2):  # the second finds the first one's prefixes
            check_log_probs(model, prompts, engine.generate(prompts, PARAMS))
        train(model, steps=2)
        engine.update_weights(model, version)
    engine.close()


def flip_a_byte(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def cut_short(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:5000])


def take_away(path: Path) -> None:
    path.rename(path.parent / "elsewhere")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip_a_byte, "files are torn or were changed"),
        (cut_short, "can't be read here"),
        (take_away, "no such folder on the server's machine"),
    ],
)
def test_a_folder_that_is_not_whole_is_not_loaded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Any, message: str
) -> None:
    model = build("qwen2")
    engine = open_engine(model, url, weights_dir=str(tmp_path))
    write = WeightFolders.write

    def write_and_harm(*arguments: Any) -> Path:
        path = write(*arguments)
        harm(path)
        return path

    train(model, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(WeightFolders, "write", write_and_harm)
        with pytest.raises(RolloutError, match=rf"could not take policy version 1: .*{message}"):
            engine.update_weights(model, 1)
    with pytest.raises(RolloutError, match="can't serve"):
        engine.generate(VLLM_PROMPTS, PARAMS)
    assert served(url).startswith("loading policy-v1-"), "nobody takes it for a whole policy"
    assert paused(url)
    train(model, steps=1)
    engine.update_weights(model, 2)
    check_log_probs(model, VLLM_PROMPTS, engine.generate(VLLM_PROMPTS, PARAMS))
    assert not paused(url)
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_model_of_another_shape_is_refused(url: str) -> None:
    other: Any = build("qwen2")
    other.resize_token_embeddings(VOCABULARY + 28)
    with pytest.raises(
        RolloutError, match=r"differ in name or shape.*embed_tokens.*\(128, 128\) against \(100,"
    ):
        open_engine(other, url)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_another_model_with_fixed_weights_is_refused(url: str) -> None:
    """Nothing is loaded, so no shapes are compared; the probe finds it."""
    open_engine(build("qwen2"), url).close()
    for size, message in ((VOCABULARY + 28, "another model or other weights"), (5, "outside the")):
        other: Any = build("qwen2")
        other.resize_token_embeddings(size)
        with pytest.raises(RolloutError, match=message):
            open_engine(other, url, weights="none")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_weights_that_somebody_else_brought_are_found(url: str) -> None:
    mine, theirs = build("qwen2"), build("qwen2")
    engine = open_engine(mine, url)
    train(theirs, steps=2)
    other = open_engine(theirs, url)
    with pytest.raises(RolloutError, match=r"says that it serves policy-v0-.*somebody else"):
        engine.generate(VLLM_PROMPTS, PARAMS)
    check_log_probs(theirs, VLLM_PROMPTS, other.generate(VLLM_PROMPTS, PARAMS))
    train(mine, steps=1)
    engine.update_weights(mine, 1)
    check_log_probs(mine, VLLM_PROMPTS, engine.generate(VLLM_PROMPTS, PARAMS))
    engine.close()
    other.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_longer_context_than_the_server_s_is_refused(url: str) -> None:
    model: Any = build("qwen2")
    model.config.max_position_embeddings = 2 * CONTEXT
    with pytest.raises(ConfigError, match=f"context is {CONTEXT} tokens .*--max-model-len"):
        open_engine(model, url)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_without_the_endpoints_is_told_how_to_start() -> None:
    with serving(FakeServer(build("qwen2"))) as fake:
        with pytest.raises(RolloutError, match=r"weight_info.*404.*VLLM_SERVER_DEV_MODE=1"):
            open_engine(build("qwen2"), fake.url)
        assert fake.count("/v1/completions") == 0
