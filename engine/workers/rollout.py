"""The rollout role: samples completions from the policy that shares its process."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.config import RolloutConfig
from engine.data.collate import collate_completions
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.rollout.protocol import SamplingParams, create_engine
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch


class RolloutWorker(Worker):
    """Samples with the process's `policy`; takes its newest weights before every call."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: RolloutConfig,
        max_response_length: int,
        max_model_len: int,
        seed: int,
    ) -> None:
        super().__init__(context)
        self.config, self.seed = config, seed
        self.max_response_length = max_response_length
        self.tokenizer = load_tokenizer(model_path)
        policy = context.shared["policy"]
        self.stop = stop_token_ids(self.tokenizer, policy.config)
        self._draws = (-1, 0)  # policy version, and how often it was sampled from
        self.engine = create_engine(
            config.engine,
            policy,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            kv_cache_memory_mb=config.kv_cache_memory_mb,
            seed=seed,
        )

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate(self, prompts: Batch) -> Batch:
        """Sample `rollout.n` completions a prompt: `[B·n]` rows in the layout of `engine.batch`."""
        return self._sample(prompts, self.config.n, self.config.temperature)

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate_greedy(self, prompts: Batch) -> Batch:
        """One greedy completion a prompt (validation, ReMax's baseline)."""
        return self._sample(prompts, 1, 0.0)

    def _sample(self, prompts: Batch, n: int, temperature: float) -> Batch:
        shared = self.context.shared
        version = shared["policy_version"]
        if self.engine.policy_version != version:
            self.engine.update_weights(shared["policy"], version)
        greedy = temperature == 0.0
        draw = self._draws[1] + 1 if self._draws[0] == version else 0
        self._draws = self._draws if greedy else (version, draw)
        params = SamplingParams(
            n=n,
            max_new_tokens=self.max_response_length,
            temperature=temperature,
            top_k=0 if greedy else self.config.top_k,
            top_p=1.0 if greedy else self.config.top_p,
            seed=hash((self.seed, version, draw, self.context.rank)) & 0x7FFFFFFF,
            stop_token_ids=self.stop,
        )
        done = self.engine.generate(list(prompts.columns["prompt_ids"]), params)
        batch = collate_completions(
            prompts,
            [c.prompt_index for c in done],
            [c.token_ids for c in done],
            [c.log_probs for c in done],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return batch | {
            "policy_version": torch.tensor([c.policy_version for c in done]),
            "truncated": torch.tensor([c.finish_reason == "length" for c in done]),
        }

    def close(self) -> None:
        self.engine.close()
