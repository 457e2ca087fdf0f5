"""The role of evaluation: completes prompts with a model that nobody trains.

What is asked, and how completions are judged, is in `engine.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from engine.batch import Batch
from engine.config import ParallelConfig, RolloutConfig
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, open_model
from engine.parallel.layout import Layout
from engine.rollout.protocol import (
    RolloutEngine,
    SamplingParams,
    create_engine,
    engine_capabilities,
    engine_options,
)
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import rollout_weights, vllm_weights
from engine.runtime.sharded_model import init_mesh, process_device
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch


class EvaluationWorker(Worker):
    """Decodes with a copy of a model, or with this rank's tensor-parallel shards of one.

    In bfloat16 on a GPU, in float32 on a CPU.
    """

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
        options = {
            "max_num_seqs": 512,
            "max_model_len": max_model_len,
            "kv_cache_memory_mb": None,
            "seed": seed,
        }
        self.engine = self._whole(options) if tp == 1 else self._sharded(options)

    @dispatch(Dispatch.DATA_PARALLEL, pad=True)
    def answer(
        self,
        prompts: Batch,
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> Batch:
        """`params.n` completions a prompt: the column `token_ids`, and which are `truncated`.

        `prompts` has the column `prompt_ids`, and in `group_ids` each one's number among those of
        all ranks, by which its completions are drawn.
        """
        own = replace(params, first_prompt=int(prompts["group_ids"][0]), stop_token_ids=self._stop)
        done = self.engine.generate(list(prompts.columns["prompt_ids"]), own, on_progress)
        truncated = [one.finish_reason == "length" for one in done]
        return Batch(
            {"truncated": torch.tensor(truncated)}, {"token_ids": [one.token_ids for one in done]}
        )

    def close(self) -> None:
        self.engine.close()
        super().close()

    def _whole(self, options: dict[str, int | None]) -> RolloutEngine:
        model = load_model(self._path, self._dtype).eval()
        torch.nn.Module.to(model, process_device())  # in place
        self._stop = stop_token_ids(load_tokenizer(self._path), model.config)
        return create_engine(self._engine_name, model, **options)

    def _sharded(self, options: dict[str, int | None]) -> RolloutEngine:
        context, tp = self.context, self._tp
        parallel = ParallelConfig(dp=context.world_size // tp, tp=tp)
        ranks = init_mesh(Layout.of(parallel), context.rank, context.world_size, context.address)
        model = open_model(self._path, self._dtype).requires_grad_(False)
        policy = PolicyRuntime(model, ranks, parallel)
        rollout = RolloutConfig(engine=self._engine_name, tensor_parallel_size=tp)
        load = partial(load_model, self._path, self._dtype)
        if engine_capabilities(rollout).loads_shards:
            weights = vllm_weights(policy.sharded, rollout, load)
        else:
            weights = rollout_weights(policy.sharded, tp, load)
        policy.init_rollout(self._engine_name, weights, options | engine_options(rollout))
        self._stop = stop_token_ids(load_tokenizer(self._path), weights.model.config)
        return policy.engine
