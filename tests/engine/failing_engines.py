"""Rollout engines of a user's module that fail on the second share of the prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.errors import RolloutError
from engine.rollout.native.engine import NativeEngine
from engine.rollout.protocol import Completion, SamplingParams, register_engine


@register_engine("refusing")
class Refusing(NativeEngine):
    """Raises."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, **options)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        if params.first_prompt:
            raise RolloutError("the second share can't be decoded")
        return super().generate(prompts, params, on_progress)


@register_engine("dying")
class Dying(Refusing):
    """Ends its process."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        if params.first_prompt:
            os._exit(7)
        return super().generate(prompts, params, on_progress)
