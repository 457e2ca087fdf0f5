"""Delivery of new weights to rollout servers: hooks, and the folders they write.

One hook a kind of server, called on one rank of the trainer, delivers a policy and returns once the
server says that it serves it. The policy is a folder on a disk that trainer and server share, named
by its content: `policy-v12-1a2b3c4d` holds policy version 12 and weights whose checksum is
1a2b3c4d, so that two runs never share a tag.
"""

import asyncio
import re
import shutil
import tempfile
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.config.rollout_engines import ServerConfig
from engine.errors import RolloutError
from engine.registry import Registry
from engine.rollout.server.client import Client
from engine.storage.weight_files import write_weights

_TAG = re.compile(r"policy-v\d+-[0-9a-f]{8}")
_UNFINISHED = re.compile(r"\.writing-[0-9a-z_]{8}")  # what `tempfile` makes
_READ_BYTES = 16 << 20
_KEPT = 2  # folders: a server may still be reading the one before
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")
Weights = Iterable[tuple[str, Tensor]]


class WeightFolders:
    """Writes each version to a folder of its own below `root`, and removes the older ones.

    A `root` belongs to one run at a time: folders of these names that an earlier one left there
    count as older versions, and unfinished ones are removed. Without a `root` a temporary one is
    created on this machine, and removed in the end.
    """

    def __init__(self, root: str) -> None:
        try:
            if root:
                Path(root).mkdir(parents=True, exist_ok=True)
            self.root = Path(root or tempfile.mkdtemp(prefix="hybridflyte-weights-")).resolve()
            if not root:
                self.root.chmod(0o755)  # the server may run as another user
        except OSError as error:
            raise RolloutError(
                f"rollout.server.weights_dir={root!r} can't be used: {error}; name a folder that "
                f"trainer and server both can write and read"
            ) from error
        self._written: list[Path] | None = None  # oldest first; None before the first write
        self._remove: Callable[[], object] | None = None
        if not root:  # at the latest when this process ends
            self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def write(self, weights: Weights, model: nn.Module, version: int) -> Path:
        """Write (name, tensor) pairs and `model`'s configuration; return the folder, `…/tag`.

        It gets its name only when it is complete. Raises RolloutError when the disk is full.
        """
        try:
            if self._written is None:  # on the one rank that writes
                self._written = _left_by_an_earlier_run(self.root)
            with tempfile.TemporaryDirectory(
                prefix=".writing-", dir=self.root, ignore_cleanup_errors=True
            ) as name:
                unfinished = Path(name)
                unfinished.chmod(0o755)
                write_weights(weights, unfinished)
                _save_configuration(model, unfinished)
                for path in unfinished.iterdir():
                    path.chmod(0o644)
                total = checksum(unfinished)
                target = self.root / f"policy-v{version}-{total}"
                if target.exists() and checksum(target) != total:  # torn by a crash
                    shutil.rmtree(target)
                if not target.exists():
                    unfinished.rename(target)
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                f"policy version {version} could not be written to {self.root}: {error}; free "
                f"space there, or choose another rollout.server.weights_dir"
            ) from error
        self._written = [path for path in self._written if path != target] + [target]
        while len(self._written) > _KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        return target

    def close(self) -> None:
        """Remove a temporary root; safe to call twice."""
        if self._remove is not None:
            self._remove()


def find_tag(text: str) -> str | None:
    """Return the one tag in a server's answer; None if it has none, or more than one."""
    tags = {match.group() for match in _TAG.finditer(text)}
    return tags.pop() if len(tags) == 1 else None


def _left_by_an_earlier_run(root: Path) -> list[Path]:
    """List the versions in `root`, oldest first; remove what a crash left half-written."""
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    for path in folders:
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    versions = [path for path in folders if _TAG.fullmatch(path.name)]
    return sorted(versions, key=lambda path: path.stat().st_mtime_ns)


def checksum(folder: Path) -> str:
    """CRC-32 (8 hex digits) of all weight files in `folder`, in order of their names."""
    value = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                value = zlib.crc32(block, value)
    return f"{value:08x}"


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in `folder`'s weight files, read from their headers."""
    by_name: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            by_name |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return by_name


def _save_configuration(model: nn.Module, folder: Path) -> None:
    """Save the configuration, and the tokenizer of the model's folder, if it has one."""
    config: Any = model.config
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    source = Path(getattr(model, "name_or_path", "") or "/nonexistent")
    for pattern in _TOKENIZER if source.is_dir() else ():
        for path in source.glob(pattern):
            shutil.copy(path, folder)


