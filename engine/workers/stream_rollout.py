"""The rollout role of asynchronous RL: completions come and go while it decodes.

Between two of its calls its weights may change; what is being decoded goes on under the new ones,
and every token says which version drew it. Which prompts it gets, and when, is the controller's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.batch import Batch
from engine.config import RolloutConfig
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model
from engine.rollout.protocol import SamplingParams, create_engine
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch
from engine.workers.group_stream import GroupStream
from engine.workers.weights import load_policy


@dataclass(frozen=True, slots=True)
class Pumped:
    """What one call of `pump` leaves."""

    groups: tuple[Batch, ...]  # finished groups, each `rollout.n` rows
    busy: int  # completions that are decoded or wait for a slot, e.g. 61
    version: int  # of the weights that it decodes with now


class StreamRolloutWorker(Worker):
    """Decodes with its own copy of the policy."""

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
    ) -> None:
        super().__init__(context)
        tokenizer = load_tokenizer(model_path)
        policy = load_model(model_path, dtype).eval()
        context.shared |= {"policy": policy, "policy_version": 0}
        self.engine = create_engine(
            config.engine,
            policy,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            kv_cache_memory_mb=config.kv_cache_memory_mb,
            seed=seed,
        )
        params = SamplingParams(
            n=config.n,
            max_new_tokens=max_response_length,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=seed,
            stop_token_ids=stop_token_ids(tokenizer, policy.config),
        )
        pad_token_id = tokenizer.pad_token_id
        self.groups = GroupStream(
            self.engine, params, config, max_model_len=max_model_len, pad_token_id=pad_token_id
        )

    @dispatch(Dispatch.RANK_ZERO)
    def load_weights(self, weights: Batch) -> int:
        """Go on under the actor's weights; return their version."""
        version = load_policy(self.context.shared, weights)
        self.groups.update_weights(version)
        return version

    @dispatch(Dispatch.RANK_ZERO)
    def pump(self, prompts: Batch | None, seconds: float) -> Pumped:
        """Take on `prompts` (one row a group, its key in `group_ids`) and decode for a while.

        Returns after `seconds`, or as soon as nothing is left to decode.
        """
        if prompts is not None:
            self.groups.submit(prompts)
        done: list[Batch] = []
        deadline = time.monotonic() + seconds
        while self.groups.busy and time.monotonic() < deadline:
            done += self.groups.step()
        return Pumped(tuple(done), self.groups.busy, self.groups.version)

    def close(self) -> None:
        self.groups.close()
        self.engine.close()
