"""The rollout role: samples completions with the policy of its process, or with a copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict
from engine.config import LoRAConfig, RolloutConfig
from engine.data.collate import collate_completions, pad_tokens
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.rollout.protocol import SamplingParams, engine_capabilities, engine_options
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import (
    RolloutWeights,
    SharedWeights,
    rollout_weights,
    vllm_weights,
)
from engine.runtime.save_policy import StartModel
from engine.runtime.sharded_model import process_device
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.group_stream import Groups, GroupStream
from engine.workers.stateful import StatefulWorker


@dataclass(frozen=True, slots=True)
class Decoding:
    """How completions are drawn; a temperature of 0 is greedy."""

    n: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    # Of training: the next draw of a policy version. Others leave those as they are.
    draws: Literal["training", "greedy", "validation"] = "training"


GREEDY = Decoding(1, 0.0, draws="greedy")
# Part of a seed: those of training and greedy decoding are as they always were.
_KIND = {"training": 0, "greedy": 1, "validation": 2}


class RolloutWorker(StatefulWorker):
    """Samples with the newest weights of its process's policy.

    In a process without an actor it loads a copy of the policy, which `load_weights` updates.
    """

    ranks_alike = True

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: RolloutConfig,
        max_response_length: int,
        max_model_len: int,
        seed: int,
        dtype: str = "float32",
        lora: LoRAConfig | None = None,
    ) -> None:
        super().__init__(context)
        self.config, self.seed = config, seed
        self.max_response_length, self.max_model_len = max_response_length, max_model_len
        self.tokenizer = load_tokenizer(model_path)

        capabilities = engine_capabilities(config)
        start = StartModel(model_path, dtype, lora, seed)
        # Where something else decodes, a copy only passes weights on: the device is not its.
        elsewhere = capabilities.remote or capabilities.own_processes
        device = torch.device("cpu") if elsewhere else process_device()
        load = partial(start.load_on, device)
        if context.process.policy is None:
            context.process.policy = PolicyRuntime(load(), device=device)
            weights: RolloutWeights = SharedWeights(context.process.policy.module)
        elif capabilities.loads_shards:
            weights = vllm_weights(context.process.policy.sharded, config, load)
        else:
            tp = config.tensor_parallel_size
            weights = rollout_weights(context.process.policy.sharded, tp, load)
        self.policy = context.process.policy
        self.stop = stop_token_ids(self.tokenizer, weights.model.config)
        self._groups: Groups | None = None  # between `begin` and the last `next_part`
        self._left, self._done = 0, list[Batch]()
        self._draws = (-1, 0)  # policy version, and how often it was sampled from
        common = {
            "max_num_seqs": config.max_num_seqs,
            "max_model_len": max_model_len,
            "kv_cache_memory_mb": config.kv_cache_memory_mb,
            "seed": seed,
        }
        self.policy.init_rollout(
            config.engine,
            weights,
            common | engine_options(config),
            sleep_level=capabilities.sleep_level,
        )

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate(self, prompts: Batch) -> Batch:
        """Sample `rollout.n` completions a prompt: `[B·n]` rows in the layout of `engine.batch`."""
        return self._sample(prompts, self._of_training())

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate_greedy(self, prompts: Batch) -> Batch:
        """One greedy completion a prompt (validation, ReMax's baseline)."""
        return self._sample(prompts, GREEDY)

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate_validation(self, prompts: Batch) -> Batch:
        """Completions as `rollout.val_kwargs` says: one greedy one a prompt, or samples."""
        asked = self.config.val_kwargs
        if not asked.do_sample:
            return self._sample(prompts, GREEDY)
        sampling = Decoding(asked.n, asked.temperature, asked.top_k, asked.top_p, "validation")
        return self._sample(prompts, sampling)

    @dispatch(Dispatch.DATA_PARALLEL)
    def begin(self, prompts: Batch) -> Batch:
        """Start prompts whose groups `next_part` returns as they finish."""
        self._groups = self._open_stream()
        self._groups.submit(prompts)
        self._left, self._done = len(prompts), []
        return prompts

    @dispatch(Dispatch.DATA_PARALLEL)
    def next_part(self, parts_left: int) -> Batch:
        """Decode until the next part is finished: 1/`parts_left` of the groups not returned yet."""
        assert self._groups is not None, "begin comes first"
        count = -(-self._left // parts_left)
        while len(self._done) < count:
            self._done += self._groups.step()
        part, self._done = self._done[:count], self._done[count:]
        self._left -= count
        if not self._left:
            self._groups.close()
            self._groups = None
            self.policy.sleep()
        return Batch.concat(part)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_weights(self, weights: Batch) -> int:
        """Load the actor's weights, full or a delta; return their version.

        Raises WeightSyncError where they are needed in full; nothing is sampled until then.
        """
        return self.policy.load_weights(weights)

    def _open_stream(self) -> Groups:
        return GroupStream(
            self.policy.engine,
            self._params(self._of_training()),
            self.config,
            max_model_len=self.max_model_len,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def _of_training(self) -> Decoding:
        own = self.config
        return Decoding(own.n, own.temperature, own.top_k, own.top_p)

    def _params(self, how: Decoding, first_prompt: int = 0) -> SamplingParams:
        """Parameters of the next rollout, with a new seed, after synchronising the weights.

        `first_prompt` is the index of this rank's first prompt among those of all ranks: samples
        must not depend on the number of ranks.
        """
        self.policy.require_synced()
        self.policy.sync_weights()
        version = self.policy.version
        draw = self._draws[1] + 1 if self._draws[0] == version else 0
        if how.draws == "training":
            self._draws = (version, draw)
        return SamplingParams(
            n=how.n,
            max_new_tokens=self.max_response_length,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            seed=hash((self.seed, version, draw, _KIND[how.draws])) & 0x7FFFFFFF,
            stop_token_ids=self.stop,
            first_prompt=first_prompt,
        )

    def _sample(self, prompts: Batch, how: Decoding) -> Batch:
        params = self._params(how, int(prompts["group_ids"][0]))
        done = self.policy.engine.generate(list(prompts.columns["prompt_ids"]), params)
        self.policy.sleep()
        batch = collate_completions(
            prompts,
            [c.prompt_index for c in done],
            [c.token_ids for c in done],
            [c.log_probs for c in done],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        experts = [c.routed_experts for c in done if c.routed_experts is not None]
        if experts:
            batch |= {"routed_experts": pad_tokens(experts, batch["attention_mask"])}
        return batch | {
            "policy_version": torch.tensor([c.policy_version for c in done]),
            "truncated": torch.tensor([c.finish_reason == "length" for c in done]),
        }

    def state_dict(self) -> StateDict:
        """How often this version was sampled from; the weights are the actor's state."""
        return {"draws": list(self._draws)}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore `state_dict`, and let the engine serve the policy's present weights."""
        version, draws = state["draws"]
        self._draws = (version, draws)
        self.policy.sync_weights(force=True)

    def close(self) -> None:
        self.policy.close()
        super().close()
