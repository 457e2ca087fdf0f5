"""A policy with LoRA adapters on a server, which gets them merged into its matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer, connect, serving, words
from rollout_models import VOCABULARY, build, make_prompts, reference_log_probs

from engine.config import LoRAConfig, RLConfig
from engine.models import adapter_parameters, add_adapters
from engine.models.quantize import quantize_linears
from engine.rollout.protocol import SamplingParams
from engine.trainers.run_spec import check_lora


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_the_server_serves_base_and_adapters_as_one(tmp_path: Path, quantize: str) -> None:
    tokenizer = words(tmp_path / "tokenizer", VOCABULARY)
    model: Any = build("llama")
    if quantize:
        quantize_linears(model, quantize)
    add_adapters(model, LoRAConfig(rank=4, alpha=8.0), seed=1)
    prompts = make_prompts(3, seed=3)
    with serving(FakeServer(build("llama"), tokenizer)) as fake:
        settings = {"api": "tgi", "version_url": "/info", "tokenizer": str(tmp_path / "tokenizer")}
        engine = connect(fake, model, **settings)
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
