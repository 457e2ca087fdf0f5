"""AdamW, learning-rate schedule and gradient clipping, for SFT, actor and critic.

On many ranks each updates the shards that it stores, since AdamW is elementwise. Gradients must be
reduced over the ranks before a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config import OptimConfig
from engine.errors import CheckpointError, DivergedError
from engine.parallel import fsdp, gradients
from engine.parallel.module_shards import local_tensor
from engine.parallel.process_groups import Ranks

_OFFLOAD_ELEMENTS = 64 << 20  # parameters whose moments are on the device at a time


class Optimizer:
    """AdamW whose schedule advances once an optimizer step.

    Biases, norms and other vectors get no weight decay. Create it after the model's parameters were
    sharded over `ranks`, which then take every step together. With `offload`, moments stay in CPU
    memory and are on the device only while their parameters are updated. `tied_duplicates` are
    updated, but only another pipeline stage's copy of them counts in the gradient norm.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        total_steps: int,
        ranks: Ranks | None = None,
        *,
        offload: bool = False,
        tied_duplicates: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        fsdp.reshard(model)
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self._tied_duplicates = tied_duplicates
        self._model, self._ranks, self._offload = model, ranks, offload
        self._stored = {name: self._stored_part(p) for name, p in self._named.items()}
        matrices = [p for p in self._stored.values() if p.dim() >= 2]
        vectors = [p for p in self._stored.values() if p.dim() < 2]
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
        self.lr = self._next_lr()  # of the latest step; before the first step, of that

    def _next_lr(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def _stored_part(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that AdamW updates: the parameter, or a view of this rank's shard of it.

        Gradients of views are set group by group, so that only one group's moments are needed.
        """
        view = self._offload or isinstance(parameter, DTensor)
        return local_tensor(parameter) if view else parameter

    def zero_gradients(self) -> None:
        """Set every gradient to 0: the update is that of the moments alone."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter in (*self.parameters, *self._stored.values()):
            parameter.grad = None

    def step(self) -> float:
        """Clip, update, clear gradients; return the global gradient norm before clipping.

        Raises DivergedError, on all ranks alike, when the norm is not finite: the weights are left
        as they were.
        """
        self.lr = self._next_lr()
        norm = self._clip_gradients()
        if not math.isfinite(norm):
            self.clear_gradients()
            raise DivergedError(
                f"the gradient norm is {norm}: training has diverged; lower optim.lr "
                f"(now {self.lr:.2e}) or look for bad rewards or data"
            )
        for names in self._parts():
            self._update(names)
        self._schedule.step()
        self.clear_gradients()
        fsdp.reshard(self._model)  # weights that a pass without backward gathered are outdated
        return norm

    def _clip_gradients(self) -> float:
        if self._ranks is None or self._ranks.mesh is None:
            return float(nn.utils.clip_grad_norm_(self.parameters, self._clip))
        return gradients.clip_grad_norm(
            self.parameters, self._ranks, self._clip, self._tied_duplicates
        )

    def _parts(self) -> Iterator[list[str]]:
        """Names of the parameters that are updated together."""
        if not self._offload:
            yield list(self._named)
            return
        part: list[str] = []
        size = 0
        for name, stored in self._stored.items():
            if part and size + stored.numel() > _OFFLOAD_ELEMENTS:
                yield part
                part, size = [], 0
            part.append(name)
            size += stored.numel()
        if part:
            yield part

    def _update(self, names: list[str]) -> None:
        """Update the parameters `names`: AdamW skips those without a gradient."""
        for name in names:
            parameter, stored = self._named[name], self._stored[name]
            if stored is not parameter and parameter.grad is not None:
                stored.data = local_tensor(parameter)  # it may have been moved since
                stored.grad = local_tensor(parameter.grad)
        self._move_moments(names, to_device=True)
        self._adam.step()
        for name in names:
            self._stored[name].grad = None
        if self._offload:
            self._move_moments(names, to_device=False)

    def offload(self) -> None:
        """Move the moments to CPU memory, e.g. before a rollout; the next step moves them back."""
        self._move_moments(list(self._named), to_device=False)

    def load(self) -> None:
        """Move the moments to the device, unless they stay in CPU memory between steps."""
        if not self._offload:
            self._move_moments(list(self._named), to_device=True)

    def _move_moments(self, names: list[str], *, to_device: bool) -> None:
        for name in names:
            stored = self._stored[name]
            state = self._adam.state.get(stored, {})
            for key, moment in state.items():
                if moment.dim():  # the step count stays
                    state[key] = moment.to(stored.device) if to_device else _to_cpu(moment)

    def state_dict(self) -> dict[str, Any]:
        """AdamW's moments by parameter name and the schedule's step; no copies.

        On many ranks they are the moments of this rank's shards.
        """
        adam = self._adam.state
        return {
            "moments": {name: dict(adam[p]) for name, p in self._stored.items() if p in adam},
            "updates": self._schedule.last_epoch,
            "lr": self.lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, copying its tensors; learning rates are the configuration's.

        Raises CheckpointError, before anything has changed, for moments of another model.
        """
        for name, moments in state["moments"].items():
            wanted = list(self._stored[name].shape) if name in self._stored else None
            if wanted != list(moments["exp_avg"].shape):
                raise CheckpointError(
                    f"the saved optimizer has moments of shape {list(moments['exp_avg'].shape)} "
                    f"for {name!r}, the model {wanted or 'no such parameter'}; resume with the "
                    "model that was saved"
                )
        self._adam.state.clear()
        for name, moments in state["moments"].items():
            stored = self._stored[name]
            self._adam.state[stored] = {
                key: torch.empty_like(value, device=stored.device).copy_(value)
                for key, value in moments.items()
            }
            if self._offload:
                self._move_moments([name], to_device=False)
        self._schedule.last_epoch = state["updates"]
        rates = [
            base * factor(state["updates"])
            for base, factor in zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._adam.param_groups, rates, strict=True):
            group["lr"] = rate
        self._schedule._last_lr = rates
        self.lr = state["lr"]


def _to_cpu(moment: Tensor) -> Tensor:
    if moment.device.type == "cpu":
        return moment
    return torch.empty_like(moment, device="cpu", pin_memory=True).copy_(moment)


def learning_rate_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """Fraction of the peak learning rate at `step` (0-based): linear warm-up, then the schedule."""
    warmup = max(1, round(config.warmup_ratio * total_steps)) if config.warmup_ratio > 0 else 0
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
