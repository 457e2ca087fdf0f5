"""What switching between training and rollout costs: measured time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import ConfigError
from engine.runtime.hybrid_actor import HybridActor

Mode = Literal["train", "rollout", "eval"]


def measure_switch_overhead(
    actor: HybridActor, mode: Mode = "train", repeats: int = 9
) -> dict[str, float]:
    """Switch `actor` into `mode` (eval is another name of rollout) `repeats` times and return what
    one switch costs.

    `latency_ms` is the median time until the first token, or the first training forward, can be
    computed; each switch to "rollout" comes after a write to every weight, as an optimizer step
    makes. `mem_increase_mb` (10⁶ bytes) is what one switch allocates: on a GPU the peak above the
    level before, elsewhere the sum of all new tensor storage, of which nothing is subtracted.
    `latency_min_ms` is the fastest, which other work on the machine disturbs least, and
    `received_mb` what one switch brought to this rank from others; 0 where storage is shared.
    All ranks of an actor call it together.

    Weights keep their bits and the actor its mode; its policy version rises. Raises ConfigError
    for another mode, or fewer than one repeat.
    """
    if mode not in ("train", "rollout", "eval"):
        raise ConfigError(f"mode={mode!r} is unknown; use 'train', or 'rollout' ('eval')")
    mode = "rollout" if mode == "eval" else mode
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} measures nothing; use 1 or more")
    switch: Callable[[], object] = actor.to_rollout if mode == "rollout" else actor.train
    before = actor.training
    times = []
    actor.refresh()
    try:
        for _ in range(repeats + 1):  # the first one warms up
            _leave(actor, mode)
            times.append(_timed(switch, actor.device))
        _leave(actor, mode)
        allocated = _allocated(switch, actor.device)
    finally:
        actor.train(before)
    return {
        "latency_ms": 1e3 * statistics.median(times[1:]),
        "latency_min_ms": 1e3 * min(times[1:]),
        "mem_increase_mb": allocated / 1e6,
        "received_mb": actor.received_bytes / 1e6 if mode == "rollout" else 0.0,
    }


def _leave(actor: HybridActor, mode: Mode) -> None:
    """Bring the actor into the other mode."""
    if mode == "train":
        actor.to_rollout()
        return
    actor.train()
    with torch.no_grad():
        weights: list[Tensor] = [p for p in actor.parameters() if p.is_floating_point()]
        torch._foreach_mul_(weights, 1.0)  # a write to each that changes no bit


def _timed(switch: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    switch()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(switch: Callable[[], object], device: torch.device) -> int:
    """Bytes that `switch` allocates for tensors."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        switch()
        return torch.cuda.max_memory_allocated(device) - before
    with StorageCounter() as counter:
        switch()
    return counter.bytes


class StorageCounter(TorchDispatchMode):
    """Sums the sizes of the storages that operators create while it is active, freed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:  # it comes back here with the local tensors that it stands for
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        known = {_address(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in known:
                known.add(_address(tensor))
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
