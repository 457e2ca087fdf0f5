"""What a step of training costs where an episode's turns are rows of their own (`branches`).

`python benchmarks/branches.py`: gradients of a mini-batch by the actor's worker. A row is a turn of
one of a group's episodes, behind the conversation so far without its thoughts. Printed are tokens
computed, seconds (the least of some passes, taken in turns) and the memory that a pass adds: row by
row, with the group's first prompt computed once, and as a tree of common beginnings.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from rollout import SIZES, build_model

from engine.batch import Batch
from engine.config import ActorConfig
from engine.console import command_line, say
from engine.data.collate import collate_completions
from engine.data.tokenizer import train_tokenizer
from engine.models import save_model
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

WAYS = ("row by row", "prompt once", "tree")
ROOMS = ("engine.models.packing",)


def episodes(args: argparse.Namespace, vocabulary: int) -> Batch:
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=draw).tolist()

    prompts, responses, question = [], [], tokens(args.prompt_tokens)
    for _ in range(args.n):
        told = list(question)
        for _ in range(args.turns):
            answer = tokens(args.answer_tokens)
            prompts.append(list(told))
            responses.append(tokens(args.thought_tokens) + answer)
            told += answer + tokens(args.observed_tokens)
    source = Batch({"group_ids": torch.arange(len(prompts))}, {"prompt_ids": prompts})
    log_probs = [[-9.0] * len(one) for one in responses]
    batch = collate_completions(source, range(len(prompts)), responses, log_probs, pad_token_id=0)
    noise = torch.randn(batch["response_mask"].shape, generator=draw) * batch["response_mask"]
    return batch | {"advantages": noise, "old_log_probs": batch["rollout_log_probs"]}


class Subject:
    """An actor that computes a mini-batch's gradients one way."""

    def __init__(self, way: str, folder: str, args: argparse.Namespace) -> None:
        self.way, self.batch = way, episodes(args, SIZES[args.size][5])
        parallel = {"packing": False if way == WAYS[0] else "auto"}
        tokens = {"max_tokens_per_micro_batch": args.micro_batch_tokens}
        self.worker = ActorWorker(
            WorkerContext("actor"),
            model_path=folder,
            config=ActorConfig.model_validate({"parallel": parallel} | tokens),
            temperature=1.0,
            total_steps=1,
            seed=0,
        )
        self.tokens = 0
        embedding = self.worker.sharded.module.base_model.get_input_embeddings()  # type: ignore
        embedding.register_forward_hook(lambda module, given, out: self._count(given[0]))

    def _count(self, ids: torch.Tensor) -> None:
        self.tokens += ids.numel()

    def step(self) -> float:
        """Compute the gradients; return the seconds."""
        self.tokens, begun = 0, time.perf_counter()
        with contextlib.ExitStack() as stack:
            for room in ROOMS if self.way == WAYS[1] else ():
                stack.enter_context(mock.patch(f"{room}.worthwhile_tree", return_value=None))
            self.worker._accumulate(self.batch)
        return time.perf_counter() - begun


def memory(way: str, folder: str, args: argparse.Namespace) -> tuple[int, float]:
    """Tokens of a step, and MiB that it adds to a fresh process."""
    torch.set_num_threads(args.threads)
    subject = Subject(way, folder, args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    subject.step()
    return subject.tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@command_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--n", type=int, default=8, help="episodes of the prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--thought-tokens", type=int, default=48)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--observed-tokens", type=int, default=40)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model(args.size, std=0.02), train_tokenizer(["a b"], 300), Path(folder))
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            sizes = {}
            for way in WAYS:
                say(f"memory, {way}", error=True)
                sizes[way] = pool.apply(memory, (way, folder, args))
        subjects = {way: Subject(way, folder, args) for way in WAYS}
        seconds = {way: float("inf") for way in WAYS}
        for number in range(args.repeats):
            for way in WAYS:
                took = subjects[way].step()
                seconds[way] = min(seconds[way], took)
                say(f"pass {number + 1}/{args.repeats}, {way}: {took:.1f} s", error=True)
    for way in WAYS:
        tokens, mebibytes = sizes[way]
        print(f"{way:12} {tokens:7} tokens  {seconds[way]:7.3f} s  {mebibytes:7.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
