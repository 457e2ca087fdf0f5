"""AdamW of float32 masters as one compiled pass over each: `cpu/adamw.h` of `engine.models`.

The pass scales the gradient and writes the rounded weights, which are passes of their own
otherwise. Its state is that of torch's AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from engine.models import cpu_kernels
from engine.parallel.module_shards import local_tensor


class CompiledAdamW(torch.optim.AdamW):
    """Updates masters and, with them, the bfloat16 parameters that they are masters of."""

    def __init__(
        self,
        groups: Sequence[dict[str, object]],
        working: Mapping[Tensor, nn.Parameter],
        **options: Any,
    ) -> None:
        """`working`: the parameter of each master in `groups`; see `takes_masters`."""
        super().__init__(groups, **options)
        self._working = working
        self.factor = 1.0  # of the next step's gradients

    @torch.no_grad()
    def step(self, closure: object = None) -> Any:
        """Update every master that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            self._update(masters, group)

    def _update(self, masters: Sequence[Tensor], group: dict[str, Any]) -> None:
        by_step = defaultdict[float, list[tuple[Tensor, ...]]](list)
        for master in masters:
            assert master.grad is not None
            gradient, state = master.grad.float().contiguous(), self._state_of(master)
            state["step"] += 1
            moments, working = (state["exp_avg"], state["exp_avg_sq"]), self._working[master]
            every = (gradient, master, *moments, local_tensor(working))
            by_step[float(state["step"])].append(every)
        beta1, beta2 = group["betas"]
        for step, tensors in by_step.items():
            settings = cpu_kernels.AdamSettings(
                self.factor, group["lr"], beta1, beta2, group["eps"], group["weight_decay"],
                1 - beta1**step, 1 - beta2**step,
            )  # fmt: skip
            cpu_kernels.adamw(settings, tensors)
        increment_version([self._working[master] for master in masters])

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state


def takes_masters(working: Mapping[Tensor, nn.Parameter], count: int) -> bool:
    """Whether all `count` trained tensors are masters that the compiled pass can update."""
    return (
        len(working) == count
        and all(m.device.type == "cpu" and m.is_contiguous() for m in working)
        and all(p.numel() == 0 or cpu_kernels.takes(local_tensor(p)) for p in working.values())
        and cpu_kernels.library() is not None
    )
