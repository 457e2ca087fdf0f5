"""What environments cost: the loop that asks them, as a share of a step, and a thousand at once.

    python benchmarks/environments.py           # of a GRPO step on episodes of two turns
    python benchmarks/environments.py --agents  # the same turns, asked for through OpenAI's API
    python benchmarks/environments.py --many 1000

A step is the trainer's whole one: rollout, reward, update. The environment loop is what of its
rollout is not the engine's: environments, tokenising, and waiting for answers with nothing to
decode, which is also told alone. All episodes of a step end their turns together here, so that
nothing hides their environments. With `--agents` it tells the endpoint's processor time, too, which
a busy machine disturbs less. `--many` opens so many environments at once and asks all of them
again and again: until all have begun, memory that they add, and answers a second. Environments
answer at once, in this process (0) and in processes of their own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pandas as pd
import psutil
import torch
from episodes import Answers, Timed
from rollout import SIZES, build_model

from engine.agents.agent_loop import EpisodePlayer
from engine.agents.environment_protocol import Action, Observation
from engine.config import AgentConfig, RLConfig
from engine.console import command_line, quiet
from engine.data.loader import PromptLoader
from engine.data.tokenizer import train_tokenizer
from engine.models import save_model
from engine.rollout.stream import open_stream
from engine.trainers.rl import RLTrainer
from engine.workers.agent_rollout import open_environments

MIB = 1 << 20


class Marked(Answers):
    """Two turns, with rewards that differ."""

    def __init__(self) -> None:
        super().__init__(turns=2)

    async def step(self, action: Action) -> Observation:
        seen = await super().step(action)
        return Observation(seen.messages, float(len(action.text) % 2), seen.done)


async def marked(row: Mapping[str, Any], client: Any) -> float:
    """What `Marked` plays, as an agent."""
    messages: list[Any] = list(row["prompt"])
    told = (await Answers(turns=2).step(Action(""))).messages
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message
        messages += [said, *told]
    return float(len(said.content or "") % 2)


class Clock:
    """Seconds of a step that are the player's, of them the stream's, and those spent waiting."""

    def __init__(self) -> None:
        self.player = self.waiting = 0.0
        self.streams: list[Timed] = []
        self.begun = time.perf_counter()
        self._cpu = self._cpu_now()

    @staticmethod
    def _cpu_now() -> dict[str, float]:
        """Processor seconds so far, of this process and of its threads for agents."""
        seconds = {"process": time.process_time()}
        for thread in threading.enumerate():
            if thread.name in ("http", "episodes"):
                told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
                seconds[thread.name] = int(told.split()[0]) / 1e9
        return seconds

    def cpu(self) -> dict[str, float]:
        """Processor seconds since the clock began: `process`, the threads `http` and `episodes`."""
        return {name: now - self._cpu.get(name, 0.0) for name, now in self._cpu_now().items()}

    @property
    def loop(self) -> float:
        """Seconds of the environment loop."""
        return self.player - sum(one.seconds for one in self.streams)

    def step(self, player: EpisodePlayer, *given: Any) -> Any:
        """`EpisodePlayer.step`, timed."""
        begun = time.perf_counter()
        ended = STEP(player, *given)
        self.player += time.perf_counter() - begun
        return ended

    def stream(self, *given: Any, **options: Any) -> Timed:
        """`open_stream`, timed."""
        self.streams.append(Timed(open_stream(*given, **options)))
        return self.streams[-1]


STEP = EpisodePlayer.step


class Waits:
    """A queue that knows how long it was waited for."""

    def __init__(self, clock: Clock) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._clock, self.put = clock, self._queue.put

    def get(self, block: bool, timeout: float | None) -> Any:
        begun = time.perf_counter()
        try:
            return self._queue.get(block, timeout)
        finally:
            self._clock.waiting += (time.perf_counter() - begun) * block


def share_of_step(folder: Path, processes: int, args: argparse.Namespace) -> str:
    """The environment loop beside whole steps, the first left out."""
    turn = args.tokens // 2
    player, marked_one = ("play", "marked") if args.agents else ("environment", "Marked")
    config = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"use_kl_loss": False},
        "rollout": {
            "n": args.n,
            "max_num_seqs": args.prompts * args.n,
            "multi_turn": {"enable": True, "max_turn_length": turn},
            "agent": {player: f"environments:{marked_one}", "num_workers": processes},
        },
        "reward": {"name": "environment"},
        "trainer": {
            "placement": "local",
            "total_training_steps": args.repeats + 1,
            "train_batch_size": args.prompts,
            "threads": args.threads,
        },
    }
    words = " what is it now" * (args.prompt_tokens // 4)
    row = {"data_source": "words", "prompt": [{"role": "user", "content": words}]}
    rows = pd.DataFrame([row] * args.prompts)
    loader = PromptLoader(rows, args.prompts, seed=0)
    response, clock = args.tokens + 100, Clock()
    clocks: list[tuple[Clock, float, dict[str, float]]] = []

    def ended(step: int, total: int, metrics: Mapping[str, float]) -> None:
        nonlocal clock
        clocks.append((clock, time.perf_counter() - clock.begun, clock.cpu()))
        clock = Clock()

    def new_queue() -> Waits:
        return Waits(clock)

    with (
        mock.patch.object(EpisodePlayer, "step", lambda *given: clock.step(*given)),
        mock.patch("engine.agents.agent_loop.SimpleQueue", new=new_queue),
        mock.patch(
            "engine.workers.agent_rollout.open_stream", lambda *a, **b: clock.stream(*a, **b)
        ),
        RLTrainer(
            folder,
            RLConfig.model_validate(config),
            loader,
            max_response_length=response,
            max_model_len=args.prompt_tokens + 200 + response,
        ) as trainer,
    ):
        trainer.on_step = ended
        trainer.fit()
    seconds = sum(whole for _, whole, _ in clocks[1:])
    loop, waiting = (
        sum(getattr(one, name) for one, _, _ in clocks[1:]) for name in ("loop", "waiting")
    )
    who = "agents" if args.agents else "environments"
    cpu = Counter[str]()
    for _, _, spent in clocks[1:]:
        cpu.update(spent)
    # Agents in this process are no part of the endpoint: they would run anywhere.
    whole = cpu["process"] - cpu["episodes"]
    requests = 2 * args.prompts * args.n * args.repeats
    endpoint = (
        f"; endpoint: {cpu['http'] / whole:.2%} of {whole / args.repeats:.2f} s of processor time "
        f"a step, {cpu['http'] / requests * 1e3:.2f} ms a request"
    )
    return (
        f"{who} in {processes} processes: a step takes {seconds / args.repeats:6.2f} s, of "
        f"it the environment loop {loop / seconds:5.1%} (waiting alone: {waiting / seconds:.1%})"
        + endpoint
        * args.agents
    )


def many(count: int, processes: int, rounds: int) -> str:
    """`count` environments of the game guessing, which is asked with a wrong guess."""
    options = {"max_turns": rounds + 1}
    agent = AgentConfig.model_validate(
        {
            "environment": {"name": "examples.guessing:GuessingEnvironment", "options": options},
            "num_workers": processes,
        }
    )
    row = {"extra_info": {"low": 1, "high": 99}, "reward_model": {"ground_truth": "7"}}
    before, begun = memory(), time.perf_counter()
    environments = open_environments(agent, ())
    started = time.perf_counter() - begun
    empty = memory()
    seats = [environments.open() for _ in range(count)]
    answered([seat.reset(row) for seat in seats])
    opened = time.perf_counter() - begun - started
    added, begun = memory() - empty, time.perf_counter()
    for _ in range(rounds):
        answered([seat.step(Action("50")) for seat in seats])
    rate = rounds * count / (time.perf_counter() - begun)
    for seat in seats:
        seat.close()
    environments.close()
    return (
        f"{count} environments in {processes} processes: {started:5.2f} s and "
        f"{(empty - before) / MIB:.0f} MiB for the processes, {opened:5.2f} s and "
        f"{added / MIB:.1f} MiB for the environments, {rate:6.0f} answers/s"
    )


def answered(calls: list[Future[Observation]]) -> None:
    """Wait for all; none has failed."""
    wait(calls)
    for call in calls:
        call.result()


def memory() -> int:
    """Bytes of this process and those that it started, what they share counted once."""
    own = psutil.Process()
    return sum(one.memory_full_info().pss for one in (own, *own.children(recursive=True)))


@command_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--many", type=int, default=0, help="environments to open at once")
    parser.add_argument("--agents", action="store_true", help="agents in place of environments")
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="sampled by each episode")
    parser.add_argument("--repeats", type=int, default=3, help="steps, or rounds of --many")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(args.threads)
    if args.many:
        for processes in args.processes:
            print(many(args.many, processes, args.repeats))
        return
    print(
        f"{args.size}, {args.prompts} × {args.n} episodes of two turns, {args.tokens} tokens each"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train_tokenizer(["17 * 23 = 391 and what is it now"], 300)
        save_model(build_model(args.size, std=0.02), tokenizer, folder)
        for processes in args.processes:
            print(share_of_step(folder, processes, args))


if __name__ == "__main__":
    sys.exit(main())
