"""The engine `server` over a real vLLM server: its weights, and who else may bring it some.

One server is shared by all tests of a session, so each brings the weights that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_server import FakeServer, serving
from rollout_models import CONTEXT, VOCABULARY, build, make_prompts, reference_log_probs, train
from server_process import vllm_url
from torch import nn

from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.server import ServerEngine
from engine.rollout.server.weights import WeightFolders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the server's start

PARAMS = SamplingParams(n=2, max_new_tokens=6, seed=5)
PROMPTS = make_prompts(3, seed=2)


@pytest.fixture
def url() -> Iterator[str]:
    """The server's address; afterwards it serves, whatever a test left behind."""
    address = vllm_url()
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


def test_the_server_says_which_version_it_serves(url: str) -> None:
    model = build("qwen2")
    engine = open_engine(model, url)
    for version in (1, 4):
        train(model, steps=2)
        engine.update_weights(model, version)
        assert served(url).startswith(f"policy-v{version}-")
        check_log_probs(model, PROMPTS, engine.generate(PROMPTS, PARAMS))
    engine.close()


def test_no_prefix_of_older_weights_is_used(url: str) -> None:
    """Prompts of several cache blocks; the conformance suite's are shorter than one."""
    model = build("qwen2")
    engine = open_engine(model, url)
    prompts = [(prompt * CONTEXT)[:110] for prompt in PROMPTS]
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
        engine.generate(PROMPTS, PARAMS)
    assert served(url).startswith("loading policy-v1-"), "nobody takes it for a whole policy"
    assert paused(url)
    train(model, steps=1)
    engine.update_weights(model, 2)
    check_log_probs(model, PROMPTS, engine.generate(PROMPTS, PARAMS))
    assert not paused(url)
    engine.close()


def test_a_model_of_another_shape_is_refused(url: str) -> None:
    other: Any = build("qwen2")
    other.resize_token_embeddings(VOCABULARY + 28)
    with pytest.raises(
        RolloutError, match=r"differ in name or shape.*embed_tokens.*\(128, 128\) against \(100,"
    ):
        open_engine(other, url)


def test_another_model_with_fixed_weights_is_refused(url: str) -> None:
    """Nothing is loaded, so no shapes are compared; the probe finds it."""
    open_engine(build("qwen2"), url).close()
    for size, message in ((VOCABULARY + 28, "another model or other weights"), (5, "outside the")):
        other: Any = build("qwen2")
        other.resize_token_embeddings(size)
        with pytest.raises(RolloutError, match=message):
            open_engine(other, url, weights="none")


def test_weights_that_somebody_else_brought_are_found(url: str) -> None:
    mine, theirs = build("qwen2"), build("qwen2")
    engine = open_engine(mine, url)
    train(theirs, steps=2)
    other = open_engine(theirs, url)
    with pytest.raises(RolloutError, match=r"says that it serves policy-v0-.*somebody else"):
        engine.generate(PROMPTS, PARAMS)
    check_log_probs(theirs, PROMPTS, other.generate(PROMPTS, PARAMS))
    train(mine, steps=1)
    engine.update_weights(mine, 1)
    check_log_probs(mine, PROMPTS, engine.generate(PROMPTS, PARAMS))
    engine.close()
    other.close()


def test_a_longer_context_than_the_server_s_is_refused(url: str) -> None:
    model: Any = build("qwen2")
    model.config.max_position_embeddings = 2 * CONTEXT
    with pytest.raises(ConfigError, match=f"context is {CONTEXT} tokens .*--max-model-len"):
        open_engine(model, url)


def test_a_server_without_the_endpoints_is_told_how_to_start() -> None:
    with serving(FakeServer(build("qwen2"))) as fake:
        with pytest.raises(RolloutError, match=r"weight_info.*404.*VLLM_SERVER_DEV_MODE=1"):
            open_engine(build("qwen2"), fake.url)
        assert fake.count("/v1/completions") == 0
