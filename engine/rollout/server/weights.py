"""Weight updates of a server: one hook a kind of server, called on one rank of the trainer.

A hook delivers a policy and returns once the server says that it serves it. `folder` calls any
server at a configured URL; `vllm_weights.py` uses vLLM's own endpoints.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from engine.config.server import ServerConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.server.client import Client
from engine.rollout.server.weight_folders import WeightFolders, Weights, find_tag
from engine.rollout.trainer_weights import merged_weights

_ASK_AGAIN_S = 0.2  # while a server is loading


class WeightHook(Protocol):
    """Brings weights to a server. `tag` names the latest that it delivered, None for none."""

    tag: str | None
    fixed: bool  # the server keeps the weights that it was started with

    def check(self) -> None:
        """Raise RolloutError if the server lacks what the hook needs."""
        ...

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        """Return when the server says that it serves `weights`; RolloutError otherwise.

        They are (name, tensor) pairs; of `model` only the configuration is read.
        """
        ...

    async def served(self) -> str | None:
        """The tag of what the server says it serves; None if it says none."""
        ...

    def close(self) -> None: ...


HookFactory = Callable[[Client, ServerConfig], WeightHook]
_HOOKS: dict[str, HookFactory] = {}


def register_hook(name: str) -> Callable[[HookFactory], HookFactory]:
    """Class decorator: make a hook selectable as `rollout.server.weights=<name>`."""

    def add(factory: HookFactory) -> HookFactory:
        _HOOKS[name] = factory
        return factory

    return add


def check_hook(name: str) -> None:
    """Raise ConfigError unless `name` is a registered hook."""
    if name not in _HOOKS:
        raise ConfigError(
            f"rollout.server.weights={name!r} is unknown; choose one of {sorted(_HOOKS)}"
        )


def create_hook(client: Client, settings: ServerConfig) -> WeightHook:
    """Build the hook that the settings name, or raise ConfigError."""
    check_hook(settings.weights)
    return _HOOKS[settings.weights](client, settings)


@register_hook("none")
class FixedPolicy:
    """The server keeps its weights: rollouts of a fixed policy."""

    tag: str | None = None
    fixed: bool = True

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self._allowed = settings.allow_fixed_policy

    def check(self) -> None:
        return None

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        if not self._allowed:
            raise RolloutError(
                f"the rollout server's weights are fixed (rollout.server.weights=none) and the "
                f"policy is now at version {version}; choose a hook that brings it new weights, "
                f"or set rollout.server.allow_fixed_policy=true to sample from the old ones"
            )

    async def served(self) -> str | None:
        return None

    def close(self) -> None:
        return None


class FolderWeights(ABC):
    """A hook whose server loads a folder: written once, whatever the number of servers."""

    fixed: bool = False

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self.tag: str | None = None
        self._client = client
        self.folders = WeightFolders(settings.weights_dir)

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        """As in `WeightHook`."""
        path = self.folders.write(weights, model, version)
        self._client.run(lambda: self.load(path, version), f"loading {path.name}")

    async def load(self, path: Path, version: int) -> None:
        """Return when the server says that it serves the folder; RolloutError otherwise."""
        await self._load(path, version)
        self.tag = path.name

    @abstractmethod
    async def _load(self, path: Path, version: int) -> None: ...

    def close(self) -> None:
        self.folders.close()


@register_hook("folder")
class FolderHook(FolderWeights):
    """Writes a folder and has the server load it.

    `reload_url` is sent `{"version": 12, "tag": "policy-v12-1a2b3c4d", "path": "/…/<tag>"}`. The
    server has loaded it when what it answers to GET `version_url` holds the tag and no other: its
    model's name or path, say.
    """

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        super().__init__(client, settings)
        self._reload = client.address("reload_url", settings.reload_url)
        self._version = client.address("version_url", settings.version_url)

    def check(self) -> None:
        self._client.run(self.served, "asking for the version of its weights")

    async def served(self) -> str | None:
        return find_tag(await self._client.text("GET", self._version))

    async def _load(self, path: Path, version: int) -> None:
        body = {"version": version, "tag": path.name, "path": str(path)}
        await self._client.text("POST", self._reload, body)
        while await self.served() != path.name:  # until the deadline of the whole
            await asyncio.sleep(_ASK_AGAIN_S)


class Deliverer(Protocol):
    """Brings weights to one or more servers, and can tell other ranks how that went."""

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None: ...

    def outcome(self) -> list[tuple[str | None, str]]: ...

    def adopt(self, outcome: list[tuple[str | None, str]]) -> None: ...


class RankZeroDelivery:
    """Delivers on rank 0 of the default process group, or in this process if there is none.

    All ranks create it together and deliver together.
    """

    def __init__(self, deliverer: Deliverer, timeout_s: float) -> None:
        self._deliverer = deliverer
        self._closed = False
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # A group of its own: loading may outlast the deadline of the trainer's, and rank 0's
            # deadline passes first.
            wait = timedelta(seconds=2 * timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=wait)

    def deliver(self, model: nn.Module, version: int) -> None:
        """Return when `model`'s weights are served; RolloutError otherwise.

        A sharded model is gathered, parameter by parameter.
        """
        if self._closed:
            raise RolloutError("the engine was closed; create a new one")
        weights = merged_weights(model)
        if self._group is None:
            self._deliverer.deliver(weights, model, version)
            return
        said: list[Any] = [None, ""]  # how it went, or what went wrong
        if dist.get_rank() == 0:
            try:
                self._deliverer.deliver(weights, model, version)
                said[0] = self._deliverer.outcome()
            except Exception as error:  # of any kind: the other ranks wait for the outcome
                said[1] = f"{error}" or type(error).__name__
        for _ in weights:
            pass  # takes part in the remaining gathers
        dist.broadcast_object_list(said, src=0, group=self._group)
        if said[0] is None:
            raise RolloutError(said[1])
        self._deliverer.adopt(said[0])

    def close(self) -> None:
        """Destroy the group, if there is one; safe to call twice."""
        self._closed = True
        group, self._group = self._group, None
        if group is not None:
            with suppress(ValueError):  # it ended with the default group
                dist.destroy_process_group(group)
