"""The rollout role of multi-turn runs: it plays episodes with environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.agents.episode import Episode, EpisodeLimits, EpisodeTokenizer, plain_action
from engine.agents.local_environments import Environments, LocalEnvironments
from engine.agents.pool import EnvironmentPool
from engine.agents.registry import make_environment
from engine.agents.rollout import EpisodePlayer
from engine.batch import Batch
from engine.config import AgentConfig, RolloutConfig
from engine.data.templates import tool_tokens, with_template_variables
from engine.data.tokenizer import load_tokenizer
from engine.models import text_config
from engine.rollout.partial_groups import with_partial_groups
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import open_stream
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.episode_groups import EpisodeGroups
from engine.workers.rollout import Decoding, RolloutWorker
from engine.workers.saved_rollout import SavedRollout
from engine.workers.stream_rollout import StreamRolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATES_S = 0.2  # of a rollout, for environments to give their states


def open_environments(agent: AgentConfig, plugins: tuple[str, ...]) -> Environments:
    """The environments of a run, in processes of their own or in this one."""
    name, options = agent.environment.name, agent.environment.options
    if not agent.num_workers:
        make = partial(make_environment, name, options)
        return LocalEnvironments(make, timeout_s=agent.call_timeout_s)
    return EnvironmentPool(
        name,
        options,
        plugins=plugins,
        processes=agent.num_workers,
        timeout_s=agent.call_timeout_s,
    )


def length_with_tools(
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, object]],
    max_model_len: int,
) -> int:
    """`max_model_len` with the tokens of tools that prompts show, as far as the context goes."""
    wanted = max_model_len + tool_tokens(tokenizer, tools)
    context = getattr(text_config(model_path), "max_position_embeddings", None)
    return wanted if context is None else max(max_model_len, min(wanted, int(context)))


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
        """`max_model_len` is that of episodes whose prompts show no tools; `template_variables`
        are those of the chat template that prompts are rendered with; `plugins` are the modules
        that may register the environment."""
        turns, agent = config.multi_turn, config.agent
        self.environments = open_environments(agent, plugins)
        try:
            tokenizer = with_template_variables(
                load_tokenizer(model_path), template_variables or {}
            )
            tools = self.environments.tools
            max_model_len = length_with_tools(model_path, tokenizer, tools, max_model_len)
            super().__init__(
                context,
                model_path=model_path,
                config=config,
                max_model_len=max_model_len,
                **options,
            )
        except BaseException:
            self.environments.close()
            raise
        self.limits = EpisodeLimits(
            max_response_length=self.max_response_length,
            max_model_len=self.max_model_len,
            max_turn_length=turns.max_turn_length,
            max_turns=turns.max_assistant_turns,
            seconds=agent.timeout_s,
            turn_seconds=agent.turn_timeout_s,
            drop=agent.on_limit == "drop",
        )
        self._saved: SavedRollout | None = None
        parser = resolve_call_parser(turns.format)
        self.episodes = EpisodeTokenizer(
            tokenizer,
            self.stop,
            partial(parsed_action, parser) if self.environments.tools else plain_action,
            turns.history,
        )

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_episodes(self, folder: str, settings: str, before: str = "") -> None:
        """Save the episodes of rollouts under way below `folder`, where the checkpoints are.

        The first rollout from now on goes on from what is there, or in `before`, if it is the same.
        `settings` stands for the run's.
        """
        if every_s := self.config.agent.save_freq_s:
            self._saved = SavedRollout(folder, self._stem(), settings, every_s, before)

    def _sample(self, prompts: Batch, how: Decoding) -> Batch:
        n, saved = how.n, self._saved if how.draws == "training" else None
        params = self._params(replace(how, n=1))
        groups = self._open_groups(params, n, retain=saved is not None)
        done: dict[int, Batch] = {}
        identity = ""
        begun = prompts
        if saved is not None:
            identity = saved.identity(prompts, self.policy.version, params.seed, n)
            parts = saved.begin(identity)
            keys = prompts["group_ids"].tolist()
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
        return Batch.concat([done[key] for key in prompts["group_ids"].tolist()])

    def _open_stream(self) -> EpisodeGroups:
        return self._open_groups(self._params(replace(self._of_training(), n=1)), self.config.n)

    def _open_groups(self, params: SamplingParams, n: int, retain: bool = False) -> EpisodeGroups:
        stream = open_stream(
            self.policy.engine,
            params,
            max_num_seqs=self.config.max_num_seqs,
            longest_prompt=self.max_model_len - 1,
            keep_prefixes=True,
        )
        agent = self.config.agent
        player = EpisodePlayer(
            stream,
            self.environments,
            concurrency=agent.concurrency or self.config.max_num_seqs,
            call_seconds=agent.call_timeout_s,
            failure_reward=agent.error_reward if agent.on_error == "score" else None,
        )
        return EpisodeGroups(
            stream,
            player,
            self._new_episode,
            n=n,
            pad_token_id=self.tokenizer.pad_token_id,
            branches=self.config.multi_turn.history == "branches",
            retain=retain,
        )

    def _new_episode(self, key: int, index: int, prompt_ids: list[int]) -> Episode:
        return Episode(key, 0, index, self.episodes, self.limits, prompt_ids)

    def close(self) -> None:
        self.environments.close()
        super().close()


class AgentStreamWorker(StreamRolloutWorker, AgentRolloutWorker):
    """Plays episodes without waiting for a batch of them (trainer.mode=async).

    Those that play go on under new weights; a group is handed over when its last episode ends.
    """
