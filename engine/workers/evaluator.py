"""The roles of evaluation: a model that nobody trains completes prompts or plays episodes."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.agents.episode import Episode, summarize
from engine.batch import Batch
from engine.config import AgentConfig, MultiTurnConfig, ParallelConfig, RolloutConfig
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, open_model
from engine.parallel.layout import Layout
from engine.registry import import_plugins
from engine.rollout import protocol
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import rollout_weights
from engine.runtime.sharded_model import init_mesh, process_device
from engine.workers.agent_rollout import EpisodeFactory
from engine.workers.role import Dispatch, Worker, WorkerContext, dispatch

_MAX_NUM_SEQS = 512  # completions, or turns of episodes, that are decoded at once


class EvaluationWorker(Worker):
    """Decodes with a copy of a model, or with this rank's tensor-parallel shards of one."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        engine: str,
        max_model_len: int,
        seed: int,
        tp: int = 1,
    ) -> None:
        """`tp` ranks share a copy. Raises ModelError and ConfigError as loading and sharding do."""
        super().__init__(context)
        self._path, self._engine_name, self._tp = model_path, engine, tp
        self._dtype = "float32" if process_device().type == "cpu" else "bfloat16"
        options: dict[str, int | None] = {"kv_cache_memory_mb": None, "seed": seed}
        options |= {"max_num_seqs": _MAX_NUM_SEQS, "max_model_len": max_model_len}
        self.engine = self._whole(options) if tp == 1 else self._sharded(options)

    @dispatch(Dispatch.DATA_PARALLEL, pad=True)
    def answer(
        self,
        prompts: Batch,
        params: protocol.SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> Batch:
        """`params.n` completions a prompt: the column `token_ids`, and which are `truncated`.

        `prompts` has the column `prompt_ids`, and in `group_ids` each one's number among those of
        all ranks, by which its completions are drawn.
        """
        first = int(prompts["group_ids"][0])
        rank_params = replace(params, first_prompt=first, stop_token_ids=self._stop)
        done = self.engine.generate(list(prompts.columns["prompt_ids"]), rank_params, on_progress)
        truncated = torch.tensor([completion.finish_reason == "length" for completion in done])
        return Batch({"truncated": truncated}, {"token_ids": [c.token_ids for c in done]})

    def close(self) -> None:
        self.engine.close()
        super().close()

    def _whole(self, options: dict[str, int | None]) -> protocol.RolloutEngine:
        model = load_model(self._path, self._dtype).eval()
        torch.nn.Module.to(model, process_device())  # in place
        self._stop = stop_token_ids(load_tokenizer(self._path), model.config)
        return protocol.create_engine(self._engine_name, model, **options)

    def _sharded(self, options: dict[str, int | None]) -> protocol.RolloutEngine:
        context, tp = self.context, self._tp
        parallel = ParallelConfig(dp=context.world_size // tp, tp=tp)
        ranks = init_mesh(Layout.of(parallel), context.rank, context.world_size, context.address)
        model = open_model(self._path, self._dtype).requires_grad_(False)
        policy = PolicyRuntime(model, ranks, parallel)
        rollout = RolloutConfig(engine=self._engine_name, tensor_parallel_size=tp)
        load = partial(load_model, self._path, self._dtype)
        weights = rollout_weights(policy.sharded, rollout, load)
        policy.init_rollout(self._engine_name, weights, options | protocol.engine_options(rollout))
        self._stop = stop_token_ids(load_tokenizer(self._path), weights.model.config)
        return policy.engine


class EpisodeEvaluationWorker(EvaluationWorker):
    """Plays episodes with a copy of a model, as `rollout.multi_turn` and `rollout.agent` say."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        max_model_len: int,
        multi_turn: MultiTurnConfig,
        agent: AgentConfig,
        plugins: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        import_plugins(plugins)
        factory = EpisodeFactory(model_path, max_model_len, multi_turn, agent, plugins=plugins)
        options |= {"model_path": model_path, "max_model_len": factory.max_model_len}
        try:
            super().__init__(context, **options)
        except BaseException:
            factory.environments.close()
            raise
        self._factory = factory
        self._episodes = factory.episode_tokenizer(self._stop)

    @dispatch(Dispatch.DATA_PARALLEL, pad=True)
    def answer(
        self,
        prompts: Batch,
        params: protocol.SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> Batch:
        """`params.n` episodes a prompt: the column `episodes`, of `EpisodeSummary`.

        `prompts` has the columns of the data set's rows, and `group_ids` as
        `EvaluationWorker.answer`'s.
        """
        columns = {name: c for name, c in prompts.columns.items() if name != "prompt_ids"}
        rows = [{name: c[row] for name, c in columns.items()} for row in range(len(prompts))]
        episodes = list(self._new_episodes(prompts, params))
        params = replace(params, stop_token_ids=self._stop)
        stream, player = self._factory.player(self.engine, params, _MAX_NUM_SEQS)
        try:
            player.play(episodes, rows)
        finally:
            stream.close()
        if on_progress is not None:
            on_progress(len(episodes))
        done = [summarize(episode) for episode in episodes]
        return Batch(
            {"truncated": torch.tensor([episode.truncated for episode in done])},
            {"token_ids": [_sampled(episode) for episode in episodes], "episodes": done},
        )

    def _new_episodes(self, prompts: Batch, params: protocol.SamplingParams) -> Iterator[Episode]:
        """`params.n` episodes a row. Rows that pad a rank's share repeat a number."""
        limits = self._factory.limits(params.max_new_tokens)
        begun: Counter[int] = Counter()
        for row, key in enumerate(prompts["group_ids"].tolist()):
            ids = list(prompts.columns["prompt_ids"][row])
            for _ in range(params.n):
                yield Episode(key, row, begun[key], self._episodes, limits, ids)
                begun[key] += 1

    def close(self) -> None:
        self._factory.environments.close()
        super().close()


def _sampled(episode: Episode) -> list[int]:
    assert episode.transcript is not None
    turns = episode.transcript.finished()
    return [t for turn in turns for t, own in zip(turn.token_ids, turn.sampled, strict=True) if own]
