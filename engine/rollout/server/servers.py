"""One or more rollout servers: which get requests, which are left out, and which have the weights.

A server that can't be reached, or that says it serves other weights than it was brought, is left
out: its requests go to the others. It is back when it says that it serves the present
weights, or takes the next ones. Of a single server every failure is the caller's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from engine.config.rollout_engines import ServerConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.server.api import CompletionRequest, OpenAIAPI, SampledCompletion
from engine.rollout.server.client import Client, Unreachable
from engine.rollout.server.weights import FolderWeights, WeightHook, Weights, create_hook
from engine.rollout.trainer_model import merged_weights

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LOADING = 0.8  # of the deadline of an update, that one of several servers may take


@dataclass(slots=True, eq=False)
class Server:
    """One server."""

    client: Client
    api: OpenAIAPI
    hook: WeightHook
    busy: int = 0  # completions requested of it and not answered yet
    out: str = ""  # why it gets no requests; empty: it gets them
    wrong: bool = False  # left out for what it serves, whatever it says: until the next weights


class Servers:
    """The servers of one engine; all are spoken to from one event loop.

    Ranks of a process group create them together, and deliver weights together: rank 0 does.
    """

    def __init__(self, settings: ServerConfig) -> None:
        """Open connections' clients; `check` asks the servers. Raises ConfigError."""
        self._settings = settings
        self.all: list[Server] = []
        self.tag: str | None = None  # of the weights that were delivered last
        self._group: dist.ProcessGroup | None = None
        self._closed = False
        with ExitStack() as undo:
            undo.callback(self.close)
            for url in settings.addresses:
                self.all.append(self._open(url))
            first, several = self.all[0], len(self.all) > 1
            if several and not (self.fixed or isinstance(first.hook, FolderWeights)):
                raise ConfigError(
                    f"rollout.server.urls names {len(self.all)} servers, and "
                    f"weights={settings.weights} brings weights to one; derive it from "
                    "engine.rollout.server.weights.FolderWeights, or name one server"
                )
            if several:
                first.client.name = f"rollout servers {', '.join(settings.addresses)}"
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                # A group of its own: loading may outlast the deadline of the trainer's, and rank
                # 0's deadline passes first.
                wait = timedelta(seconds=2 * settings.timeout_s)
                self._group = dist.new_group(backend="gloo", timeout=wait)
            undo.pop_all()

    def _open(self, url: str) -> Server:
        client = Client(self._settings, url, self.all[0].client if self.all else None)
        with ExitStack() as undo:
            undo.callback(client.close)
            hook = create_hook(client, self._settings)
            server = Server(client, OpenAIAPI(client, self._settings), hook)
            undo.pop_all()
        return server

    @property
    def fixed(self) -> bool:
        """Whether the servers keep the weights that they were started with."""
        return self.all[0].hook.fixed

    @property
    def serving(self) -> list[Server]:
        """The servers in use; raises RolloutError where none is left."""
        serving = [server for server in self.all if not server.out]
        if not serving:
            causes = "; ".join(f"{server.client.url}: {server.out}" for server in self.all)
            raise RolloutError(f"none of {len(self.all)} rollout servers can be used: {causes}")
        return serving

    @property
    def on_ranks(self) -> bool:
        """Whether other ranks use these servers too."""
        return self._group is not None

    def run(self, work: Callable[[], Awaitable[T]], doing: str) -> T:
        """Run `work` on the loop of the servers, within `timeout_s`."""
        return self.all[0].client.run(work, doing)

    def check(self, max_model_len: int) -> None:
        """Ask each for model, context (ConfigError) and what its hook needs; or leave it out."""
        for server in self.all:
            client = server.client
            if len(self.all) > 1 and not client.run(client.is_up, "a first answer"):
                self._leave_out(server, "it gives no answer; see that it is up")
                continue
            longest = client.run(server.api.describe, "asking for its model")
            if longest is not None and longest < max_model_len:
                raise ConfigError(
                    f"the rollout server's context is {longest} tokens and this run's "
                    f"{max_model_len}; start it with --max-model-len {max_model_len}, or "
                    f"lower data.max_prompt_length or data.max_response_length"
                )
            server.hook.check()
        _ = self.serving  # one at least

    async def sample(
        self, request: CompletionRequest, *, verify: bool = False
    ) -> tuple[Server, list[SampledCompletion]]:
        """Sample by the least busy server that, with `verify`, serves the weights afterwards."""
        while True:
            server = min(self.serving, key=lambda server: server.busy)
            server.busy += request.count
            try:
                drawn = await server.api.sample(request)
                problem = await self._problem(server, "ends") if verify else None
            except Unreachable as error:
                problem = error
            finally:
                server.busy -= request.count
            if problem is None:
                return server, drawn
            self.lose(server, problem)

    def lose(self, server: Server, problem: RolloutError) -> None:
        """Leave a server out; raise `problem` for an only one, RolloutError for the last one."""
        if len(self.all) == 1:
            raise problem
        self._leave_out(server, str(problem))
        _ = self.serving

    async def check_served(self, moment: str) -> None:
        """Leave out who doesn't say it serves what was delivered; at the beginning, take back."""

        async def check(server: Server) -> RolloutError | None:
            away = bool(server.out)
            if away and (moment == "ends" or server.wrong or not await server.client.is_up()):
                return None
            try:
                problem = await self._problem(server, moment)
            except RolloutError as error:
                problem = error
            if away and problem is None:
                _log.warning("the rollout server %s is back", server.client.url)
                server.out = ""
            return None if away else problem

        problems = await asyncio.gather(*map(check, self.all))
        for server, problem in zip(self.all, problems, strict=True):
            if problem is not None:
                self.lose(server, problem)
        _ = self.serving

    async def _problem(self, server: Server, moment: str) -> RolloutError | None:
        """Return what is wrong with the weights that a server says it serves."""
        if self.fixed:
            return None
        tag = await server.hook.served()
        if tag == self.tag:
            return None
        return RolloutError(
            f"the rollout server {server.client.url} says that it serves {tag or 'no tag'} "
            f"when a rollout of {self.tag} {moment}: it was restarted, or somebody else "
            f"brought it weights; its completions are dropped. Call update_weights to bring "
            f"it the policy again"
        )

    def deliver(self, model: nn.Module, version: int) -> None:
        """Return when `model`'s weights are served; RolloutError otherwise.

        A sharded model is gathered, parameter by parameter. Of several servers, one that fails is
        left out.
        """
        if self._closed:
            raise RolloutError("the engine was closed; create a new one")
        weights = merged_weights(model)
        if self._group is None:
            self._bring(weights, model, version)
            return
        outcome: list[Any] = [None, ""]  # of each server: tag and problem; or what went wrong
        if dist.get_rank() == 0:
            try:
                self._bring(weights, model, version)
                outcome[0] = [(server.hook.tag, server.out) for server in self.all]
            except Exception as error:  # of any kind: the other ranks wait for the outcome
                outcome[1] = f"{error}" or type(error).__name__
        for _ in weights:
            pass  # takes part in the remaining gathers
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is None:
            raise RolloutError(outcome[1])
        for server, (tag, out) in zip(self.all, outcome[0], strict=True):
            server.hook.tag, server.out = tag, out
        self.tag = self.serving[0].hook.tag

    def _bring(self, weights: Weights, model: nn.Module, version: int) -> None:
        first = self.all[0].hook
        if len(self.all) == 1:
            first.deliver(weights, model, version)
            self.tag = first.tag
            return
        assert isinstance(first, FolderWeights)
        path = first.folders.write(weights, model, version)
        self.run(lambda: self._load(path, version), f"loading {path.name}")
        self.tag = path.name

    async def _load(self, path: Path, version: int) -> None:
        seconds = _LOADING * self._settings.timeout_s

        async def load(server: Server) -> None:
            assert isinstance(server.hook, FolderWeights)
            if server.out and not await server.client.is_up():
                return
            try:
                async with asyncio.timeout(seconds):
                    await server.hook.load(path, version)
            except TimeoutError:
                self._leave_out(server, f"it did not load {path.name} within {seconds:g} s")
            except RolloutError as error:
                self._leave_out(server, str(error))
            else:
                server.out, server.wrong = "", False

        await asyncio.gather(*map(load, self.all))
        _ = self.serving

    async def describe(self) -> None:
        """Ask for the models' names, which may have changed with the weights."""
        for server in self.serving:
            try:
                await server.api.describe()
            except Unreachable as error:
                self.lose(server, error)

    def close(self) -> None:
        """Drop the connections; the servers keep running. Safe to call twice."""
        self._closed = True
        for server in reversed(self.all):  # the first one's loop is that of all
            server.hook.close()
            server.client.close()
        group, self._group = self._group, None
        if group is not None:
            with suppress(ValueError):  # it ended with the default group
                dist.destroy_process_group(group)

    def _leave_out(self, server: Server, why: str) -> None:
        if not server.out:
            _log.warning("the rollout server %s is left out: %s", server.client.url, why)
        server.out = why
