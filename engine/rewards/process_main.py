"""What runs in a reward's process: it loads the function, and answers calls that come by a channel.

What lives here: the messages, and the seeds of the random generators. What does not: starting and
ending the process (`process`, `guard`), and the calls themselves (`threads`).
"""

from __future__ import annotations

import hashlib
import pickle
import random
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from engine.errors import ConfigError, EngineError
from engine.rewards.call import RewardRows
from engine.rewards.registry import declared_components, import_reward, resolve_reward
from engine.rewards.result import RewardFailure
from engine.rewards.threads import AT_ONCE, RewardThreads


@dataclass(frozen=True, slots=True)
class LoadReward:
    """The first request of a process: which function it calls."""

    name: str  # as `reward.name`
    options: Mapping[str, object]
    modules: tuple[str, ...]  # those that may register it, likely ones first
    memory_bytes: int = 0  # most address space of the process; 0: no limit


@dataclass(frozen=True, slots=True)
class RewardLoaded:
    """Answers `LoadReward`; a ConfigError in its place says why there is none."""

    name: str  # in messages
    components: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ScoreAll:
    """A call on all rows; Scores or a RewardFailure answer it."""

    rows: RewardRows
    timeout_s: float
    components: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ScoreEach:
    """A call on each row; RowStarted and RowEnded answer it, None at each tick, RowsDone last."""

    rows: Mapping[int, RewardRows]
    timeout_s: float
    tick_s: float


@dataclass(frozen=True, slots=True)
class RowsDone:
    """Nothing more comes for `ScoreEach`."""


def serve(channel: Connection) -> None:
    """Load the reward, then answer requests until the other end closes."""
    try:
        load: LoadReward = channel.recv()
        if load.memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (load.memory_bytes, load.memory_bytes))
        reward = _Reward(load)
    except EngineError as error:
        channel.send(ConfigError(str(error)))
        return
    except EOFError:
        return
    channel.send(RewardLoaded(reward.threads.name, reward.threads.components))
    while True:
        try:
            request = channel.recv()
        except EOFError:
            return
        if isinstance(request, ScoreAll):
            channel.send(reward.score_all(request))
        else:
            reward.score_each(request, channel)
        sys.stdout.flush()


class _Reward:
    """The function, and whether it has drawn from the random generators."""

    def __init__(self, load: LoadReward) -> None:
        if ":" not in load.name:
            import_reward(load.name, load.modules)
        function = resolve_reward(load.name, load.options)
        components = declared_components(load.name)
        self.threads = RewardThreads(function, components, before_call=_seed)
        self._draws = False

    def score_all(self, request: ScoreAll) -> object:
        _seed(request.rows)
        before = _generators()
        try:
            return self.threads.score_all(request.rows, request.timeout_s, request.components)
        except RewardFailure as failure:
            return failure
        finally:
            self._draws = self._draws or _generators() != before

    def score_each(self, request: ScoreEach, channel: Connection) -> None:
        """Side by side; but one after the other where the function draws from generators."""
        at_once = 1 if self._draws else AT_ONCE
        events = self.threads.events(
            request.rows, request.timeout_s, at_once=at_once, tick_s=request.tick_s
        )
        for event in events:
            channel.send(event)
        channel.send(RowsDone())


def _seed(rows: RewardRows) -> None:
    """Seed what is drawn from by the rows' texts, so that the same rows get the same draws."""
    text = "\0".join([*rows.prompts, *rows.completions])
    seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _generators() -> tuple[object, ...]:
    """The state of the generators, to be compared."""
    torch = sys.modules.get("torch")
    drawn = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), pickle.dumps(np.random.get_state()), drawn
