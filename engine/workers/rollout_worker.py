"""The rollout role: samples completions with the policy of its process, or with a copy of it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict
from engine.config import LoRAConfig, RolloutConfig
from engine.data.collate import collate_completions, pad, pad_tokens
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.errors import RolloutError
from engine.rollout import protocol
from engine.rollout.stream import (
    Begun,
    PartialCompletion,
    PartialGroup,
    PartialRequest,
    RolloutStream,
    StreamedCompletion,
    open_stream,
    take_partial_groups,
    with_partial_groups,
)
from engine.runtime.policy_runtime import PolicyRuntime, StartModel
from engine.runtime.rollout_weights import RolloutWeights, SharedWeights, rollout_weights
from engine.runtime.sharded_model import process_device
from engine.weight_transfer import BroadcastRound
from engine.workers.role import Dispatch, StatefulWorker, WorkerContext, dispatch


class Groups(ABC):
    """Samples groups as they come: completions (`GroupStream`), or episodes (`EpisodeGroups`).

    A prompt's key is its `group_ids`; a key may be reused once its group was returned.
    """

    resumable = True  # whether `unfinished` has all that was sampled

    def __init__(self, stream: RolloutStream, n: int, pad_token_id: int) -> None:
        self._stream, self._n, self._pad = stream, n, pad_token_id
        self._prompts: dict[int, Batch] = {}

    @property
    @abstractmethod
    def busy(self) -> int:
        """Completions or episodes that are sampled, wait for a slot, or wait to be returned."""

    @property
    def full(self) -> bool:
        """Whether a whole group waits: the engine has no room for what it was given."""
        return self._stream.waiting >= self._n

    @property
    def version(self) -> int:
        """Version of the weights that sample the next tokens."""
        return self._stream.policy_version

    @abstractmethod
    def submit(self, prompts: Batch) -> None:
        """Add prompts, one row per group; continue their partial groups, or raise RolloutError."""

    @abstractmethod
    def partial_groups(self) -> Mapping[int, Begun]:
        """Copies of all unfinished groups, by key; sampling continues."""

    @abstractmethod
    def step(self) -> list[Batch]:
        """Decode one token of each completion or turn; return the groups that are finished now."""

    def unfinished(self) -> list[Batch]:
        """Prompts of unfinished groups, a row each, with what was sampled; `submit` takes them."""
        partial = self.partial_groups()
        prompts = self._prompts.items()
        return [with_partial_groups(prompt, [partial.get(key)]) for key, prompt in prompts]

    def update_weights(self, version: int) -> None:
        """Continue with the policy's weights, which have changed in place."""
        self._stream.update_weights(None, version)

    def close(self) -> None:
        self._stream.close()


class GroupStream(Groups):
    def __init__(
        self,
        engine: protocol.RolloutEngine,
        params: protocol.SamplingParams,
        config: RolloutConfig,
        *,
        max_model_len: int,
        pad_token_id: int,
    ) -> None:
        stream = open_stream(
            engine,
            params,
            max_num_seqs=max(config.max_num_seqs, params.n),
            longest_prompt=max_model_len - params.max_new_tokens,
            **config.stream_options,
        )
        super().__init__(stream, params.n, pad_token_id)
        self._finished: dict[int, list[StreamedCompletion]] = {}
        self._complete: list[int] = []  # restored groups with all completions finished

    @property
    def busy(self) -> int:
        return self._stream.in_flight + self._stream.waiting + len(self._complete)

    def submit(self, prompts: Batch) -> None:
        prompts, partial_groups = take_partial_groups(prompts)
        for row, key in enumerate(prompts["group_ids"].tolist()):
            ids, partial = prompts.columns["prompt_ids"][row], partial_groups[row]
            request = None
            if not isinstance(partial, PartialGroup | None):
                raise RolloutError(
                    f"group {key} was saved with episodes; resume with rollout.multi_turn.enable="
                    "true, or begin again"
                )
            if partial is not None:
                request = self._restore(key, list(ids), partial)
            self._prompts[key] = prompts.rows([row])
            if request is None or request.completions:
                self._stream.submit(key, ids, request)
            else:
                self._complete.append(key)

    def partial_groups(self) -> dict[int, PartialGroup]:
        parts: dict[int, list[tuple[PartialCompletion, str]]] = {key: [] for key in self._prompts}
        for unfinished in self._stream.partials():
            assert isinstance(unfinished.key, int)
            parts[unfinished.key] += [(part, "") for part in unfinished.completions]
        for key, items in self._finished.items():
            parts[key] += [(item.part, item.completion.finish_reason) for item in items]
        partial = {}
        for key, pairs in parts.items():
            if len(pairs) == self._n:  # else a failed step still has finished ones to return
                pairs.sort(key=lambda pair: pair[0].completion_index)
                completions, ends = zip(*pairs, strict=True)
                partial[key] = PartialGroup(completions, ends)
        return partial

    def step(self) -> list[Batch]:
        groups = [self._batch(key) for key in self._complete]
        self._complete.clear()
        for item in self._stream.step():
            assert isinstance(item.key, int)
            group = self._finished.setdefault(item.key, [])
            group.append(item)
            if len(group) == self._n:
                groups.append(self._batch(item.key))
        return groups

    def _restore(self, key: int, prompt_ids: list[int], partial: PartialGroup) -> PartialRequest:
        """Add finished completions to their group; return the request for the unfinished ones."""
        if len(partial.completions) != self._n:
            raise RolloutError(
                f"group {key} was saved with {len(partial.completions)} completions and "
                f"rollout.n is {self._n}; resume with the n that was saved"
            )
        pairs = list(zip(partial.completions, partial.finish_reasons, strict=True))
        self._finished[key] = [_streamed(key, part, end) for part, end in pairs if end]
        return PartialRequest(key, prompt_ids, [part for part, end in pairs if not end])

    def _batch(self, key: int) -> Batch:
        """A finished group in the layout of `engine.batch`, with the versions of its tokens."""
        items = sorted(self._finished.pop(key), key=lambda item: item.completion_index)
        done = [item.completion for item in items]
        versions = [list(completion.versions) for completion in done]
        batch = _collate(self._prompts.pop(key), [0] * len(done), done, self._pad)
        return batch | {
            "policy_version": torch.tensor([min(v) for v in versions]),
            "token_versions": pad(versions, 0, side="right"),
        }


