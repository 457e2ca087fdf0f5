"""A real pretrained model in transformers, native rollout and vLLM: tokens and log-probs agree."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from rollout_models import reference_log_probs, reference_logits
from torch import nn

from engine.data.templates import encode_prompt, stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model
from engine.rollout.protocol import SamplingParams, create_engine

QUESTIONS = (
    "What is the capital of France?",
    "Tom has 23 apples. He buys 14 and eats 9. How many apples now?",
    "Write one short sentence about the sea.",
    "Name the three primary colours.",
)
SIZES = {"max_num_seqs": 8, "max_model_len": 160, "kv_cache_memory_mb": 128, "seed": 0}
NEW_TOKENS = 32
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(smollm2_folder: Path) -> nn.Module:
    return load_model(smollm2_folder, "float32").eval()


@pytest.mark.parametrize("name", ["native", "vllm"])
def test_an_engine_decodes_as_transformers_does(
    name: str, model: nn.Module, smollm2_folder: Path
) -> None:
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    tokenizer = load_tokenizer(smollm2_folder)
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS]
    stop = stop_token_ids(tokenizer, model.config)
    torch.set_num_threads(2)
    engine = create_engine(name, model, **SIZES)
    try:
        greedy = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=stop)
        for completion in engine.generate(prompts, greedy):
            prompt = prompts[completion.prompt_index]
            logits = reference_logits(model, prompt, completion.token_ids)
            best = logits.max(-1).values
            chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert float((best - chosen).max()) < 1e-3, "a token that is not the most likely one"
            ended = completion.token_ids[-1] in stop
            assert ended == (completion.finish_reason == "stop")
        drawn = SamplingParams(n=2, max_new_tokens=NEW_TOKENS, seed=3, stop_token_ids=stop)
        for completion in engine.generate(prompts, drawn):
            prompt = prompts[completion.prompt_index]
            expected = reference_log_probs(model, prompt, completion.token_ids)
            assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=1e-3)
    finally:
        engine.close()
