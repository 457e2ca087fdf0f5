"""Optimizer, learning-rate schedule and gradient clipping, for SFT, actor and critic.

Also float32 masters of narrower weights, and loss scaling for float16.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine.checkpoint.state_dict import StateDict
from engine.config import OptimConfig
from engine.errors import CheckpointError, DivergedError
from engine.kernels.training_ops import CompiledAdamW, takes_masters
from engine.parallel import fsdp, gradients
from engine.parallel.module_shards import local_tensor
from engine.parallel.process_groups import Ranks

GROWTH_INTERVAL = 2000  # updates without an overflow until the scale doubles, as torch's GradScaler
LARGEST = 2.0**24


class LossScale:
    """The factor of a float16 loss, by which gradients are divided: small ones must not vanish.

    It halves where gradients overflow, which skips the update, and doubles after `GROWTH_INTERVAL`
    updates in a row (arXiv:1710.03740, section 3.2).
    """

    def __init__(self, value: float = 2.0**16) -> None:
        self.value, self.updates = value, 0

    def grow(self) -> None:
        self.updates += 1
        if self.updates >= GROWTH_INTERVAL:
            self.value, self.updates = min(2 * self.value, LARGEST), 0

    def back_off(self) -> bool:
        """Gradients were not finite: halve; False at 1, where it isn't the scale's fault."""
        if self.value <= 1.0:
            return False
        self.value, self.updates = self.value / 2, 0
        return True

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "updates": float(self.updates)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.updates = float(state["value"]), int(state["updates"])


def update_metrics(norms: Sequence[float], scale: LossScale | None) -> dict[str, float]:
    """`grad_norm`, the mean over updates; with a scale `loss_scale` and `skipped_updates`."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    metrics = {"grad_norm": sum(finite) / len(finite)} if finite else {}
    if scale is not None:
        skipped = float(len(norms) - len(finite))
        metrics |= {"loss_scale": scale.value, "skipped_updates": skipped}
    return metrics