def _collate(
    prompts: Batch, rows: list[int], done: list[protocol.Completion], pad_token_id: int
) -> Batch:
    """Completions of the `rows` of prompts, and which of them were cut off."""
    batch = collate_completions(
        prompts,
        rows,
        [c.token_ids for c in done],
        [c.log_probs for c in done],
        pad_token_id=pad_token_id,
    )
    batch |= {"truncated": torch.tensor([c.finish_reason == "length" for c in done])}
    experts = [c.routed_experts for c in done if c.routed_experts is not None]
    if not experts:
        return batch
    if len(experts) < len(done):
        raise RolloutError(
            f"{len(done) - len(experts)} of {len(done)} completions were saved without the experts "
            "of their tokens; resume with the actor.router_replay.mode that they were saved with"
        )
    return batch | {"routed_experts": pad_tokens(experts, batch["attention_mask"])}


def _streamed(key: int, part: PartialCompletion, end: str) -> StreamedCompletion:
    done = protocol.Completion(
        prompt_index=0,
        token_ids=part.token_ids,
        log_probs=part.log_probs,
        finish_reason="stop" if end == "stop" else "length",
        policy_version=min(part.token_versions),
        token_versions=part.token_versions,
        routed_experts=part.routed_experts,
    )
    return StreamedCompletion(key, part.completion_index, done)


Draws = Literal["training", "greedy", "validation"]
# Part of a seed: those of training and greedy decoding are as they always were.
_KIND = {"training": 0, "greedy": 1, "validation": 2}


