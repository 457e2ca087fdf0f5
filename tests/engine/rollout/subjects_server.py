"""The engine `server` in the conformance suite, over a real vLLM server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollout_models import CONTEXT, Subject, build, qwen2
from rollout_subjects import subject
from server_process import vllm_url

from engine.rollout.protocol import create_engine


@subject("server-vllm", shared=True, marks=(pytest.mark.slow, pytest.mark.timeout(600)))
def _vllm() -> Iterator[Subject]:
    model = build("qwen2")
    engine = create_engine("server", model, max_model_len=CONTEXT, seed=0, url=vllm_url(qwen2))
    yield Subject(engine, model, "server-vllm")
    engine.close()
