"""What the tests of serving share: a registered model, references of its text, and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from engine.config import ModelConfig
from engine.data.templates import decode_response, encode_prompt
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model
from engine.storage.artifacts import Draft, publish, staging
from engine.tracking import Tracker

NAME = "policy"
# A head size of 32, which vLLM has kernels for on CPU too.
SHAPE = ModelConfig(
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    initializer_range=0.2,
    dtype="float32",
)


def publish_model(source: Path) -> Path:
    """Publish a copy of a model's folder as an artifact."""
    with staging("rl") as folder:
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return publish(folder, Draft(kind="rl", config={"seed": 0}))


def register(artifact: Path, alias: str = "champion") -> str:
    """Register an artifact and point the alias at it; return the version."""
    tracker = Tracker()
    with tracker.stage("rl") as stage:
        version = tracker.register_model(artifact, NAME, stage.run_id)
    current = tracker.champion(NAME, alias)
    tracker.set_alias(NAME, alias, version, current.version if current else None)
    return version


def greedy_reference(folder: Path, prompt: Sequence[int], tokens: int) -> str:
    """What transformers' own forward gives for a prompt, the likeliest token each time."""
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    new = ids[len(prompt) :]
    return decode_response(tokenizer, new[:-1] if new[-1] == tokenizer.eos_token_id else new)


def chat_tokens(folder: Path, text: str) -> list[int]:
    return encode_prompt(load_tokenizer(folder), [{"role": "user", "content": text}])


@contextlib.contextmanager
def serve_process(*arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """`python -m engine.serve` in a process of its own, which ends with the block."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.serve", *arguments],
            stdout=output, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def await_status(process: subprocess.Popen[str], url: str, status: int, seconds: float) -> Any:
    """Poll `/health` until it answers with a status; return what it says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/health", timeout=5)
            if answer.status_code == status:
                return answer.json()
        time.sleep(0.02)
    raise AssertionError(f"no status {status}; the process is {process.poll()}")


def await_text(log: Path, text: str, seconds: float = 60.0) -> None:
    """Wait until a process has written it."""
    deadline = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, float]:
    """Send a signal; return the exit status and how many seconds it took."""
    started = time.monotonic()
    process.send_signal(number)
    return process.wait(120), time.monotonic() - started
