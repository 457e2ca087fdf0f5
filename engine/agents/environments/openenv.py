"""Environments behind an OpenEnv server (`openenv-core`), a session of its WebSocket each.

    {"type": "reset", "data": {"seed": 7}}            → {"type": "observation", "data": {…}}
    {"type": "step", "data": {"message": "hello"}}    → {"type": "observation", "data": {…}}

with data {"observation": {…}, "reward": …, "done": …}. Plain HTTP has no sessions there. The
package `websockets` is needed, and none of OpenEnv's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.agents.protocol import Action, Message, Observation
from engine.agents.registry import register_environment
from engine.errors import ConfigError, EpisodeError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_LARGEST = 16 << 20  # bytes of a message


@register_environment("openenv")
class OpenEnvEnvironment:
    """What the server shows is a user's message; the policy's text is a field of its action.

    The row's prompt comes first, then the first observation. The seed is the row's
    `extra_info.seed`, or its `index`.
    """

    def __init__(
        self,
        *,
        url: str = "",
        action_field: str = "message",
        action_extra: Mapping[str, object] | None = None,
        observation_fields: Sequence[str] = (),
        connect_timeout_s: float = 10.0,
    ) -> None:
        """`url` is the server's, e.g. "http://127.0.0.1:8000".

        `action_field` takes the policy's text, beside the fields of `action_extra`.
        `observation_fields` are shown, one below the other; without any, an observation's only
        text, or all of it as JSON.
        """
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"environment 'openenv' needs options.url; {url!r} is none, give e.g. "
                "http://127.0.0.1:8000"
            )
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        if url.startswith("ws"):
            self._url = url.rstrip("/") + "/ws"
        self._action_field, self._action_extra = action_field, dict(action_extra or {})
        self._fields = tuple(observation_fields)
        self._connect_timeout_s = connect_timeout_s
        self._socket: ClientConnection | None = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        about = row.get("extra_info") or {}
        seed = about.get("seed", about.get("index"))
        seen = await self._asked("reset", {} if seed is None else {"seed": int(seed)})
        prompt: list[Message] = [dict(one) for one in row.get("prompt") or ()]
        shown = self._observation(seen)
        return Observation((*prompt, *shown.messages), shown.reward, shown.done, shown.info)

    async def step(self, action: Action) -> Observation:
        data = {**self._action_extra, self._action_field: action.text}
        return self._observation(await self._asked("step", data))

    async def close(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.send(json.dumps({"type": "close"}))
            await socket.close()

    async def _asked(self, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
        """Send a message and wait for its answer; the pool has the deadline."""
        if self._socket is None:
            self._socket = await self._connected()
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise EpisodeError(f"the OpenEnv server answered {str(answer)[:200]!r}")
        if answer.get("type") != "observation":
            told = answer["data"]
            words = f"{told.get('code', '')} {told.get('message', told)}".strip()
            raise EpisodeError(f"the OpenEnv server refused {kind}: {words[:300]}")
        return answer["data"]

    async def _connected(self) -> ClientConnection:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise ConfigError(
                "environment 'openenv' needs the package websockets; install hybridflyte[openenv]"
            ) from error
        try:
            return await connect(
                self._url, open_timeout=self._connect_timeout_s, max_size=_LARGEST, proxy=None
            )
        except (OSError, TimeoutError) as error:
            raise EpisodeError(f"no OpenEnv server at {self._url} ({error})") from error

    def _observation(self, data: Mapping[str, Any]) -> Observation:
        done = any(bool(data.get(key)) for key in ("done", "terminated", "truncated"))
        seen = data.get("observation", {})
        message = {"role": "user", "content": self._shown(seen)}
        return Observation(
            (message,), float(data.get("reward") or 0.0), done, {"observation": seen}
        )

    def _shown(self, seen: object) -> str:
        if not isinstance(seen, Mapping):
            return str(seen)
        if self._fields:
            missing = [name for name in self._fields if name not in seen]
            if missing:
                raise EpisodeError(
                    f"the OpenEnv server's observation has no {missing[0]!r}; it has "
                    f"{', '.join(seen)}, so correct options.observation_fields"
                )
            return "\n".join(str(seen[name]) for name in self._fields)
        texts = [one for one in seen.values() if isinstance(one, str)]
        return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)
