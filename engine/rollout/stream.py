"""Streaming rollout: requests are added and weights change while others are decoded.

The protocol of an engine's stream, and groups of completions that are not finished in a form that
outlives the process decoding them. The scheme is PipelineRL's (arXiv:2509.19128) in-flight weight
update and AReaL's (arXiv:2505.24298) interruptible rollout: a completion may be the work of several
policy versions, and says so token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Literal, NotRequired, Protocol, TypedDict

import torch

from engine.batch import Batch, check_token_ids
from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import Completion, RolloutEngine, SamplingParams

KvOnUpdate = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class StreamedCompletion:
    """A completion that ended, and the request it belongs to."""

    key: Hashable  # of its request, e.g. "epoch0/row17"
    completion_index: int  # place among its request's completions, 0 … n-1
    completion: Completion  # `prompt_index` is the request's number in this stream's submissions

    @property
    def part(self) -> PartialCompletion:
        """Its tokens, as those of an unfinished completion are kept."""
        done = self.completion
        lists = done.token_ids, done.log_probs, done.versions
        index, experts = self.completion_index, done.routed_experts
        return PartialCompletion(index, *lists, routed_experts=experts)


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """A completion, finished or not; the lists have one entry a token, none if not started."""

    completion_index: int  # place among its request's completions, 0 … n-1
    token_ids: list[int]  # sampled so far, e.g. [17, 9]
    log_probs: list[float]  # of each token, under the weights that drew it
    token_versions: list[int]  # policy version that drew each token, e.g. [3, 4]
    routed_experts: torch.Tensor | None = field(default=None, kw_only=True)
    # of a finished one, as in `Completion`


@dataclass(frozen=True, slots=True)
class PartialRequest:
    """Unfinished completions of one request; `submit(key, prompt_ids, resume=…)` continues it."""

    key: Hashable
    prompt_ids: list[int]
    completions: list[PartialCompletion]  # by completion_index; finished ones are not among them


class RolloutStream(Protocol):
    """An open-ended rollout with fixed sampling parameters; not safe for use by two threads.

    A token's sampling noise depends on (seed, key, completion index, position) alone, so arrival
    order, slots, preemption and resumption change no token while the weights stay the same.
    """

    _closed: bool = False

    @property
    def policy_version(self) -> int:
        """Version of the tokens to come."""

    @property
    def in_flight(self) -> int:
        """Completions being decoded."""

    @property
    def waiting(self) -> int:
        """Completions waiting for a slot."""

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        resume: PartialRequest | None = None,
        *,
        max_new_tokens: int | None = None,
        after: Hashable | None = None,
    ) -> None:
        """Queue the `params.n` completions of a prompt, or those that `resume` left unfinished.

        `max_new_tokens` is a limit of this request's own, below `params`' one. `after` is the key
        of an ended request whose prompt and completion this prompt begins with: a stream opened
        with `keep_prefixes` computes only what follows them, if it has kept them. Raises
        RolloutError for a bad prompt or partial and for a key whose request is still open.
        """

    def forget(self, key: Hashable) -> None:
        """Drop what is kept of the ended request `key`: no other request continues it."""
        return

    def cut(self, key: Hashable) -> None:
        """End an open request's completions with their next token, where the engine `cuts`."""
        return

    def step(self) -> list[StreamedCompletion]:
        """Admit waiting completions, decode one token of each; return what ended. Never waits."""

    def update_weights(self, model: torch.nn.Module | None, version: int) -> None:
        """Continue under new weights; None means that those of the same model were changed."""

    def partials(self) -> list[PartialRequest]:
        """Copy all that is unfinished, the oldest request first; decoding is not affected."""

    def close(self) -> None:
        """Drop all that is unfinished; the engine still serves."""

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the stream was closed; open another one by engine.stream")


def check_unused(key: Hashable, unfinished: Container[Hashable]) -> None:
    """Raise RolloutError if `key` is among the keys of `unfinished` requests."""
    if key in unfinished:
        raise RolloutError(
            f"stream key {key!r} is in use by an unfinished request; give each request a key of "
            f"its own, such as (epoch, row)"
        )


def open_stream(engine: RolloutEngine, params: SamplingParams, **options: object) -> RolloutStream:
    """Return `engine.stream(params, **options)`, or raise ConfigError if the engine has none."""
    stream, name = getattr(engine, "stream", None), type(engine).__name__
    if stream is None:
        raise ConfigError(f"{name} decodes whole batches only; use rollout.engine=native")
    opened: RolloutStream = stream(params, **options)
    return opened


def request_limit(max_new_tokens: int | None, limit: int, key: Hashable) -> int:
    """Return a request's own limit, or the stream's if that is lower; RolloutError below 1."""
    if max_new_tokens is None:
        return limit
    if max_new_tokens < 1:
        raise RolloutError(f"request {key!r} has max_new_tokens={max_new_tokens}; give 1 or more")
    return min(max_new_tokens, limit)


def noise_index(key: Hashable) -> int:
    """Return the int64 that stands for `key` in the sampling noise; the same in every process.

    An int is taken as it is, so request i samples what prompt i of `generate` does; another key is
    hashed by its `repr`. Raises RolloutError for a key whose repr holds its address.
    """
    if isinstance(key, int):
        word = (int(key) & (1 << 64) - 1).to_bytes(8, "big")
    elif type(key).__repr__ is object.__repr__:
        raise RolloutError(
            f"stream key {key!r} has no repr of its own, so its samples can't be repeated; use an "
            f"int, a string, a tuple of them, or give {type(key).__name__} a __repr__"
        )
    else:
        word = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(word, "big", signed=True)


