"""The engine `server` in the conformance suite: over a real vLLM server, and over TGI's format.

TGI itself needs a GPU here; its format is spoken by `fake_server.py`, one request a completion,
which makes the suite's thousands of draws slow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer, serving, words
from rollout_models import CONTEXT, VOCABULARY, Subject, build, qwen2
from rollout_subjects import subject
from server_process import vllm_url

from engine.rollout.protocol import create_engine


@subject("server-vllm", shared=True, marks=(pytest.mark.slow, pytest.mark.timeout(600)))
def _vllm() -> Iterator[Subject]:
    model = build("qwen2")
    engine = create_engine("server", model, max_model_len=CONTEXT, seed=0, url=vllm_url(qwen2))
    yield Subject(engine, model, "server-vllm")
    engine.close()


@subject("server-tgi", shared=True, marks=(pytest.mark.slow,))
def _tgi() -> Iterator[Subject]:
    model = build("llama")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = words(Path(folder), VOCABULARY)
        with serving(FakeServer(build("llama"), tokenizer)) as fake:
            engine = create_engine(
                "server",
                model,
                max_model_len=CONTEXT,
                seed=0,
                url=fake.url,
                api="tgi",
                tokenizer=folder,
                weights="folder",
                reload_url="/reload",
                version_url="/info",
            )
            yield Subject(engine, model, "server-tgi")
            engine.close()