def has_master(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def accumulate_in_float32(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Make backward passes leave float32 gradients in `parameters` of `model`, and add to them.

    FSDP reduces in float32 and stores the parameter's dtype: its gradients are widened then.
    """
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for parameter in parameters:
        if not sharded:
            parameter.grad_dtype = torch.float32
            continue
        parameter.grad_dtype = None  # any
        parameter.register_post_accumulate_grad_hook(_widen)


def _widen(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        parameter.grad = parameter.grad.float()


def make_update_rule(
    config: OptimConfig, stored: Sequence[Tensor], working: Mapping[Tensor, nn.Parameter]
) -> torch.optim.Optimizer:
    """The rule that updates `stored`: masters of the parameters `working`, or the weights.

    Biases, norms and other vectors get no weight decay. AdamW of masters alone is one compiled pass
    where that can be. All are elementwise, so that each rank may update its shards.
    """
    groups: list[dict[str, object]] = [
        {"params": [tensor for tensor in stored if tensor.dim() >= 2]},
        {"params": [tensor for tensor in stored if tensor.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "SGD":
        return torch.optim.SGD(groups, momentum=config.momentum, **options)
    options["betas"] = (config.beta1, config.beta2)
    if config.optimizer == "Adam":
        return torch.optim.Adam(groups, **options)
    if takes_masters(working, len(stored)):
        return CompiledAdamW(groups, working, **options)
    return torch.optim.AdamW(groups, **options)


MASTER = "master"  # among a parameter's moments in a state dict
_OFFLOAD_ELEMENTS = 64 << 20  # parameters whose moments are on the device at a time


class Optimizer:
    """An update rule (`optim.optimizer`) whose schedule advances once an optimizer step.

    Create it after the model's parameters were sharded over `ranks`, which then take every step
    together. With `offload`, moments and masters stay in CPU memory and are on the device only
    while their parameters are updated. `tied_duplicates` are updated, but only another pipeline
    stage's copy of them counts in the gradient norm. A loss of float16 weights is to be multiplied
    by `loss_scale`, if any.
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
        self._with_master = {name for name, p in self._named.items() if has_master(p)}
        self._stored = {name: self._stored_part(name) for name in self._named}
        accumulate_in_float32(model, [self._named[name] for name in self._with_master])
        half = any(p.dtype == torch.float16 for p in self.parameters)
        self.loss_scale = LossScale() if half else None
        working = {self._stored[name]: self._named[name] for name in self._with_master}
        self._rule = make_update_rule(config, list(self._stored.values()), working)
        self._compiled = self._rule if isinstance(self._rule, CompiledAdamW) else None
        # Rules of one kind can go on from each other's state.
        self._kind = "Adam" if config.optimizer == "AdamW" else config.optimizer
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._rule, lambda step: learning_rate_factor(step, total_steps, config)
        )
        self._clip = config.grad_clip
        self.lr = float(self._schedule.get_last_lr()[0])  # of the latest step, or of the first

    def _stored_part(self, name: str) -> Tensor:
        """The tensor that is updated: a master, the parameter, or a view of this rank's shard."""
        # Masters (arXiv:1710.03740, section 3.1) are rounded into the working weights in place: an
        # update below the working dtype's resolution is lost there alone.
        parameter = self._named[name]
        part = local_tensor(parameter)
        if name in self._with_master:
            return part.detach().to(self._resting_device(name), torch.float32, copy=True)
        return part if self._offload or isinstance(parameter, DTensor) else parameter

    def zero_gradients(self) -> None:
        """Set every gradient to 0: the update is that of the moments alone."""
        for parameter in self.parameters:
            parameter.grad = gradients.zero_gradient(parameter)

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters, *self._stored.values()):
            parameter.grad = None

    def step(self) -> float:
        """Clip, update, clear gradients; return the global gradient norm before clipping.

        A norm that is not finite leaves weights, moments and schedule as they were: with a loss
        scale the update is skipped and the scale halved, otherwise, or at a scale of 1,
        DivergedError is raised, on all ranks alike.
        """
        self.lr = float(self._schedule.get_last_lr()[0])
        if self.loss_scale is not None:
            local = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
            torch._foreach_mul_(local, 1.0 / self.loss_scale.value)
        norm = self._clip_gradients()
        if not math.isfinite(norm):
            self.clear_gradients()
            if self.loss_scale is not None and self.loss_scale.back_off():
                return norm
            raise DivergedError(
                f"the gradient norm is {norm}: training has diverged; lower optim.lr "
                f"(now {self.lr:.2e}) or look for bad rewards or data"
            )
        for names in self._parts():
            self._update(names)
        self._schedule.step()
        if self.loss_scale is not None:
            self.loss_scale.grow()
        self.clear_gradients()
        fsdp.reshard(self._model)  # weights that a pass without backward gathered are outdated
        return norm

    def _clip_gradients(self) -> float:
        if self._ranks is not None and self._ranks.mesh is not None:
            duplicates = self._tied_duplicates
            return gradients.clip_grad_norm(self.parameters, self._ranks, self._clip, duplicates)
        if self._compiled is None:
            return float(nn.utils.clip_grad_norm_(self.parameters, self._clip))
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        self._compiled.factor = min(1.0, self._clip / (float(norm) + 1e-6))
        return float(norm)

    def _parts(self) -> Iterator[list[str]]:
        if not self._offload:
            yield list(self._named)
            return
        part, size = list[str](), 0
        for name, stored in self._stored.items():
            if part and size + stored.numel() > _OFFLOAD_ELEMENTS:
                yield part
                part, size = [], 0
            part.append(name)
            size += stored.numel()
        yield part

    def _update(self, names: list[str]) -> None:
        self._move_state(names, to_device=True)
        rounded: list[str] = []
        for name in names:
            parameter, stored = self._named[name], self._stored[name]
            if stored is parameter or parameter.grad is None:
                continue
            if name in self._with_master:
                rounded.append(name)
            else:
                stored.data = local_tensor(parameter)  # it may have been moved since
            stored.grad = local_tensor(parameter.grad)
        self._rule.step()
        if rounded and self._compiled is None:  # which has rounded them itself
            working = [local_tensor(self._named[name]) for name in rounded]
            with torch.no_grad():
                torch._foreach_copy_(working, [self._stored[name] for name in rounded])
        for name in names:
            self._stored[name].grad = None
        if self._offload:
            self._move_state(names, to_device=False)

    def _move_state(self, names: list[str], *, to_device: bool) -> None:
        if self._compiled is not None:
            return  # all of it is in CPU memory
        for name in names:
            stored, device = self._stored[name], local_tensor(self._named[name]).device
            state = self._rule.state.get(stored, {})
            for key, moment in state.items():
                if moment.dim():  # the step count stays
                    state[key] = moment.to(device) if to_device else _to_cpu(moment)
            if name in self._with_master:
                stored.data = stored.to(device) if to_device else _to_cpu(stored)

    def _resting_device(self, name: str) -> torch.device:
        """Where a parameter's moments and master are between steps."""
        return torch.device("cpu") if self._offload else local_tensor(self._named[name]).device

    def state_dict(self) -> StateDict:
        """This rank's moments and masters, by parameter name, and the schedule's step."""
        state = self._rule.state
        moments = {name: dict(state[p]) for name, p in self._stored.items() if p in state}
        for name in self._with_master:
            moments.setdefault(name, {})[MASTER] = self._stored[name]
        scale = {"loss_scale": self.loss_scale.state_dict()} if self.loss_scale else {}
        return {
            "moments": moments,
            "updates": self._schedule.last_epoch,
            "lr": self.lr,
            "kind": self._kind,
        } | scale

    def load_state_dict(self, state: StateDict) -> None:
        """Restore `state_dict`, copying its tensors; learning rates are the configuration's.

        Working weights are not touched, and a master that is not there stays as it is. Raises
        CheckpointError, before anything has changed, for moments of another model or kind of
        optimizer.
        """
        if (kind := state.get("kind", "Adam")) != self._kind:
            raise CheckpointError(
                f"the saved optimizer is {kind} and optim.optimizer is {self._kind}; resume with "
                "the one that was saved, or start again from the saved weights"
            )
        for name, saved in state["moments"].items():
            here = list(self._stored[name].shape) if name in self._stored else None
            there = next(list(moment.shape) for moment in saved.values() if moment.dim())
            if here != there:
                raise CheckpointError(
                    f"the saved optimizer has moments of shape {there} for {name!r}, the model "
                    f"{here or 'no such parameter'}; resume with the model that was saved"
                )
        self._rule.state.clear()
        for name, saved in state["moments"].items():
            stored = self._stored[name]
            near, resting = local_tensor(self._named[name]).device, self._resting_device(name)
            for key, value in saved.items():
                if key != MASTER:
                    copied = value.to(near, copy=True)  # the step count
                    if value.dim():
                        copied = value.to(resting, stored.dtype, copy=True)
                    self._rule.state[stored][key] = copied
                elif name in self._with_master:
                    stored.copy_(value)
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self._schedule.last_epoch = state["updates"]
        rates = [
            base * factor(state["updates"])
            for base, factor in zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._rule.param_groups, rates, strict=True):
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
    if config.warmup_steps is not None:
        warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    left = max(0, total_steps - warmup)
    stable = int(left * config.stable_ratio) if config.schedule == "wsd" else 0
    done = min(1.0, max(0, step - warmup - stable) / max(1, left - stable))
    shape = (1 + math.cos(2 * math.pi * config.num_cycles * done)) / 2
    if config.schedule == "linear":
        shape = 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
