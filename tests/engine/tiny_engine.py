"""Tiny models, batches and rewards that the engine's tests share.

Ray's workers import this module too, for its rewards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from family_models import family_model
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.batch import Batch
from engine.config import ModelConfig
from engine.data.collate import collate_completions
from engine.data.rows import rl_row
from engine.data.tokenizer import train_tokenizer
from engine.models import build_model, save_model
from engine.models.forward import LogProbReader, TokenOutputs, model_logits, token_outputs
from engine.models.packed_attention import Segments
from engine.models.packing import left_align
from engine.runtime.sharded_model import ShardedModel

VOCABULARY = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
TINY_MODEL = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    dtype="float32",  # as on any machine, made wider or not
)


def response_log_probs(model: Any, batch: Batch, temperature: float, **options: Any) -> Tensor:
    """Log-probs `[B, R]` of the response tokens; 0 where there is no token."""
    return token_outputs(model, batch, temperature, **options).log_probs


def outputs_with_kl(
    model: Any, batch: Batch, temperature: float, reference: Any, **options: bool
) -> TokenOutputs:
    """Outputs with the exact KL to `reference`, by the reader that roles have."""

    def reference_logits(micro: Batch) -> Tensor:
        with torch.no_grad():
            return model_logits(reference, left_align(micro))

    reader = LogProbReader(temperature, reference=reference_logits, **options)
    return TokenOutputs(**reader.from_model(model, batch))


def segments_of(groups: Sequence[tuple[int, list[int]]]) -> Segments:
    """Segments of groups in order: (tokens of the prefix, of each segment after it)."""
    runs, at = [], 0
    for prefix, sizes in groups:
        begin = at
        if prefix:
            runs.append((at, at, at, at := at + prefix))
        for size in sizes:
            runs.append((begin, begin + prefix, at, at := at + size))
    return Segments.of_runs(runs, torch.device("cpu"))


def tiny_model(family: str, seed: int = 0, vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """A random model of `family` (gpt2, qwen3_moe, mixtral, or one that tp and pp know) in
    evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "gpt2":
            shape = GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
            )
            return GPT2LMHeadModel(shape).eval()
        if family == "qwen3_moe":
            experts = {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
            moe = Qwen3MoeConfig(**_SHAPE, **experts, num_experts_per_tok=2, head_dim=8)
            return Qwen3MoeForCausalLM(moe).eval()
        if family == "mixtral":
            few = MixtralConfig(**_SHAPE, num_local_experts=2, num_experts_per_tok=1)
            return MixtralForCausalLM(few).eval()
        if family == "llama":
            return LlamaForCausalLM(LlamaConfig(**_SHAPE)).eval()
        if family != "qwen2":
            return family_model(family, seed, **_SHAPE | {"vocab_size": vocab_size, "head_dim": 8})
        return Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True)).eval()


def write_tiny_folder(folder: Path, model: ModelConfig = TINY_MODEL, family: str = "") -> Path:
    """A model, of `family` if it is given, and a tokenizer."""
    texts = [f"{a}+{b}={a + b}\n#### {a + b}" for a in range(20) for b in range(20)]
    tokenizer = train_tokenizer(texts, 300)
    if family:
        return save_model(tiny_model(family, vocab_size=len(tokenizer)), tokenizer, folder)
    return save_model(build_model(model, tokenizer, seed=0), tokenizer, folder)


def random_completions(
    rows: int, seed: int = 0, longest_prompt: int = 9, longest_response: int = 7
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of mixed lengths, ids from 3 up."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(longest: int) -> list[int]:
        length = int(torch.randint(1, longest + 1, (1,), generator=draw))
        return torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()

    return (
        [tokens(longest_prompt) for _ in range(rows)],
        [tokens(longest_response) for _ in range(rows)],
    )


def completions_batch(prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> Batch:
    """Lay completions out as the rollout role does, one prompt each."""
    source = Batch({"group_ids": torch.arange(len(prompts))}, {"prompt_ids": list(prompts)})
    return collate_completions(
        source,
        range(len(prompts)),
        responses,
        [[-1.0] * len(r) for r in responses],
        pad_token_id=0,
    )


def training_batch(rows: int, seed: int = 0) -> Batch:
    """Completions with random advantages, log-probs, values and returns, as an update gets them."""
    return with_training_fields(completions_batch(*random_completions(rows, seed)), seed)


def shared_prompts_batch(sizes: Sequence[int] = (4, 1, 3, 2), seed: int = 0) -> Batch:
    """The same with prompts of so many consecutive rows each; the second row has no response."""
    prompts, responses = random_completions(sum(sizes), seed)
    shared = [prompts[i] for i, size in enumerate(sizes) for _ in range(size)]
    responses[1] = []
    return with_training_fields(completions_batch(shared, responses), seed)


def branches_batch(turns: int = 3, members: int = 4, seed: int = 0) -> Batch:
    """Episodes of one prompt whose turns are a row each: earlier ones without their thoughts."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=draw).tolist()

    question = tokens(17)
    prompts, responses = [], []
    for _ in range(members):
        told = list(question)
        for _ in range(turns):
            thought, answer = tokens(3), tokens(3)
            prompts.append(list(told))
            responses.append(thought + answer)
            told += answer + tokens(14)
    return with_training_fields(completions_batch(prompts, responses), seed)


def with_training_fields(batch: Batch, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed + 1)
    mask = batch["response_mask"]

    def noise(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(mask.shape, generator=draw) * scale + shift) * mask

    return batch | {
        "advantages": noise(1.0),
        "old_log_probs": noise(0.5, -4.5),
        "ref_log_probs": noise(0.5, -4.5),
        "values": noise(0.3),
        "returns": noise(1.0),
    }


def fill_value_head(sharded: ShardedModel) -> None:
    """Let a new critic, who predicts 0 everywhere, tell states apart."""
    whole = {name: tensor.clone() for name, tensor in sharded.full_tensors()}
    head = whole["head.weight"]
    head.copy_(torch.linspace(-0.2, 0.2, head.numel()).view_as(head))
    sharded.load_full_tensors(whole)


def arithmetic_rows(count: int) -> list[dict[str, Any]]:
    return [rl_row("test", f"{i % 7}+{i % 5}=", str(i % 7 + i % 5), {}) for i in range(count)]


def digit_share(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward that is easily learned: the share of a completion's characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def digits_and_brevity(
    prompts: Any, completions: Sequence[str], **columns: Any
) -> dict[str, list[float]]:
    """A reward of two components."""
    brevity = [1.0 - min(len(text), 20) / 20 for text in completions]
    return {"digits": digit_share(prompts, completions), "brevity": brevity}


def broken_reward(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError("the judge is out")


def sometimes_right(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """Seldom 1, so that most groups have no signal."""
    return [float(sum(map(ord, text)) % 11 == 0) for text in completions]


def always_one(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """No completion is better than another."""
    return [1.0] * len(completions)


def slow_reward(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    time.sleep(0.3)
    return digit_share(prompts, completions)


def sometimes_broken(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """Fails on completions with an even number of characters."""
    if any(len(text) % 2 == 0 for text in completions):
        raise ValueError("an even completion")
    return digit_share(prompts, completions)


def save_family(family: str, folder: Path) -> Path:
    """Save a random model of `family`, for workers whose data come as token ids."""
    tiny_model(family).save_pretrained(folder)
    return folder