class RolloutWorker(StatefulWorker):
    """Samples with its process's policy, or with a copy that `load_weights` updates."""

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

        capabilities = protocol.engine_capabilities(config)
        start = StartModel(model_path, dtype, lora, seed)
        # Where something else decodes, a copy only passes weights on: the device is not its.
        elsewhere = capabilities.remote or capabilities.own_processes
        device = torch.device("cpu") if elsewhere else process_device()
        load = partial(start.load_on, device)
        weights: RolloutWeights
        if (policy := context.process.policy) is None:
            context.process.policy = policy = PolicyRuntime(load(), device=device)
            weights = SharedWeights(policy.module)
        else:
            weights = rollout_weights(policy.sharded, config, load)
        self.policy = policy
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
            common | protocol.engine_options(config),
            sleep_level=capabilities.sleep_level,
        )

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate(self, prompts: Batch) -> Batch:
        """`rollout.n` completions a prompt: `[B·n]` rows in the layout of `engine.batch`."""
        return self._sample(prompts, "training")

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate_greedy(self, prompts: Batch) -> Batch:
        """One greedy completion a prompt (validation, ReMax's baseline)."""
        return self._sample(prompts, "greedy")

    @dispatch(Dispatch.DATA_PARALLEL)
    def generate_validation(self, prompts: Batch) -> Batch:
        """Completions as `rollout.val_kwargs` says: one greedy one a prompt, or samples."""
        return self._sample(prompts, "validation")

    @dispatch(Dispatch.DATA_PARALLEL)
    def begin(self, prompts: Batch) -> Batch:
        """Start prompts whose groups `next_part` returns as they finish."""
        self._groups = self._open_groups(self._params("training"))
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
        """Load weights, full or a delta; return their version, or raise WeightSyncError."""
        return self.policy.load_weights(weights)

    def _open_groups(self, params: protocol.SamplingParams) -> Groups:
        return GroupStream(
            self.policy.engine,
            params,
            self.config,
            max_model_len=self.max_model_len,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def _params(self, draws: Draws, first_prompt: int = 0) -> protocol.SamplingParams:
        """Parameters of the next rollout, whose draws don't depend on the number of ranks."""
        self.policy.require_synced()
        self.policy.sync_weights()
        if draws == "validation" and not self.config.val_kwargs.do_sample:
            draws = "greedy"
        version = self.policy.version
        draw = self._draws[1] + 1 if self._draws[0] == version else 0
        if draws == "training":  # others leave the next draw of this version as it is
            self._draws = (version, draw)
        greedy = protocol.SamplingParams(
            max_new_tokens=self.max_response_length,
            temperature=0.0,
            seed=hash((self.seed, version, draw, _KIND[draws])) & 0x7FFFFFFF,
            stop_token_ids=self.stop,
            first_prompt=first_prompt,
        )
        if draws == "greedy":
            return greedy
        how = self.config.val_kwargs if draws == "validation" else self.config
        return replace(
            greedy, n=how.n, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p
        )

    def _sample(self, prompts: Batch, draws: Draws) -> Batch:
        params = self._params(draws, int(prompts["group_ids"][0]))
        done = self.policy.engine.generate(list(prompts.columns["prompt_ids"]), params)
        self.policy.sleep()
        rows, pad_token_id = [c.prompt_index for c in done], self.tokenizer.pad_token_id
        batch = _collate(prompts, rows, done, pad_token_id)
        return batch | {"policy_version": torch.tensor([c.policy_version for c in done])}

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


@dataclass(frozen=True, slots=True)
class PollResult:
    groups: tuple[Batch, ...]  # finished groups, each `rollout.n` rows
    busy: int  # completions that are decoded or wait for a slot, e.g. 61
    version: int  # of the weights that it decodes with now
    full: bool = False  # a whole group waits for room in the engine
    partial_groups: Mapping[int, Begun] | None = None  # unfinished ones by key, on request
    apart: tuple[Batch, ...] = ()  # finished groups of `begin_apart`


class StreamRolloutWorker(RolloutWorker):
    """A rollout role with its own copy of the policy that decodes continuously.

    Between two calls its weights may change; each token has the version that it was sampled under.
    """

    def __init__(self, context: WorkerContext, **options: Any) -> None:
        super().__init__(context, **options)
        self._training = self._params("training")
        self._draws = (-1, 0)  # the stream's is no draw of a version
        self.stream: Groups = self._open_groups(self._training)
        self._apart: tuple[Batch, Draws] | None = None  # to be begun
        self._paused: list[Batch] | None = None  # what the stream had begun; None: it is sampled

    @dispatch(Dispatch.RANK_ZERO)
    def load_weights(self, weights: Batch) -> int:
        """As RolloutWorker's; unfinished completions continue under them."""
        version: int = super().load_weights(weights)
        self.stream.update_weights(version)
        return version

    @dispatch(Dispatch.RANK_ZERO)
    def receive_weights(self, broadcast: BroadcastRound) -> None:
        """Begin to receive a broadcast, beside decoding."""
        engine: Any = self.policy.engine
        engine.receive_weights(broadcast)

    @dispatch(Dispatch.RANK_ZERO)
    def load_received(self, version: int) -> int:
        """Load what was received; unfinished completions continue under it, as policy `version`."""
        engine: Any = self.policy.engine
        engine.load_received(version)
        self.policy.version = version
        return version

    @dispatch(Dispatch.RANK_ZERO)
    def begin_apart(self, prompts: Batch, draws: Draws) -> None:
        """Have `poll` sample `prompts` while the stream's own wait, under the present weights.

        What the stream has begun goes on afterwards; what can't be resumed is finished first.
        """
        self._apart = prompts, draws

    @dispatch(Dispatch.RANK_ZERO)
    def poll(self, prompts: Batch | None, seconds: float, report: bool = False) -> PollResult:
        """Submit `prompts` (one row a group, its key in `group_ids`) and decode for `seconds`.

        Returns sooner if nothing is left to decode; with `report` copies of what isn't whole, too.
        """
        self.policy.require_synced()
        if prompts is not None:
            self.stream.submit(prompts)
        done, apart = list[Batch](), list[Batch]()
        deadline = time.monotonic() + seconds
        while self._begin_or_resume().busy and time.monotonic() < deadline:
            groups = self.stream.step()
            (done if self._paused is None else apart).extend(groups)
        stream = self.stream
        partial_groups = stream.partial_groups() if report else None
        busy = stream.busy + len(self._paused or ()) + (self._apart is not None)
        return PollResult(
            tuple(done), busy, stream.version, stream.full, partial_groups, tuple(apart)
        )

    def _begin_or_resume(self) -> Groups:
        """What is sampled now: prompts apart once they may begin, or the stream once they ended."""
        if self._apart is not None and (self.stream.resumable or not self.stream.busy):
            (prompts, draws), self._apart = self._apart, None
            self._paused = self.stream.unfinished()
            self.stream.close()
            self.stream = self._open_groups(self._params(draws))
            self.stream.submit(prompts)
        elif self._paused is not None and not self.stream.busy:
            paused, self._paused = self._paused, None
            self.stream.close()
            self.stream = self._open_groups(self._training)
            for prompt in paused:
                self.stream.submit(prompt)
        return self.stream

    def close(self) -> None:
        self.stream.close()
        super().close()
