"""Groups of completions that come out of a stream one by one, as batches.

The stream decodes (`engine.rollout.stream`); here are prompts, groups and the layout of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.batch import Batch
from engine.config import RolloutConfig
from engine.data.collate import collate_completions, pad
from engine.rollout.protocol import RolloutEngine, SamplingParams
from engine.rollout.stream import StreamedCompletion, open_stream


class GroupStream:
    """Decodes prompts, `params.n` completions each, and hands over whole groups.

    A prompt's key is its `group_ids`; a key may be used again once its group is out.
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
        self._ended: dict[int, list[StreamedCompletion]] = {}

    @property
    def busy(self) -> int:
        """Completions that are decoded or wait for a slot."""
        return self._stream.in_flight + self._stream.waiting

    @property
    def version(self) -> int:
        """Version of the weights that the next tokens are drawn with."""
        return self._stream.policy_version

    def submit(self, prompts: Batch) -> None:
        """Take on prompts, one row a group."""
        for row, key in enumerate(prompts["group_ids"].tolist()):
            self._prompts[key] = prompts.rows([row])
            self._stream.submit(key, prompts.columns["prompt_ids"][row])

    def step(self) -> list[Batch]:
        """Decode one token a completion; return the groups that are whole now."""
        whole = []
        for item in self._stream.step():
            assert isinstance(item.key, int)
            group = self._ended.setdefault(item.key, [])
            group.append(item)
            if len(group) == self._n:
                whole.append(self._batch(item.key))
        return whole

    def update_weights(self, version: int) -> None:
        """Go on with the policy's weights, which have changed in place."""
        self._stream.update_weights(None, version)

    def close(self) -> None:
        """Stop decoding."""
        self._stream.close()

    def _batch(self, key: int) -> Batch:
        """A finished group in the layout of `engine.batch`, with the versions of its tokens."""
        items = sorted(self._ended.pop(key), key=lambda item: item.completion_index)
        done = [item.completion for item in items]
        versions = [c.token_versions or [c.policy_version] * len(c.token_ids) for c in done]
        fields: dict[str, Any] = {
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