_ASK_AGAIN_S = 0.2  # while a server is loading


class WeightHook(Protocol):
    """Brings weights to a server."""

    tag: str | None = None  # of the latest weights that it delivered
    fixed: bool = False  # the server keeps the weights that it was started with

    def check(self) -> None:
        """Raise RolloutError if the server lacks what the hook needs."""
        return

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        """Return when the server says that it serves `weights`; RolloutError otherwise.

        They are (name, tensor) pairs; of `model` only the configuration is read.
        """
        ...

    async def served(self) -> str | None:
        """Return the tag of what the server says it serves; None if it says none."""
        return None

    def close(self) -> None:
        """Remove what was written for the server."""
        return


HookFactory = Callable[[Client, ServerConfig], WeightHook]
_hooks: Registry[HookFactory] = Registry(
    "weight hook", "rollout.server.weights", decorator="@register_hook(name)"
)


def register_hook(name: str) -> Callable[[HookFactory], HookFactory]:
    """Class decorator: make a hook selectable as `rollout.server.weights=<name>`."""
    return _hooks.register(name)


def check_hook(name: str) -> None:
    """Raise ConfigError unless `name` is a registered hook."""
    _hooks.get(name)


def create_hook(client: Client, settings: ServerConfig) -> WeightHook:
    """Build the hook that the settings name, or raise ConfigError."""
    return _hooks.get(settings.weights)(client, settings)


@register_hook("none")
class FixedPolicy(WeightHook):
    """The server keeps its weights: rollouts of a fixed policy."""

    fixed = True

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self._allowed = settings.allow_fixed_policy

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        if not self._allowed:
            raise RolloutError(
                f"the rollout server's weights are fixed (rollout.server.weights=none) and the "
                f"policy is now at version {version}; choose a hook that brings it new weights, "
                f"or set rollout.server.allow_fixed_policy=true to sample from the old ones"
            )


class FolderWeights(WeightHook):
    """A hook whose server loads a folder: written once, whatever the number of servers."""

    def __init__(self, client: Client, settings: ServerConfig) -> None:
        self._client = client
        self.folders = WeightFolders(settings.weights_dir)

    def deliver(self, weights: Weights, model: nn.Module, version: int) -> None:
        """Write the folder, and let the server load it."""
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


EXTENSION = "engine.rollout.server.vllm_worker.WeightReceiver"


@register_hook("vllm")
class VllmHook(FolderWeights):
    """Pauses the server, has its workers load a folder, and tags what they then serve.

    The old tag is withdrawn before anything is touched. If loading fails, the server stays
    paused, so that it serves mixed weights to nobody; the next delivery ends the pause.
    """

    def check(self) -> None:
        self._client.run(self._check, "asking for its weights")

    async def _check(self) -> None:
        try:
            await self.served()
        except RolloutError as error:
            raise error.with_message(
                f"{error}; rollout.server.weights='vllm' needs a vLLM server that was started "
                f"with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        try:
            await self._rpc("hybridflyte_tag")
        except RolloutError as error:
            raise error.with_message(
                f"{error}; start the vLLM server with --worker-extension-cls {EXTENSION}"
            ) from error

    async def _load(self, path: Path, version: int) -> None:
        tag = path.name
        if await self.served() == tag:
            return  # a resumed run brings what the server has already
        await self._client.post("/pause?mode=wait")
        await self._client.post("/update_weight_version", {"new_version": f"loading {tag}"})
        for answer in await self._rpc("hybridflyte_load", folder=str(path)):
            if answer.get("problem"):
                raise RolloutError(f"a vLLM worker could not load {path}: {answer['problem']}")
        reset = await self._client.post("/reset_prefix_cache")
        if not reset.get("success"):
            raise RolloutError("vLLM kept its prefix cache, as requests are still running")
        await self._client.post("/resume")
        await self._client.post("/update_weight_version", {"new_version": tag})
        served = await self.served()
        if served != tag:
            raise RolloutError(f"vLLM loaded {tag} and says that it serves {served}")

    async def served(self) -> str | None:
        version = str((await self._client.get("/weight_info")).get("weight_version"))
        return version if version == find_tag(version) else None

    async def _rpc(self, method: str, **arguments: str) -> list[dict[str, str]]:
        answer = await self._client.post("/collective_rpc", {"method": method, "kwargs": arguments})
        results: list[dict[str, str]] = answer["results"]
        return results
