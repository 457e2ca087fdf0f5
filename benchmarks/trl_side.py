"""TRL's side of `vs_trl.py`; runs in TRL's environment and imports nothing of ours but `turns`.

    python trl_side.py CASE float32|bfloat16 [key=value …]

`bfloat16` is TRL's mixed precision (`bf16=True`): float32 weights, autocast. Further arguments are
fields of GRPOConfig, SFTConfig, DPOConfig or RewardConfig. What TRL offers and costs speed on a CPU
is off: gradient checkpointing, logging, saving; DPO's reference is computed before the first step.
Each task imports what it needs itself: memory is measured.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging
from turns import Turn

if TYPE_CHECKING:
    from trl import GRPOTrainer, SFTTrainer

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "dataloader_pin_memory": False,
}


def main() -> None:
    folder, dtype, *extra = Path(sys.argv[1]), *sys.argv[2:]
    case = json.loads((folder / "case.json").read_text())
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(case["threads"])
    if case["task"] == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "model", dtype=torch.float32, num_labels=1
        )
        torch.nn.init.zeros_(model.score.weight)  # as ours begins
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    settings = COMMON | {
        "output_dir": str(folder / "trl"),
        "bf16": dtype == "bfloat16",
        "learning_rate": case["lr"],
        "max_steps": case["turns"] * case["steps"],
        "seed": case["seed"],
    }
    options = dict(item.split("=", 1) for item in extra)
    makers = {"sft": sft_trainer, "dpo": pair_trainer, "reward": pair_trainer}
    make = makers.get(case["task"], grpo_trainer)
    trainer, measured = make(model, tokenizer, Dataset.from_list(rows), case, settings, options)

    def save() -> None:
        if case["task"] == "accuracy":
            trainer.save_model(str(folder / "trl"))

    trainer.add_callback(TakeTurns(Turn(), case["steps"], measured, save))
    trainer.train()


class TakeTurns(TrainerCallback):
    """Waits before the first step of each turn, and reports after its last one."""

    def __init__(
        self, turn: Turn, steps: int, measured: dict[str, Any], save: Callable[[], None]
    ) -> None:
        self.turn, self.steps, self.measured, self.save = turn, steps, measured, save

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.turn.wait()
            self.measured.update(dict.fromkeys(self.measured, 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.turn.done(self.measured, self.save)


def even(completions: list[Any], **columns: Any) -> list[float]:
    """1 for completions with an even number of characters: every group has signal."""
    return [float(len(message[0]["content"]) % 2 == 0) for message in completions]


def answer_match(completions: list[Any], ground_truth: list[str], **columns: Any) -> list[float]:
    """1 where the number after the last `####` is the ground truth: the default task's rule."""
    found = [
        re.match(r"[ \t]*([-+]?\d+)(?!\S)", message[0]["content"].rpartition("####")[2])
        for message in completions
    ]
    pairs = zip(found, ground_truth, strict=True)
    return [float(match is not None and match.group(1) == truth) for match, truth in pairs]


def grpo_trainer(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    case: dict[str, Any],
    settings: dict[str, Any],
    options: dict[str, str],
) -> tuple[GRPOTrainer, dict[str, Any]]:
    """The trainer, and the measures that it fills: seconds by phase, completion tokens."""
    from trl import GRPOConfig, GRPOTrainer

    measured = {"rollout_s": 0.0, "before_update_s": 0.0, "tokens": 0, "completions": 0}
    batch = case["prompts"] * case["n"]
    micro = int(options.pop("per_device_train_batch_size", case["micro_batch"]))
    continuous = options.pop("use_transformers_continuous_batching", "") == "true"

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            completions, log_probs = super()._generate_single_turn(*args, **kwargs)
            measured["rollout_s"] += time.perf_counter() - begin
            measured["tokens"] += sum(map(len, completions))
            measured["completions"] += len(completions)
            return completions, log_probs

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            scored = super()._generate_and_score_completions(*args, **kwargs)
            measured["before_update_s"] += time.perf_counter() - begin
            return scored

    config = GRPOConfig(
        **settings,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=case["n"],
        max_completion_length=case["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        shuffle_dataset=False,
        use_transformers_continuous_batching=continuous,
        **options,
    )
    trainer = Timed(
        model,
        reward_funcs=answer_match if case["task"] == "accuracy" else even,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    return trainer, measured


def sft_trainer(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    case: dict[str, Any],
    settings: dict[str, Any],
    options: dict[str, str],
) -> tuple[SFTTrainer, dict[str, Any]]:
    """The trainer, and the measures that it fills: tokens of its batches without padding."""
    from trl import SFTConfig, SFTTrainer

    measured: dict[str, Any] = {"tokens": 0}

    class Counted(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            measured["tokens"] += int((inputs["labels"] != -100).sum())
            return super().training_step(model, inputs, *args, **kwargs)

    config = SFTConfig(
        **settings,
        per_device_train_batch_size=case["prompts"],
        completion_only_loss=True,
        max_length=None,
        **options,
    )
    trainer = Counted(model, args=config, train_dataset=rows, processing_class=tokenizer)
    return trainer, measured


def pair_trainer(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    case: dict[str, Any],
    settings: dict[str, Any],
    options: dict[str, str],
) -> tuple[Any, dict[str, Any]]:
    """The trainer of DPO or of a reward model, and its measures: tokens, the last step's loss."""
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    measured: dict[str, Any] = {"tokens": 0, "loss": 0.0}
    base: Any = DPOTrainer if case["task"] == "dpo" else RewardTrainer

    class Counted(base):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            measured["tokens"] += int(inputs["attention_mask"].sum())
            loss = super().training_step(model, inputs, *args, **kwargs)
            measured["loss"] = float(loss)
            return loss

    common = settings | {"per_device_train_batch_size": case["prompts"], "max_length": None}
    config: Any = (
        DPOConfig(**common, precompute_ref_log_probs=True, **options)
        if case["task"] == "dpo"
        else RewardConfig(**common, **options)
    )
    trainer = Counted(model, args=config, train_dataset=rows, processing_class=tokenizer)
    return trainer, measured


if __name__ == "__main__":
    main()
