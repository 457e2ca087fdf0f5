"""The cases of `vs_trl.py`: a saved model, its tokenizer, the rows and the settings of a run.

How lengths come about, the same way on both sides: the saved weights give the end token the
probability 1/79 after every token, whatever the text, and all other tokens nearly equal ones. So
lengths are geometric, cut at the limit: mean 26 of at most 32, mean 77 of at most 256. For that,
channel 0 of every embedding is 1 and the final norm passes it on at about 1, while the end token's
own embedding has there what its log-odds ask for. The learning rate is next to nothing, so lengths
stay as they are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from case_folder import Case, write_case
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from engine.config import DataConfig
from engine.data.sources import load_splits
from engine.data.tokenizer import ASSISTANT, CHAT_TEMPLATE, END, PAD, USER, train_tokenizer
from engine.data.word_problems import bare_answer, deal_problems, slip_answer, worked_answer

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!+-*/=()"
MEAN = 79  # tokens of a completion, were there no limit
LIMITS = {"short": 32, "tail": 256}  # longest completion, by mix
PROMPT = 46  # tokens
LOSS_STEPS = 6  # on one batch, whose losses are compared


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape, and how many prompts a step has at that size."""

    family: str  # qwen2 or llama
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompts: int
    micro_batch: int = 0  # completions that go through a pass together; 0: all of a step's


SIZES = {
    "1M": Size("qwen2", 128, 512, 4, 4, 2, MEAN, 16),
    "10M": Size("qwen2", 320, 1088, 8, 5, 1, MEAN, 16),
    "60M": Size("qwen2", 640, 1792, 14, 10, 2, MEAN, 8, 32),
    "135M": Size("llama", 576, 1536, 30, 9, 3, 49152, 4, 8),  # SmolLM2-135M
}


def write_grpo_case(
    folder: Path, size: str, mix: str, n: int, turns: int, threads: int, prompts: int = 0
) -> Case:
    """Write model, prompts and settings of a GRPO case into `folder`."""
    shape = SIZES[size]
    tokenizer = character_tokenizer(shape.vocabulary)
    save(build_model(shape, tokenizer, MEAN), tokenizer, folder / "model")
    rng = random.Random(0)
    count = (prompts or shape.prompts) * (turns + 1)
    length = PROMPT - 3  # beside the template's three tokens
    texts = ["".join(rng.choices(CHARACTERS, k=length)) for _ in range(count)]
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    prompts = prompts or shape.prompts
    micro = min(shape.micro_batch or prompts * n, prompts * n)
    case = Case("grpo", size, mix, prompts, n, LIMITS[mix], PROMPT, 1, turns, threads, micro)
    return write_case(folder, case, rows)


def write_sft_case(folder: Path, size: str, steps: int, turns: int, threads: int) -> Case:
    """Write an SFT case: the rows of the default task, 32 a step, as its warm start has them."""
    splits = load_splits(DataConfig(sft_size=32 * steps * (turns + 1), train_size=64), 0)
    questions = [row[0]["content"] for row in splits.sft_train["prompt"]]
    responses = list(splits.sft_train["response"])
    tokenizer = train_tokenizer([*questions, *responses], 512)
    save(build_model(SIZES[size], tokenizer, MEAN), tokenizer, folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": response}],
        }
        for question, response in zip(questions, responses, strict=True)
    ]
    return write_case(
        folder, Case("sft", size, "rows", 32, 1, 0, 0, steps, turns, threads, 32, 1e-5), rows
    )


def write_pairs_case(
    folder: Path, task: str, size: str, steps: int, turns: int, threads: int
) -> Case:
    """A DPO or reward-model case: problems of the default task, 32 pairs a step.

    The chosen response is worked out; the rejected one has a slip, or is the answer alone.
    """
    rows = write_pairs(folder, size, 32 * steps * (turns + 1))
    case = Case(task, size, "pairs", 32, 1, 0, 0, steps, turns, threads, 32, 1e-6)
    return write_case(folder, case, rows)


def write_loss_case(folder: Path, task: str, threads: int) -> Case:
    """32 pairs that are the batch of every step, at a learning rate that changes the losses."""
    rows = write_pairs(folder, "1M", 32)
    case = Case(task, "1M", "losses", 32, 1, 0, 0, 1, LOSS_STEPS, threads, 32, 1e-3)
    return write_case(folder, case, rows)


def write_pairs(folder: Path, size: str, count: int) -> list[dict[str, Any]]:
    """Write a model with its tokenizer; return the pairs."""
    problems = deal_problems({"pairs": count}, 2, 0)["pairs"]
    rng = random.Random(0)
    rows, texts = [], []
    for problem in problems:
        rejected = slip_answer(problem, rng) if rng.random() < 0.5 else bare_answer(problem)
        sides = (problem.question, worked_answer(problem), rejected)
        texts += sides
        roles = (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))
        rows.append(
            {
                name: [{"role": role, "content": text}]
                for (name, role), text in zip(roles, sides, strict=True)
            }
        )
    tokenizer = train_tokenizer(texts, 512)
    save(build_model(SIZES[size], tokenizer, MEAN), tokenizer, folder / "model")
    return rows


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def character_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token a character; a vocabulary beyond 79 is filled with words that no prompt has."""
    words = [PAD, END, USER, ASSISTANT, *CHARACTERS]
    words += [f"w{i}" for i in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(
    shape: Size, tokenizer: PreTrainedTokenizerFast, mean_length: int
) -> PreTrainedModel:
    """A model with random weights whose completions are `mean_length` tokens long in the mean."""
    torch.manual_seed(0)
    vocabulary = len(tokenizer)
    common = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.002,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**common))
        if shape.family == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**common))
    )
    set_mean_length(model, tokenizer.eos_token_id, mean_length)
    built: PreTrainedModel = model.eval()
    return built


@torch.no_grad()
def set_mean_length(model: Any, end: int, mean_length: int) -> None:
    """Give the token `end` the probability 1 / `mean_length` after every token."""
    embeddings = model.get_input_embeddings().weight
    embeddings[:, 0] = 1.0
    embeddings[end] = 0.0
    embeddings[end, 0] = 1.0 + math.log((len(embeddings) - 1) / (mean_length - 1))
    model.model.norm.weight[0] = embeddings.shape[1] ** -0.5
