"""The rollout role of multi-turn runs: it plays episodes with environments."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import safetensors.torch
import torch

from engine.agents.agent_loop import Environments, EpisodePlayer, open_pool
from engine.agents.agent_player import AgentPlayer, AgentPool
from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.agents.episode import (
    Episode,
    EpisodeLimits,
    EpisodeTokenizer,
    EpisodeTree,
    PartialEpisodes,
    ReadAction,
    collate_episodes,
    plain_action,
    save_episode,
)
from engine.batch import Batch
from engine.checkpoint.state_dict import extract_tensors, insert_tensors, safetensors_bytes
from engine.config import AgentConfig, MultiTurnConfig, RolloutConfig
from engine.data.chat_template import with_template_variables
from engine.data.templates import tool_tokens
from engine.data.tokenizer import load_tokenizer
from engine.errors import EngineError, RolloutError
from engine.models import text_config
from engine.rollout.protocol import RolloutEngine, SamplingParams
from engine.rollout.stream import (
    RolloutStream,
    open_stream,
    take_partial_groups,
    with_partial_groups,
)
from engine.storage.folder import Folder
from engine.workers.role import Dispatch, WorkerContext, dispatch
from engine.workers.rollout_worker import Draws, Groups, RolloutWorker, StreamRolloutWorker

log = logging.getLogger(__name__)

FOLDER = "episodes"  # below the folder of checkpoints
_VALUES = "values"

SavedGroups = Mapping[int, PartialEpisodes]  # by key of their prompt


class SavedRollout:
    """One rank's file of the episodes under way, e.g. "rollout-00000-of-00001.safetensors".

    A run that is killed goes back to its newest checkpoint; the step after it goes on from this
    file, if it is that step's.
    """

    def __init__(
        self, folder: str, stem: str, settings: str, every_s: float, before: str = ""
    ) -> None:
        """Save every `every_s` seconds below `folder`; go on from there, or from `before`."""
        self._folder, self._name = Folder(f"{folder}/{FOLDER}"), f"{stem}.safetensors"
        self._sources = [self._folder, *([Folder(f"{before}/{FOLDER}")] if before else [])]
        self._settings, self._every_s = settings, every_s
        self._saved, self._written = 0.0, False

    def identity(self, prompts: Batch, version: int, seed: int, n: int) -> str:
        """What a rollout is: these prompts, under this version's weights, with this noise."""
        ids = [[int(token) for token in row] for row in prompts.columns["prompt_ids"]]
        facts = [self._settings, version, seed, n, prompts["group_ids"].tolist(), ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def begin(self, identity: str) -> SavedGroups:
        """What was saved of a rollout that begins now; only the first one may have something."""
        sources, self._sources, self._saved = self._sources, [], time.monotonic()
        for source in sources:
            try:
                groups = self._read(source, identity)
            except (EngineError, ValueError, KeyError, safetensors.SafetensorError) as error:
                log.warning("the episodes in %s are begun again: %s", source, error)
                continue
            if groups:
                count = sum(len(group.episodes) for group in groups.values())
                log.info("%d episodes continue from %s", count, source)
                return groups
        return {}

    def _read(self, source: Folder, identity: str) -> SavedGroups:
        if self._name not in source.entries():
            return {}
        self._written |= source is self._folder
        tensors = safetensors.torch.load(source.read(self._name))
        values = json.loads(tensors.pop(_VALUES).numpy().tobytes())
        if values["identity"] != identity:
            return {}
        groups = insert_tensors(values["groups"], {"groups": tensors})
        return {int(key): PartialEpisodes.from_tree(tree) for key, tree in groups.items()}

    def save(self, identity: str, groups: Callable[[], SavedGroups]) -> None:
        """Save `groups`, if it is time for it; a failure is logged, and the rollout goes on."""
        if time.monotonic() - self._saved < self._every_s:
            return
        trees = {str(key): group.tree() for key, group in groups().items()}
        try:
            values, parts = extract_tensors({"groups": trees})
            text = json.dumps({"identity": identity, "groups": values["groups"]}).encode()
            as_tensor = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
            tensors = parts.get("groups", {}) | {_VALUES: as_tensor}
            self._folder.create()
            self._folder.write(self._name, safetensors_bytes(tensors, {}))
            self._written = True
        except EngineError as error:
            log.warning("the episodes of this step are not saved: %s", error)
        self._saved = time.monotonic()

    def end(self) -> None:
        if not self._written:
            return
        self._written = False
        try:
            self._folder.remove_file(self._name)
        except EngineError as error:
            log.warning("episodes of a step that is over stay in %s: %s", self._folder, error)


_WAIT_S = 0.05  # of one step, for an environment
_REPORT_STATES_S = 2.0  # for environments to answer and give their states; a report has longer

NewEpisode = Callable[[int, int, list[int]], Episode]  # of key, index and the row's prompt


class EpisodeGroups(Groups):
    """Plays `n` episodes of each prompt, and returns finished groups."""

    def __init__(
        self,
        stream: RolloutStream,
        player: EpisodePlayer,
        new_episode: NewEpisode,
        *,
        n: int,
        pad_token_id: int,
        branches: bool,
        retain: bool = False,
    ) -> None:
        """With `retain`, groups that were returned are among those that `partial_groups` copies."""
        super().__init__(stream, n, pad_token_id)
        self._player, self._new, self._branches = player, new_episode, branches
        self._episodes: dict[int, list[Episode]] = {}  # by key, then index
        self._retained: dict[int, list[Episode]] | None = {} if retain else None
        self._trees: dict[int, EpisodeTree] = {}  # by id of the episode: the latest of those saved

    @property
    def busy(self) -> int:
        return self._player.busy

    def submit(self, prompts: Batch) -> None:
        prompts, begun = take_partial_groups(prompts)
        for row, key in enumerate(prompts["group_ids"].tolist()):
            prompt, saved = prompts.rows([row]), begun[row]
            if not isinstance(saved, PartialEpisodes | None):
                raise RolloutError(
                    f"group {key} was saved with completions of one turn; resume with "
                    "rollout.multi_turn.enable=false, or begin again"
                )
            trees = {tree["index"]: tree for tree in saved.episodes} if saved is not None else {}
            columns = {name: column[0] for name, column in prompt.columns.items()}
            ids = list(columns.pop("prompt_ids"))
            episodes = [self._new(key, index, ids) for index in range(self._n)]
            self._prompts[key], self._episodes[key] = prompt, episodes
            for episode in episodes:
                if (tree := trees.get(episode.index)) is not None:
                    self._trees[id(episode)] = tree  # until it is saved again
                self._player.add(episode, dict(columns), tree)

    def partial_groups(self, seconds: float = _REPORT_STATES_S) -> dict[int, PartialEpisodes]:
        """Copies of unfinished groups, by key; older ones where an environment is too slow."""
        self._trees |= self._player.save(seconds)
        partial: dict[int, PartialEpisodes] = {}
        for key, episodes in (self._episodes | (self._retained or {})).items():
            ended = [episode for episode in episodes if episode.end is not None]
            self._trees |= {id(episode): save_episode(episode) for episode in ended}
            trees = [self._trees[id(e)] for e in episodes if id(e) in self._trees]
            partial[key] = PartialEpisodes(trees)
        return partial

    def step(self) -> list[Batch]:
        groups = []
        for episode in self._player.step(_WAIT_S):
            episodes = self._episodes.get(episode.key, ())  # none where another ended with it
            if episodes and all(e.end is not None for e in episodes):
                groups.append(self._batch(episode.key))
        return groups

    def close(self) -> None:
        self._player.close()
        super().close()

    def _batch(self, key: int) -> Batch:
        episodes = self._episodes.pop(key)
        if self._retained is not None:
            self._retained[key] = episodes
        else:
            for episode in episodes:
                self._trees.pop(id(episode), None)
        return collate_episodes(
            self._prompts.pop(key),
            episodes,
            pad_token_id=self._pad,
            version=self.version,
            branches=self._branches,
        )


_STATES_S = 0.2  # of a rollout, for environments to give their states


def open_environments(agent: AgentConfig, plugins: tuple[str, ...]) -> Environments:
    """What plays episodes: environments, or the agent that is named."""
    processes, play, environment = agent.num_workers, agent.play, agent.environment
    limit = agent.call_timeout_s
    if play.name:
        return AgentPool(play.name, play.options, processes, agent.timeout_s, blocking_s=limit)
    return open_pool(environment.name, environment.options, processes, limit, plugins=plugins)


class EpisodeFactory:
    """Opens, as the settings say, what plays a model's episodes; makes episodes and their players.

    The worker whose episodes they are closes `environments`.
    """

    def __init__(
        self,
        model_path: str,
        max_model_len: int,
        multi_turn: MultiTurnConfig,
        agent: AgentConfig,
        *,
        plugins: tuple[str, ...] = (),
        template_variables: Mapping[str, object] | None = None,
    ) -> None:
        """`max_model_len` is that of episodes whose prompts show no tools."""
        self._multi_turn, self._agent = multi_turn, agent
        self.environments = open_environments(agent, plugins)
        try:
            tokenizer = load_tokenizer(model_path)
            self._tokenizer = with_template_variables(tokenizer, template_variables or {})
            shown = tool_tokens(self._tokenizer, self.environments.tools)
            context = getattr(text_config(model_path), "max_position_embeddings", None)
        except BaseException:
            self.environments.close()
            raise
        limit = max_model_len + shown if context is None else int(context)
        self.max_model_len = max(max_model_len, min(max_model_len + shown, limit))

    def episode_tokenizer(self, stop_ids: Sequence[int]) -> EpisodeTokenizer:
        """What makes episodes tokens and reads turns, with calls where there may be tools."""
        history, tools = self._multi_turn.history, self.environments.tools
        if not tools and not self._agent.play.name:
            return EpisodeTokenizer(self._tokenizer, stop_ids, plain_action, history)

        def reader_of(tools: Sequence[Mapping[str, object]]) -> ReadAction:
            parser = resolve_call_parser(self._multi_turn.format, self._tokenizer, tools)
            return partial(parsed_action, parser)

        read = reader_of(tools)
        return EpisodeTokenizer(self._tokenizer, stop_ids, read, history, reader_of)

    def limits(self, max_response_length: int) -> EpisodeLimits:
        """What an episode may use, `max_response_length` in tokens."""
        return EpisodeLimits(
            max_response_length=max_response_length,
            max_model_len=self.max_model_len,
            max_turn_length=self._multi_turn.max_turn_length,
            max_turns=self._multi_turn.max_assistant_turns,
            seconds=self._agent.timeout_s,
            turn_seconds=self._agent.turn_timeout_s,
            drop=self._agent.on_limit == "drop",
        )

    def player(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        max_num_seqs: int,
        failure_reward: float | None = None,
        **stream_options: str,
    ) -> tuple[RolloutStream, EpisodePlayer]:
        """A stream of turns, of which `params.n` isn't read, and who plays on it."""
        stream = open_stream(
            engine,
            replace(params, n=1),
            max_num_seqs=max_num_seqs,
            longest_prompt=self.max_model_len - 1,
            keep_prefixes=True,
            **stream_options,
        )
        is_agent = isinstance(self.environments, AgentPool)
        player: type[EpisodePlayer] = AgentPlayer if is_agent else EpisodePlayer
        return stream, player(
            stream,
            self.environments,
            concurrency=self._agent.concurrency or max_num_seqs,
            failure_reward=failure_reward,
        )


class AgentRolloutWorker(RolloutWorker):
    """Samples `rollout.n` episodes a prompt, with the newest weights of its process's policy."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: RolloutConfig,
        max_model_len: int,
        template_variables: Mapping[str, object] | None = None,
        plugins: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """`max_model_len` is that of episodes whose prompts show no tools."""
        self._factory = EpisodeFactory(
            model_path,
            max_model_len,
            config.multi_turn,
            config.agent,
            plugins=plugins,
            template_variables=template_variables,
        )
        options |= {"model_path": model_path, "config": config}
        try:
            super().__init__(context, max_model_len=self._factory.max_model_len, **options)
        except BaseException:
            self._factory.environments.close()
            raise
        self.limits = self._factory.limits(self.max_response_length)
        self._saved: SavedRollout | None = None
        self.episodes = self._factory.episode_tokenizer(self.stop)

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_episodes(self, folder: str, settings: str, before: str = "") -> None:
        """Save rollouts under way beside the checkpoints; go on from there, or from `before`."""
        if every_s := self.config.agent.save_freq_s:
            self._saved = SavedRollout(folder, self._stem(), settings, every_s, before)

    def _sample(self, prompts: Batch, draws: Draws) -> Batch:
        saved = self._saved if draws == "training" else None
        params, keys = self._params(draws), prompts["group_ids"].tolist()
        groups = self._open_groups(params, retain=saved is not None)
        done: dict[int, Batch] = {}
        identity, begun = "", prompts
        if saved is not None:
            identity = saved.identity(prompts, self.policy.version, params.seed, params.n)
            parts = saved.begin(identity)
            begun = with_partial_groups(prompts, [parts.get(key) for key in keys])
        try:
            groups.submit(begun)
            while groups.busy:
                done |= {int(group["group_ids"][0]): group for group in groups.step()}
                if saved is not None:
                    saved.save(identity, lambda: groups.partial_groups(_STATES_S))
        finally:
            groups.close()
            self.policy.sleep()
        if saved is not None:
            saved.end()
        return Batch.concat([done[key] for key in keys])

    def _open_groups(self, params: SamplingParams, retain: bool = False) -> EpisodeGroups:
        agent, places = self.config.agent, self.config.max_num_seqs
        failure_reward = agent.error_reward if agent.on_error == "score" else None
        stream, player = self._factory.player(
            self.policy.engine, params, places, failure_reward, **self.config.stream_options
        )

        def new_episode(key: int, index: int, prompt_ids: list[int]) -> Episode:
            return Episode(key, 0, index, self.episodes, self.limits, prompt_ids)

        groups = EpisodeGroups(
            stream,
            player,
            new_episode,
            n=params.n,
            pad_token_id=self.tokenizer.pad_token_id,
            branches=self.config.multi_turn.history == "branches" or bool(agent.play.name),
            retain=retain,
        )
        groups.resumable = self._factory.environments.resumable
        return groups

    def close(self) -> None:
        self._factory.environments.close()
        super().close()


class AgentStreamWorker(StreamRolloutWorker, AgentRolloutWorker):
    """Plays episodes without waiting for a batch of them (trainer.mode=async)."""
