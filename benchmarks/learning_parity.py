"""What runs learn in float32 and in reduced dtypes: the default task, several seeds.

`python benchmarks/learning_parity.py --help`. Each seed has its own rows and weights, which all
dtypes share; the warm start and RL (GRPO) then run in one dtype from end to end, in this process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean

import torch
from training_case import quiet

from engine.config import DataConfig, ModelConfig, RLConfig, SFTConfig
from engine.data.loader import PromptLoader
from engine.data.sources import Splits, load_splits
from engine.data.templates import encode_prompts, encode_response
from engine.data.tokenizer import train_tokenizer
from engine.models import build_model, save_model
from engine.trainers.rl import RLTrainer
from engine.trainers.sft import SFTExample, SFTTrainer

GAP = ("rollout_corr/k3_kl", "rollout_corr/log_prob_diff_mean", "rollout_corr/log_prob_diff_max")


def main() -> None:
    args = parse_args()
    quiet()
    print(f"{'seed':<5}{'dtype':<10}{'SFT loss':>9}{'warm':>7}{'after':>7}{'gap k3':>10}"
          f"{'mean':>9}{'max':>8}", flush=True)  # fmt: skip
    for seed in range(args.seeds):
        data = DataConfig(
            difficulty=args.difficulty, sft_size=args.sft_steps * 32, train_size=2048,
            validation_size=args.validation, test_size=16,
        )  # fmt: skip
        splits = load_splits(data, seed)
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                loss = warm_start(args, Path(folder), splits, dtype, seed)
                before, after, gap = reinforce(args, Path(folder), splits, dtype, seed)
            print(f"{seed:<5}{dtype:<10}{loss:>9.4f}{before:>7.3f}{after:>7.3f}"
                  f"{gap[0]:>10.1e}{gap[1]:>9.1e}{gap[2]:>8.1e}", flush=True)  # fmt: skip


def warm_start(
    args: argparse.Namespace, folder: Path, splits: Splits, dtype: str, seed: int
) -> float:
    """Fine-tune a new model into `folder`; return the validation loss."""
    rows = splits.sft_train
    prompts = [message["content"] for prompt in rows["prompt"] for message in prompt]
    tokenizer = train_tokenizer([*prompts, *rows["response"]], 512)
    shape = ModelConfig.model_validate(
        {
            "hidden_size": args.hidden,
            "intermediate_size": 3 * args.hidden,
            "num_attention_heads": args.hidden // 32,
            "num_key_value_heads": 1,
            "dtype": dtype,
        }
    )
    model = build_model(shape, tokenizer, seed)
    config = SFTConfig(max_steps=args.sft_steps, threads=args.threads, validate_every=1 << 20)

    def examples(name: str) -> list[SFTExample]:
        frame = getattr(splits, name)
        ids = encode_prompts(tokenizer, frame["prompt"], name)
        answers = [encode_response(tokenizer, text) for text in frame["response"]]
        return [SFTExample(*pair) for pair in zip(ids, answers, strict=True)]

    trainer = SFTTrainer(model, tokenizer.pad_token_id, config, seed=seed)
    final = trainer.fit(examples("sft_train"), examples("sft_validation"))
    save_model(model, tokenizer, folder)
    return final["sft/validation_loss"]


def reinforce(
    args: argparse.Namespace, folder: Path, splits: Splits, dtype: str, seed: int
) -> tuple[float, float, list[float]]:
    """Greedy reward on held-out prompts before and after RL; the mean of each metric of GAP."""
    trainer_config = {
        "total_training_steps": args.steps,
        "train_batch_size": args.prompts,
        "test_freq": 1 << 20,
        "placement": "local",
        "threads": args.threads,
    }
    config = RLConfig.model_validate({"trainer": trainer_config, "actor": {"use_kl_loss": False}})
    rows = [{str(k): v for k, v in row.items()} for row in splits.validation.to_dict("records")]
    with RLTrainer(
        folder,
        config,
        PromptLoader(splits.train, args.prompts, seed),
        max_response_length=64,
        max_model_len=256,
        seed=seed,
        dtype=dtype,
    ) as trainer:
        before = trainer.validate(rows)["validation/reward"]
        trainer.fit()
        after = trainer.validate(rows)["validation/reward"]
        steps = trainer.history
    return before, after, [mean(step[name] for step in steps if name in step) for name in GAP]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learning in float32 and in reduced dtypes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--seeds", type=int, default=3)
    add("--hidden", type=int, default=128, help="width of the model")
    add("--difficulty", type=int, default=1, help="of the arithmetic problems")
    add("--sft-steps", type=int, default=500, help="of 32 rows")
    add("--steps", type=int, default=40, help="of RL")
    add("--prompts", type=int, default=32, help="a step, with 8 completions each")
    add("--validation", type=int, default=256, help="held-out prompts")
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


if __name__ == "__main__":
    main()
