"""Collects a stream's completions into groups, and returns finished groups as batches.

`engine.rollout.stream` decodes; this module has the prompts, the groups and the layout of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.batch import Batch
from engine.config import RolloutConfig
from engine.data.collate import collate_completions, pad
from engine.errors import RolloutError
from engine.rollout.partial_groups import Begun, PartialGroup, take_partial_groups
from engine.rollout.protocol import Completion, RolloutEngine, SamplingParams
from engine.rollout.stream import PartialCompletion, PartialRequest, StreamedCompletion, open_stream


class Groups(Protocol):
    """What samples groups as they come: of completions (`GroupStream`), or of episodes."""

    @property
    def busy(self) -> int: ...

    @property
    def full(self) -> bool: ...

    @property
    def version(self) -> int: ...

    def submit(self, prompts: Batch) -> None: ...

    def partial_groups(self) -> Mapping[int, Begun]: ...

    def step(self) -> list[Batch]: ...

    def update_weights(self, version: int) -> None: ...

    def close(self) -> None: ...


class GroupStream:
    """Decodes `params.n` completions of each prompt, and returns finished groups: a `Groups`.

    A prompt's key is its `group_ids`; a key may be reused once its group was returned.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        config: RolloutConfig,
        *,
        max_model_len: int,
        pad_token_id: int,
    ) -> None:
        self._n, self._pad = params.n, pad_token_id
        self._stream = open_stream(
            engine,
            params,
            max_num_seqs=max(config.max_num_seqs, params.n),
            longest_prompt=max_model_len - params.max_new_tokens,
        )
        self._prompts: dict[int, Batch] = {}
        self._finished: dict[int, list[StreamedCompletion]] = {}
        self._complete: list[int] = []  # restored groups with all completions finished

    @property
    def busy(self) -> int:
        """Completions that are being decoded, wait for a slot, or wait to be returned."""
        return self._stream.in_flight + self._stream.waiting + len(self._complete)

    @property
    def full(self) -> bool:
        """Whether a whole group waits: the engine has no room for what it was given."""
        return self._stream.waiting >= self._n

    @property
    def version(self) -> int:
        """Version of the weights that sample the next tokens."""
        return self._stream.policy_version

    def submit(self, prompts: Batch) -> None:
        """Add prompts, one row per group; their partial groups (`PARTIAL_GROUP`) are continued.

        Raises RolloutError for completions of another prompt or another `n`.
        """
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
        """Copies of all unfinished groups, by key; decoding continues."""
        parts: dict[int, list[tuple[PartialCompletion, str]]] = {key: [] for key in self._prompts}
        for partial in self._stream.partials():
            assert isinstance(partial.key, int)
            parts[partial.key] += [(part, "") for part in partial.completions]
        for key, items in self._finished.items():
            parts[key] += [(_part(item), item.completion.finish_reason) for item in items]
        found = {}
        for key, pairs in parts.items():
            pairs.sort(key=lambda pair: pair[0].completion_index)
            if len(pairs) == self._n:  # else a failed step still has finished ones to return
                found[key] = PartialGroup(
                    tuple(p for p, _ in pairs), tuple(end for _, end in pairs)
                )
        return found

    def step(self) -> list[Batch]:
        """Decode one token per completion; return the groups that are finished now."""
        groups = [self._batch(key) for key in self._complete]
        self._complete.clear()
        for item in self._stream.step():
            assert isinstance(item.key, int)
            group = self._finished.setdefault(item.key, [])
            group.append(item)
            if len(group) == self._n:
                groups.append(self._batch(item.key))
        return groups

    def update_weights(self, version: int) -> None:
        """Continue with the policy's weights, which have changed in place."""
        self._stream.update_weights(None, version)

    def close(self) -> None:
        """Stop decoding."""
        self._stream.close()

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
        versions = [c.token_versions or [c.policy_version] * len(c.token_ids) for c in done]
        fields: dict[str, torch.Tensor] = {
            "policy_version": torch.tensor([min(v) for v in versions]),
            "token_versions": pad(versions, 0, side="right"),
            "truncated": torch.tensor([c.finish_reason == "length" for c in done]),
        }
        batch = collate_completions(
            self._prompts.pop(key),
            [0] * len(done),
            [c.token_ids for c in done],
            [c.log_probs for c in done],
            pad_token_id=self._pad,
        )
        return batch | fields


def _part(item: StreamedCompletion) -> PartialCompletion:
    done = item.completion
    versions = done.token_versions or [done.policy_version] * len(done.token_ids)
    return PartialCompletion(item.completion_index, done.token_ids, done.log_probs, versions)


def _streamed(key: int, part: PartialCompletion, end: str) -> StreamedCompletion:
    done = Completion(
        prompt_index=0,
        token_ids=part.token_ids,
        log_probs=part.log_probs,
        finish_reason="stop" if end == "stop" else "length",
        policy_version=min(part.token_versions),
        token_versions=part.token_versions,
    )
    return StreamedCompletion(key, part.completion_index, done)
