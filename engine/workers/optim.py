"""Optimizer, learning-rate schedule and one clipped step: the same for SFT, actor and critic."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from engine.config import OptimConfig
from engine.errors import CheckpointError, EngineError


class Optimizer:
    """AdamW whose schedule advances once an optimizer step.

    Biases, norms and other vectors get no weight decay.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, total_steps: int) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        matrices = [p for p in self.parameters if p.dim() >= 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        self._adam = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._adam, lambda step: learning_rate_factor(step, total_steps, config)
        )
        self._clip = config.grad_clip
        self.lr = self._next_lr()  # of the latest step; before any, of the first

    def _next_lr(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def zero_gradients(self) -> None:
        """Give every parameter a gradient of 0: an update that nothing pulls at."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """Clip, update, clear gradients; return the global gradient norm before clipping.

        Raises EngineError when the norm is not finite: the weights are left as they were.
        """
        self.lr = self._next_lr()
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self._clip))
        if not math.isfinite(norm):
            self._adam.zero_grad(set_to_none=True)
            raise EngineError(
                f"the gradient norm is {norm}: training has diverged; lower optim.lr "
                f"(now {self.lr:.2e}) or look for bad rewards or data"
            )
        self._adam.step()
        self._schedule.step()
        self._adam.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """AdamW's moments by parameter name and the schedule's step; no copies."""
        adam = self._adam.state
        return {
            "moments": {name: dict(adam[p]) for name, p in self._named.items() if p in adam},
            "updates": self._schedule.last_epoch,
            "lr": self.lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, copying its tensors; rates follow the present configuration.

        Raises CheckpointError, before anything has changed, for moments of another model.
        """
        for name, moments in state["moments"].items():
            wanted = list(self._named[name].shape) if name in self._named else None
            if wanted != list(moments["exp_avg"].shape):
                raise CheckpointError(
                    f"the saved optimizer has moments of shape {list(moments['exp_avg'].shape)} "
                    f"for {name!r}, the model {wanted or 'no such parameter'}; resume with the "
                    "model that was saved"
                )
        self._adam.state.clear()
        for name, moments in state["moments"].items():
            parameter = self._named[name]
            self._adam.state[parameter] = {
                key: torch.empty_like(value, device=parameter.device).copy_(value)
                for key, value in moments.items()
            }
        self._schedule.last_epoch = state["updates"]
        rates = [
            base * factor(state["updates"])
            for base, factor in zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._adam.param_groups, rates, strict=True):
            group["lr"] = rate
        self._schedule._last_lr = rates
        self.lr = state["lr"]


def learning_rate_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """Share of the peak learning rate at `step` (0-based): linear warm-up, then the schedule."""
    warmup = max(1, round(config.warmup_ratio * total_steps)) if config.warmup_ratio > 0 else 0
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
