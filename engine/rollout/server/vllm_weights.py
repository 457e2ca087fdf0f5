"""New weights for a vLLM server (0.32), through its development endpoints and our extension.

Start the server with `VLLM_SERVER_DEV_MODE=1` in its environment and
`--worker-extension-cls engine.rollout.server.vllm_worker.WeightReceiver
--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import RolloutError
from engine.rollout.server.weight_folders import find_tag
from engine.rollout.server.weights import FolderWeights, register_hook

EXTENSION = "engine.rollout.server.vllm_worker.WeightReceiver"


@register_hook("vllm")
class VllmHook(FolderWeights):
    """Pauses the server, has its workers load a folder, and tags what they then serve.

    The old tag is withdrawn before anything is touched. If loading fails, the server stays
    paused, so that it serves no mixture to anybody; the next delivery ends the pause.
    """

    def check(self) -> None:
        self._client.run(self._check, "asking for its weights")

    async def _check(self) -> None:
        try:
            await self.served()
        except RolloutError as error:
            raise RolloutError(
                f"{error}; rollout.server.weights='vllm' needs a vLLM server that was started "
                f"with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        try:
            await self._rpc("hybridflyte_tag")
        except RolloutError as error:
            raise RolloutError(
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
        said = await self.served()
        if said != tag:
            raise RolloutError(f"vLLM loaded {tag} and says that it serves {said}")

    async def served(self) -> str | None:
        said = str((await self._client.get("/weight_info")).get("weight_version"))
        return find_tag(said) if said == find_tag(said) else None

    async def _rpc(self, method: str, **arguments: str) -> list[dict[str, str]]:
        answer = await self._client.post("/collective_rpc", {"method": method, "kwargs": arguments})
        results: list[dict[str, str]] = answer["results"]
        return results
