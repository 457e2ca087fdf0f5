"""How a server gets new weights, and what it says about those it has: one hook a kind of server.

A hook delivers a policy and returns once the server says that it serves it. `folder` asks any
server by a URL of its choice; vLLM's own endpoints are spoken to in `vllm_hook.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import nn

from engine.config.server import ServerConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.server.client import Client
from engine.rollout.server.folder import TaggedFolders, Weights, find_tag

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


@register_hook("folder")
class FolderHook:
    """Writes a folder and tells the server to load it.

    `reload_url` is sent `{"version": 12, "tag": "policy-v12-1a2b3c4d", "path": "/…/<tag>"}`. The
    server has loaded it when what it answers to GET `version_url` holds the tag and no other: its
    model's name or path, say.
    """

    fixed: bool = False

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self.tag: str | None = None
        self._client = client
        self._reload = client.address("reload_url", settings.reload_url)
        self._version = client.address("version_url", settings.version_url)
        self._folders = TaggedFolders(settings.weights_dir)

    def check(self) -> None:
        self._client.run(self.served, "asking for the version of its weights")

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        path = self._folders.write(weights, model, version)
        self._client.run(lambda: self._load(path, version), f"loading {path.name}")
        self.tag = path.name

    async def served(self) -> str | None:
        return find_tag(await self._client.text("GET", self._version))

    async def _load(self, path: Path, version: int) -> None:
        body = {"version": version, "tag": path.name, "path": str(path)}
        await self._client.text("POST", self._reload, body)
        while await self.served() != path.name:  # until the deadline of the whole
            await asyncio.sleep(_ASK_AGAIN_S)

    def close(self) -> None:
        self._folders.close()