def parts_to_sample(
    key: Hashable,
    prompt_ids: Sequence[int],
    resume: PartialRequest | None,
    params: SamplingParams,
    limit: int,
    vocabulary: int,
) -> list[PartialCompletion]:
    """Return a request's completions to sample: `n` without tokens, or those of `resume`.

    `limit`: of a completion, in tokens. RolloutError unless `resume` is unfinished work on it.
    """
    if resume is None:
        return [PartialCompletion(index, [], [], []) for index in range(params.n)]
    where = f"the partial of request {key!r}"
    if list(resume.prompt_ids) != list(prompt_ids):
        raise RolloutError(f"{where} is of another prompt; submit it with its own prompt_ids")
    indices = [part.completion_index for part in resume.completions]
    if not indices or len(set(indices)) < len(indices) or set(indices) - set(range(params.n)):
        raise RolloutError(
            f"{where} has completion indices {indices}; it needs one or more, each once, in 0 … "
            f"n-1 of the stream's n={params.n}"
        )
    for part in resume.completions:
        name = f"completion {part.completion_index} of {where}"
        sizes = len(part.token_ids), len(part.log_probs), len(part.token_versions)
        if len(set(sizes)) > 1:
            counts = "{} tokens, {} log-probs and {} versions".format(*sizes)
            raise RolloutError(f"{name} has {counts}; give one of each a token")
        if sizes[0] >= limit:
            raise RolloutError(
                f"{name} has {sizes[0]} tokens and the stream's completions of it end at {limit}; "
                f"resume it in a stream with a greater max_new_tokens"
            )
        if set(part.token_ids) & set(params.stop_token_ids):
            raise RolloutError(f"{name} holds a stop token, so it has ended; don't resume it")
        check_token_ids(name, [*part.token_ids, prompt_ids[0]], vocabulary)
    return sorted(resume.completions, key=lambda part: part.completion_index)


PARTIAL_GROUP = "partial_group"  # a column of prompts: the unfinished work on each, or None


class Begun(Protocol):
    """Unfinished work on a prompt: a `PartialGroup`, or `engine.agents.PartialEpisodes`."""

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without any token."""

    def tree(self) -> object:
        """Return tensors and plain values, for a checkpoint."""


class PartialGroupTree(TypedDict):
    """A `PartialGroup` in a checkpoint; its tensors concatenate the T tokens of all completions."""

    ends: list[str]  # finish reasons
    lengths: list[int]  # tokens of each completion
    token_ids: torch.Tensor  # [T], int32
    log_probs: torch.Tensor  # [T], float32
    token_versions: torch.Tensor  # [T], int32
    routed_experts: NotRequired[list[torch.Tensor | None]]  # of each completion


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """One prompt's completions so far: tokens with their log-probs and policy versions."""

    completions: tuple[PartialCompletion, ...]  # all `n`, by completion_index; may have no token
    finish_reasons: tuple[str, ...]  # of each: "stop", "length", or "" for an unfinished one

    @property
    def oldest_version(self) -> int | None:
        return min((v for part in self.completions for v in part.token_versions), default=None)

    @staticmethod
    def from_finished(group: Batch) -> PartialGroup:
        """A finished group, as rollout returns it."""
        completions = []
        for row, length in enumerate(group["response_mask"].sum(1).long().tolist()):
            fields = ("responses", "rollout_log_probs", "token_versions")
            values = (group[field][row, :length].tolist() for field in fields)
            experts = None
            if "routed_experts" in group:  # not of the last token, which no pass has read
                experts = group["routed_experts"][row][group["attention_mask"][row].bool()][:-1]
            completions.append(PartialCompletion(row, *values, routed_experts=experts))
        reasons = ("length" if cut else "stop" for cut in group["truncated"].tolist())
        return PartialGroup(tuple(completions), tuple(reasons))

    def tree(self) -> PartialGroupTree:
        parts = self.completions
        return {
            "ends": list(self.finish_reasons),
            "lengths": [len(part.token_ids) for part in parts],
            "token_ids": _concatenated((part.token_ids for part in parts), torch.int32),
            "log_probs": _concatenated((part.log_probs for part in parts), torch.float32),
            "token_versions": _concatenated((part.token_versions for part in parts), torch.int32),
            "routed_experts": [part.routed_experts for part in parts],
        }

    @staticmethod
    def from_tree(tree: PartialGroupTree) -> PartialGroup:
        edges = list(pairwise(accumulate(tree["lengths"], initial=0)))
        tensors = (tree["token_ids"], tree["log_probs"], tree["token_versions"])
        lists = [tensor.tolist() for tensor in tensors]
        experts = tree.get("routed_experts", [None] * len(edges))
        completions = [
            PartialCompletion(i, *(v[start:end] for v in lists), routed_experts=experts[i])
            for i, (start, end) in enumerate(edges)
        ]
        return PartialGroup(tuple(completions), tuple(tree["ends"]))


def with_partial_groups(prompts: Batch, groups: Iterable[Begun | None]) -> Batch:
    """Add a column of their partial groups to `prompts`."""
    return Batch(prompts.as_dict(), {**prompts.columns, PARTIAL_GROUP: list(groups)})


def take_partial_groups(prompts: Batch) -> tuple[Batch, list[Begun | None]]:
    """Split `prompts` into the batch without the column, and the column (all None if absent)."""
    columns = dict(prompts.columns)
    groups = columns.pop(PARTIAL_GROUP, None)
    if groups is None:
        return prompts, [None] * len(prompts)
    return Batch(prompts.as_dict(), columns), list(groups)


def _concatenated(lists: Iterable[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([*chain.from_iterable(lists)], dtype=dtype)
