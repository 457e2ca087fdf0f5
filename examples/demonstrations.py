"""Splits that are made from a seed, and scripted players' episodes as rows of the warm start.

A source divides its prompts among the splits here, so that no held-out prompt is trained on. A
demonstration becomes one SFT row for each of the player's turns, with all that came before as its
prompt: what the policy reads there in RL.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from engine.config import DataConfig
from engine.data.chat_template import Message
from engine.data.sources import Splits
from engine.errors import ConfigError
from engine.storage.json_rows import Row

T = TypeVar("T")

HELD_OUT = {"test": 0.2, "validation": 0.1}  # shares of the prompts; the rest is trained on


def turn_rows(
    prompt: Sequence[Message], turns: Sequence[Message], extra_info: Mapping[str, object]
) -> Iterator[Row]:
    """An SFT row for each assistant message of `turns`, the messages after a prompt.

    >>> turns = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "higher"},
    ...          {"role": "assistant", "content": "7"}]
    >>> [row["response"] for row in turn_rows([{"role": "user", "content": "Guess."}], turns, {})]
    ['5', '7']
    """
    seen = [dict(message) for message in prompt]
    for turn in turns:
        if turn["role"] == "assistant":
            yield {
                "prompt": list(seen),
                "response": turn["content"],
                "extra_info": {**extra_info, "turn": sum(m["role"] == "assistant" for m in seen)},
            }
        seen.append(dict(turn))


def deal(values: Sequence[T], seed: int) -> dict[str, list[T]]:
    """Deal values to `test`, `validation` and `train`, none to two; the order is drawn by `seed`.

    Raises ConfigError where a split would get none.
    """
    drawn = list(values)
    random.Random(f"deal/{seed}").shuffle(drawn)
    dealt: dict[str, list[T]] = {}
    for name, share in HELD_OUT.items():
        count = round(share * len(values))
        dealt[name], drawn = drawn[:count], drawn[count:]
    dealt["train"] = drawn
    if not all(dealt.values()):
        raise ConfigError(
            f"data.options leave {len(values)} different prompts, too few for the splits; widen "
            "them"
        )
    return dealt


def make_splits(
    config: DataConfig,
    source: str,
    digest: str,
    rl_rows: Callable[[str, int], Sequence[Row]],
    demonstrations: Callable[[str], Iterator[Row]],
) -> Splits:
    """All five splits: `rl_rows(split, count)` of RL, and the first SFT rows of `demonstrations`.

    `demonstrations(split)`, of `train` or `validation`, goes on without an end.
    """
    counts = {
        "test": config.test_size,
        "validation": config.validation_size,
        "train": config.train_size,
    }
    sft = {"sft_train": config.sft_size, "sft_validation": config.validation_size}
    for name, count in (("train_size", config.train_size), ("sft_size", config.sft_size)):
        if not count:
            raise ConfigError(f"data.{name}=0 (all rows) needs data.source=files; give a number")
    frames: dict[str, Any] = {
        name: pd.DataFrame(rl_rows(name, count)) for name, count in counts.items()
    }
    for name, count in sft.items():
        rows = demonstrations(name.removeprefix("sft_"))
        frames[name] = pd.DataFrame([next(rows) for _ in range(count)])
    return Splits(**frames, source_digest=digest, source_uri=f"{source}://")


def made_digest(file: str, config: DataConfig, seed: int, options: Mapping[str, object]) -> str:
    """SHA-256 (hex) of what rows that are made depend on: the code of `file`, sizes and options."""
    sizes = (config.sft_size, config.train_size, config.validation_size, config.test_size)
    code = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (file, __file__)]
    text = json.dumps([code, sizes, seed, dict(options)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def truth_of(row: Mapping[str, object]) -> object:
    """A row's ground truth; raise ConfigError for a row without one."""
    model = row.get("reward_model")
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise ConfigError("the environment reads reward_model.ground_truth, which a row lacks")
    return model["ground_truth"]
