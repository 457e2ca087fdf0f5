"""What turns cost: sampled tokens a second of two-turn episodes beside single completions.

`python benchmarks/episodes.py`; both sample equally many tokens for each of the same prompts, with
one native engine over a Qwen2-shaped model with random weights and no stop token. The environment
answers at once, in this process. Printed are the rates, their ratio, what the rate would be without
kept prefixes, and the share of time that is not the stream's: tokenising, environments, waiting.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rollout import SIZES, build_model
from transformers import PreTrainedTokenizerBase

from engine.agents.agent_loop import EpisodePlayer, LocalEnvironments
from engine.agents.environment_protocol import Action, Observation
from engine.agents.episode import Episode, EpisodeLimits, EpisodeTokenizer, plain_action
from engine.console import command_line
from engine.data.templates import encode_prompt
from engine.data.tokenizer import train_tokenizer
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import RolloutStream


class Answers:
    """Says something after each turn but the last."""

    def __init__(self, turns: int) -> None:
        self.turns, self.turn = turns, 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.turn = 0
        return Observation()

    async def step(self, action: Action) -> Observation:
        self.turn += 1
        answer = {"role": "tool", "content": "17 * 23 = 391"}
        return Observation((answer,), done=self.turn == self.turns)

    async def close(self) -> None:
        return


class Timed:
    """A stream that knows how long it took."""

    def __init__(self, stream: RolloutStream) -> None:
        self._stream, self.seconds = stream, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def step(self) -> Any:
        begun = time.perf_counter()
        done = self._stream.step()
        self.seconds += time.perf_counter() - begun
        return done


@command_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="sampled by each episode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer(["17 * 23 = 391 and what is it now"], 300)
    engine = NativeEngine(build_model(args.size, std=0.02), max_model_len=2048)
    row = {"prompt": [{"role": "user", "content": " what is it now" * (args.prompt_tokens // 4)}]}
    cases: dict[str, Callable[[], tuple[int, float, float]]] = {
        "completions": lambda: whole(engine, tokenizer, row, args),
        "1 turn": lambda: episodes(engine, tokenizer, row, args, 1, True),
        "2 turns": lambda: episodes(engine, tokenizer, row, args, 2, True),
        "2 turns, no kept prefixes": lambda: episodes(engine, tokenizer, row, args, 2, False),
    }
    best: dict[str, tuple[float, float]] = {}
    for _ in range(args.repeats):
        for name, run in cases.items():
            tokens, seconds, stream_s = run()
            best[name] = max(best.get(name, (0.0, 0.0)), (tokens / seconds, 1 - stream_s / seconds))
    base = best["completions"][0]
    print(f"{args.size}, {args.prompts} prompts × {args.n}, {args.tokens} tokens each")
    for name, (rate, other) in best.items():
        share = "" if name == "completions" else f", {other:.1%} of the time not the stream's"
        print(f"{name:26} {rate:8.0f} tokens/s  {rate / base:.2f}{share}")


def whole(
    engine: NativeEngine, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], args: Any
) -> tuple[int, float, float]:
    prompts = [encode_prompt(tokenizer, row["prompt"])] * args.prompts
    begun = time.perf_counter()
    done = engine.generate(prompts, SamplingParams(n=args.n, max_new_tokens=args.tokens))
    seconds = time.perf_counter() - begun
    return sum(len(one.token_ids) for one in done), seconds, seconds


def episodes(
    engine: NativeEngine,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    args: Any,
    turns: int,
    keep: bool,
) -> tuple[int, float, float]:
    limits = EpisodeLimits(1500, 2048, max_turn_length=args.tokens // turns)
    own = EpisodeTokenizer(tokenizer, (), plain_action)
    played = [
        Episode(prompt, 0, index, own, limits, [0])
        for prompt in range(args.prompts)
        for index in range(args.n)
    ]
    params = SamplingParams(max_new_tokens=args.tokens)
    stream = Timed(engine.stream(params, max_num_seqs=512, keep_prefixes=keep))
    environments = LocalEnvironments(lambda: Answers(turns))
    player = EpisodePlayer(stream, environments, concurrency=512)
    begun = time.perf_counter()
    player.play(played, [row])
    seconds = time.perf_counter() - begun
    environments.close()
    stream.close()
    assert all(one.end == "done" for one in played), {one.error for one in played}
    each = [sequence for one in played if one.transcript for sequence in one.transcript.sequences]
    tokens = sum(sum(sequence.sampled) for sequence in each)
    return tokens, seconds, stream.seconds


if __name__ == "__main__":
    sys.exit(main())
