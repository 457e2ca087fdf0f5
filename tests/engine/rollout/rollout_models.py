"""Tiny models, prompts and transformers references that the rollout tests share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.rollout.protocol import RolloutEngine
from engine.rollout.vllm import VllmEngine


@dataclass
class Subject:
    """An engine and the trainer's model that it serves."""

    engine: RolloutEngine
    model: nn.Module
    name: str
    tolerance: float = 1e-4  # of a log-prob against transformers' in float32
    mean_tolerance: float = 1e-4  # of their mean error
    exact: bool = True  # whether greedy tokens must be those of an argmax loop in float32


CONTEXT = 128
VOCABULARY = 100  # not a multiple of 64: vLLM pads it
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,  # logits far from uniform, so that mistakes show
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _llama() -> nn.Module:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, attention_bias=True, rope_parameters=rope))


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=128,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.15,
        )
    )


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True)),
    "llama": _llama,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=64)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=None)),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=6)),
    "gpt2": _gpt2,
}
FAMILIES = ["qwen2", "llama", "qwen3", "mistral"]
GENERIC = ["mistral_sliding", "gpt2"]


def qwen2() -> nn.Module:
    """What `server_process.vllm_url` serves for most tests."""
    return build("qwen2")


def build(name: str) -> nn.Module:
    """A random model with nothing at its initial special value (zero biases, unit norms)."""
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    torch.set_rng_state(state)
    return model


def make_prompts(count: int, longest: int = 24, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def reference_logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """transformers' logits `[len(tokens), V]` for each of `tokens` after `prompt`, no cache."""
    training = model.training
    model.eval()
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].float()
    model.train(training)
    return logits[len(prompt) - 1 : -1]


def reference_log_probs(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    logits = reference_logits(model, prompt, tokens)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def train(model: nn.Module, steps: int) -> None:
    """A few real AdamW steps, in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(steps))
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def counted_prefills(engine: VllmEngine) -> list[int]:
    """Prompt tokens that vLLM computes, not found in its cache, of each request that ends."""
    counts, step = list[int](), engine._requests.step

    def counted() -> list[Any]:
        outputs: list[Any] = list(step())
        ended = [output for output in outputs if output.finished]
        counts.extend(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in ended)
        return outputs

    engine._requests.step = counted
    return counts
