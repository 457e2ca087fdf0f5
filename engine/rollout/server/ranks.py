"""One server for all ranks of a trainer: rank 0 brings the weights, and all hear how that went."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from engine.errors import RolloutError
from engine.rollout.server.weights import WeightHook
from engine.rollout.vllm.sources import merged_weights


class Deliverer:
    """Uses a hook on rank 0 of the default process group, or in this process if there is none.

    All ranks make it together and deliver together.
    """

    def __init__(self, hook: WeightHook, timeout_s: float) -> None:
        self._hook = hook
        self._closed = False
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # A group of its own: loading may outlast the deadline of the trainer's, and rank 0's
            # deadline passes first.
            wait = timedelta(seconds=2 * timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=wait)

    def deliver(self, model: nn.Module, version: int) -> None:
        """Return when the server says that it serves `model`'s weights; RolloutError otherwise.

        A model that is spread over the ranks is gathered, parameter by parameter.
        """
        if self._closed:
            raise RolloutError("the engine was closed; create it anew")
        weights = merged_weights(model)
        if self._group is None:
            self._hook.deliver(weights, model, version)
            return
        outcome: list[Any] = [None, ""]  # the tag, or what went wrong
        if dist.get_rank() == 0:
            try:
                self._hook.deliver(weights, model, version)
                outcome[0] = self._hook.tag
            except Exception as error:  # of any kind: the other ranks wait to be told
                outcome[1] = f"{error}" or type(error).__name__
        for _ in weights:
            pass  # takes part in the gathers that are left
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is None:
            raise RolloutError(f"{outcome[1]}")
        self._hook.tag = outcome[0]

    def close(self) -> None:
        """Give this rank's part of the group back, if there is one; safe to call twice."""
        self._closed = True
        group, self._group = self._group, None
        if group is not None:
            with suppress(ValueError):  # it ended with the default group
                dist.destroy_process_group(group)
