"""A game for a two-layer model: guess a number from 1 to 7 with the help of "more" and "less"."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.agents.environment_protocol import Action, Observation
from engine.config import ModelConfig
from engine.data.rows import rl_row
from engine.data.templates import encode_continuation, encode_prompt, encode_response
from engine.data.tokenizer import train_tokenizer
from engine.models import build_model, save_model

NUMBERS = range(1, 8)
ASK = {"role": "user", "content": "guess"}
SHAPE = ModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    dtype="float32",
)


class Guessing:
    """Reward 1 where the number is found, within `turns`."""

    def __init__(self, *, turns: int = 3) -> None:
        self.turns, self.turn, self.number = turns, 0, 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.turn, self.number = 0, int(row["reward_model"]["ground_truth"])
        return Observation()

    async def step(self, action: Action) -> Observation:
        self.turn += 1
        text = action.text.strip()
        found = text == str(self.number)
        done = found or self.turn == self.turns
        info = {"solved": found, "guesses": self.turn}
        return Observation((answer(text, self.number),), float(found), done, info)

    async def close(self) -> None:
        return


def answer(text: str, number: int) -> dict[str, str]:
    said = "what"
    if text.isdigit():
        said = "more" if int(text) < number else "less"
    return {"role": "user", "content": said}


def rows(count: int) -> list[dict[str, Any]]:
    return [rl_row("guess", "guess", str(NUMBERS[i % 7]), {}) for i in range(count)]


def write_start(folder: Path, steps: int = 250) -> Path:
    """A model that has learned to guess at random among the numbers that are left."""
    texts = [f"guess more less what {n}" for n in range(10)]
    tokenizer = train_tokenizer(texts, 270)
    torch.manual_seed(0)
    model = build_model(SHAPE, tokenizer, seed=0)
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        _learn(model, optimizer, [_game(tokenizer, draw) for _ in range(32)])
    return save_model(model.eval(), tokenizer, folder)


def _game(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> tuple[list[int], list[int]]:
    """The ids of a game, and its labels: -100 on what the player doesn't say."""
    end = tokenizer.eos_token_id
    number, low, high = draw.choice(NUMBERS), 1, 7
    ids = encode_prompt(tokenizer, [ASK])
    labels = [-100] * len(ids)
    for _ in range(4):
        guess = draw.randint(low, high)
        said = encode_response(tokenizer, str(guess))
        ids, labels = ids + said, labels + said
        if guess == number:
            break
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        more = encode_continuation(tokenizer, [answer(str(guess), number)], end, (end,))
        ids, labels = ids + more, labels + [-100] * len(more)
    return ids, labels


def _learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    games: list[tuple[list[int], list[int]]],
) -> None:
    width = max(len(ids) for ids, _ in games)
    ids = torch.tensor([one + [0] * (width - len(one)) for one, _ in games])
    labels = torch.tensor([one + [-100] * (width - len(one)) for _, one in games])
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
