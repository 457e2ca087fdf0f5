"""Agents of users: functions and programs that play an episode through OpenAI's API.

    async def play(row, client):            # path/to/file.py:play, or package.module:play
        answer = await client.chat.completions.create(model="policy", messages=row["prompt"])
        return 1.0                          # the reward, or {"reward": 1.0, "solved": True}

`client` is an `openai.AsyncOpenAI` whose key is the episode's. Anything else is a command: a
program that finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment, the row as JSON in the
file `HYBRIDFLYTE_ROW`, and leaves its reward, or such an object, in the file `HYBRIDFLYTE_REWARD`.

An agent runs as an environment does (`environment_pool`): its whole episode is one call. Imports
neither torch nor pydantic.
"""

import asyncio
import inspect
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.agents.environment_protocol import Action, EnvironmentFailure, Observation
from engine.data import cells
from engine.errors import ConfigError, EngineError, EpisodeError
from engine.registry import Options, Registry, load_function
from engine.rewards.reward_function import float32_or_nan

SETTING = "rollout.agent.play"
PROGRAM = f"{__name__}:AgentProgram"
ENDPOINT = "hybridflyte_endpoint"  # of a row: URL and key
ROW_FILE, REWARD_FILE = "HYBRIDFLYTE_ROW", "HYBRIDFLYTE_REWARD"
_FUNCTION = re.compile(r"(?P<place>[^\s:]+):(?P<name>[A-Za-z_]\w*)")
_OUTPUT = 2000  # bytes of what a program wrote, in errors
_FILES = 65536  # that a process may have open, where the system lets it
_END_S = 3.0  # for a program to end once it is asked to

_registry: Registry[object] = Registry("agent", f"{SETTING}.name")


def is_function(name: str) -> bool:
    """Whether `rollout.agent.play` names a function; else it is a command."""
    return _FUNCTION.fullmatch(name) is not None


def check_agent(name: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError for an agent that can't be found, and for options that it doesn't read."""
    if is_function(name):
        _function(name, options)
        return
    words = _words(name)
    if options:
        raise ConfigError(
            f"{SETTING}.options are a function's, and name={name!r} is a command; write them there"
        )
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{SETTING}.name={name!r}: there is no program {words[0]!r}; give the command of one, "
            "path/to/file.py:function or package.module:function"
        )


def agent_files(name: str) -> list[str]:
    """The files that an agent's name or command has in it, e.g. ["agents/mine.py"]."""
    match = _FUNCTION.fullmatch(name)
    words = [match["place"]] if match is not None else _words(name)
    return [word for word in words if "/" in word or word.endswith(".py")]


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{SETTING}.name={command!r} is no command: {error}") from None
    if not words:
        raise ConfigError(f"{SETTING}.name is empty; name a function or a command")
    return words


def _function(name: str, options: Mapping[str, object]) -> Callable[..., Any]:
    """The agent at `path/to/file.py:play` or `package.module:play`, with its options."""
    path, _, attribute = name.partition(":")
    if path.endswith(".py"):
        function: Any = load_function(path, attribute, f"{SETTING}.name={name!r}")
    else:
        function = _registry.load(name)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{SETTING}.name={name!r} is no coroutine function; write "
            f"`async def {attribute}(row, client)`"
        )
    given = Options(f"agent {name!r}", function).parse(options, f"{SETTING}.options")
    try:
        inspect.signature(function).bind({}, None, **given)
    except TypeError as error:
        raise ConfigError(
            f"{SETTING}.name={name!r} can't be called as {attribute}(row, client): {error}"
        ) from None
    return lambda row, client: function(row, client, **given)


class AgentProgram:
    """An environment whose `reset` plays a whole episode with the agent of this name."""

    def __init__(self, *, name: str = "", options: Mapping[str, object] | None = None) -> None:
        raise_file_limit()
        self._name = name
        self._function: Callable[..., Any] | None = None
        if is_function(name):
            try:
                import openai  # which takes a while
            except ImportError as error:
                raise ConfigError(
                    f"{SETTING}: a function is given a client of the package openai; install "
                    "hybridflyte[agents]"
                ) from error
            self._openai = openai
            self._function = _function(name, options or {})

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        row = dict(row)
        url, key = row.pop(ENDPOINT)
        play = self._run if self._function is None else self._call
        agent = f"agent {self._name!r}"
        try:
            return _observation(await play(row, url, key))
        except EngineError as error:
            raise EnvironmentFailure("raised", f"{agent} {error}") from error
        except Exception as error:
            raise EnvironmentFailure.of(agent, error) from error

    async def step(self, action: Action) -> Observation:
        raise EpisodeError("an agent plays its whole episode at once")

    async def close(self) -> None:
        """Do nothing: nothing is held between episodes."""

    async def _call(self, row: dict[str, Any], url: str, key: str) -> object:
        assert self._function is not None
        # Loopback: no proxy, no certificates. The episode has a deadline; a turn may take its time.
        transport = self._openai.DefaultAsyncHttpxClient(
            verify=False, trust_env=False, timeout=None
        )
        client = self._openai.AsyncOpenAI(base_url=url, api_key=key, http_client=transport)
        async with client:
            return await self._function(row, client)

    async def _run(self, row: dict[str, Any], url: str, key: str) -> object:
        with tempfile.TemporaryDirectory(prefix="episode-") as folder:
            files = [Path(folder, name) for name in ("row.json", "reward.json", "output")]
            row_file, reward_file, output_file = files
            row_file.write_text(json.dumps(row, default=cells.plain))
            variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
            variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
            variables |= {ROW_FILE: str(row_file), REWARD_FILE: str(reward_file)}
            with output_file.open("wb") as output:
                program = await asyncio.create_subprocess_exec(
                    *_words(self._name),
                    env=os.environ | variables,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            try:
                await program.wait()
            finally:
                await _end(program)
            with output_file.open("rb") as written:
                written.seek(max(0, output_file.stat().st_size - _OUTPUT))
                text = written.read().decode(errors="replace").strip()
            if program.returncode:
                raise EpisodeError(f"ended with exit status {program.returncode}: {text}")
            try:
                return json.loads(reward_file.read_text())
            except (OSError, ValueError) as error:
                raise EpisodeError(
                    f"left no reward in the file {REWARD_FILE} names ({error}): write a number, "
                    f'or an object such as {{"reward": 1.0}}. {text}'
                ) from None


def raise_file_limit() -> None:
    """Let the process have a connection for each of a thousand episodes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


async def _end(program: asyncio.subprocess.Process) -> None:
    """End a program, and what it started in its session."""
    try:
        if program.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(program.wait(), _END_S)
    finally:  # also where the rollout ends meanwhile
        with suppress(ProcessLookupError):  # what it left behind
            os.killpg(program.pid, signal.SIGKILL)


def _observation(result: object) -> Observation:
    """The last observation of an episode, by what its agent returned."""
    info = dict(result) if isinstance(result, Mapping) else {"reward": result}
    reward = info.pop("reward", None)
    if math.isnan(value := float32_or_nan(reward)):
        raise EpisodeError(
            f'returned {result!r:.100}; return a finite number, or a mapping with one as "reward"'
        )
    return Observation(reward=value, done=True, info=info)
