"""The rollout role: samples completions with the policy of its process, or with a copy of it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.config import LoRAConfig, RolloutConfig
from engine.data.collate import collate_completions
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.models import policy_model
from engine.rollout.protocol import SamplingParams, check_version, create_engine
from engine.runtime.rollout_weights import RolloutWeights, SharedWeights, mount
from engine.runtime.vllm_rollout_weights import vllm_rollout_weights
from engine.weight_transfer.policy_weights import check_weights, load_policy
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.group_stream import GroupStream
from engine.workers.stateful import StatefulWorker


class RolloutWorker(StatefulWorker):
    """Samples with the process's `policy`, whose newest weights every call sees.

    In a process without an actor it makes a copy of its own, which `load_weights` brings up to
    date.
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

        def load() -> PreTrainedModel:
            return policy_model(model_path, dtype, lora, seed)

        if "policy" not in context.shared:
            context.shared |= {"policy": load(), "policy_version": 0}
        self.rollout_weights: RolloutWeights = SharedWeights(context.shared["policy"])
        if "sharded" in context.shared and config.engine == "vllm":
            self.rollout_weights = vllm_rollout_weights(context.shared["sharded"], config, load)
        elif "sharded" in context.shared:
            tp = config.tensor_parallel_size
            self.rollout_weights = mount(context.shared["sharded"], tp, copy=load)
        policy = self.rollout_weights.model
        self.stop = stop_token_ids(self.tokenizer, policy.config)
        self._groups: GroupStream | None = None  # between `begin` and the last `next_part`
        self._left, self._done = 0, list[Batch]()
        self._draws = (-1, 0)  # policy version, and how often it was sampled from
        self.engine = create_engine(
            config.engine,
            policy,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            kv_cache_memory_mb=config.kv_cache_memory_mb,
            seed=seed,
            **self._engine_options(),
        )
        if not self.rollout_weights.engine_options.get("load", True):  # it was made without weights
            self.rollout_weights.sync_weights(self.engine, context.shared["policy_version"])

    def _engine_options(self) -> dict[str, Any]:
        """Options that the configured engine alone has."""
        config = self.config
        if config.engine == "server":
            return dict(config.server)
        if config.engine != "vllm":
            return {}
        own = {name: value for name, value in dict(config.vllm).items() if name != "sleep"}
        return (
            own
            | {"tensor_parallel_size": config.tensor_parallel_size, "dtype": own["dtype"] or None}
            | self.rollout_weights.engine_options
        )

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate(self, prompts: Batch) -> Batch:
        """Sample `rollout.n` completions a prompt: `[B·n]` rows in the layout of `engine.batch`."""
        return self._sample(prompts, self.config.n, self.config.temperature)

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate_greedy(self, prompts: Batch) -> Batch:
        """One greedy completion a prompt (validation, ReMax's baseline)."""
        return self._sample(prompts, 1, 0.0)

    @dispatch(Dispatch.DATA_PARALLEL)
    def begin(self, prompts: Batch) -> Batch:
        """Take on prompts whose groups `next_part` gives out as they are finished."""
        self._groups = self._open_stream()
        self._groups.submit(prompts)
        self._left, self._done = len(prompts), []
        return prompts

    @dispatch(Dispatch.DATA_PARALLEL)
    def next_part(self, parts_left: int) -> Batch:
        """Decode until the next part is there: 1/`parts_left` of the groups not given out yet."""
        assert self._groups is not None, "begin comes first"
        count = -(-self._left // parts_left)
        while len(self._done) < count:
            self._done += self._groups.step()
        part, self._done = self._done[:count], self._done[count:]
        self._left -= count
        if not self._left:
            self._groups.close()
            self._groups = None
        return Batch.concat(part)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_weights(self, weights: Batch) -> int:
        """Take over the actor's weights, whole or a delta; return their version.

        Raises WeightSyncError where they are needed whole; nothing is sampled until they come.
        """
        return load_policy(self.context.shared, weights)

    def _open_stream(self) -> GroupStream:
        return GroupStream(
            self.engine,
            self._params(self.config.n, self.config.temperature),
            self.config,
            max_model_len=self.max_model_len,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def _params(self, n: int, temperature: float, first_prompt: int = 0) -> SamplingParams:
        """Parameters of the next rollout, with fresh draws, under the policy's newest weights.

        `first_prompt` is the place of this rank's first prompt among those of all ranks: what is
        drawn must not depend on how many ranks there are.
        """
        shared = self.context.shared
        check_weights(shared)
        version = shared["policy_version"]
        self._sync_weights(version)
        greedy = temperature == 0.0
        draw = self._draws[1] + 1 if self._draws[0] == version else 0
        self._draws = self._draws if greedy else (version, draw)
        return SamplingParams(
            n=n,
            max_new_tokens=self.max_response_length,
            temperature=temperature,
            top_k=0 if greedy else self.config.top_k,
            top_p=1.0 if greedy else self.config.top_p,
            seed=hash((self.seed, version, draw, greedy)) & 0x7FFFFFFF,
            stop_token_ids=self.stop,
            first_prompt=first_prompt,
        )

    def _sync_weights(self, version: int, again: bool = False) -> None:
        """Let the engine serve policy `version`: weights wake before they are synchronised, the KV
        cache after. `again`: although it holds that version."""
        engine: Any = self.engine
        asleep = self._level > 0 and engine.asleep
        if asleep:
            engine.wake_weights()
        if again or engine.policy_version != version or (asleep and self._level == 2):
            self.rollout_weights.sync_weights(engine, version)
        if asleep:
            engine.wake_kv()
        check_version(engine, version)
        self.rollout_weights.require_intact()

    @property
    def _level(self) -> int:
        """How deep the engine sleeps between rollouts."""
        return self.config.vllm.sleep if self.config.engine == "vllm" else 0

    def _sample(self, prompts: Batch, n: int, temperature: float) -> Batch:
        params = self._params(n, temperature, int(prompts["group_ids"][0]))
        done = self.engine.generate(list(prompts.columns["prompt_ids"]), params)
        if self._level:
            engine: Any = self.engine
            engine.sleep(self._level)
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

    def state_dict(self) -> dict[str, Any]:
        """How often the present policy was sampled from; the weights are the actor's state."""
        return {"draws": list(self._draws)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, and serve the policy as it is now."""
        version, draws = state["draws"]
        self._draws = (version, draws)
        self._sync_weights(self.context.shared["policy_version"], again=True)

    def close(self) -> None:
        self.engine.close()
        super().close()
