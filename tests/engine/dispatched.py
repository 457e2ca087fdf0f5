"""Modes that watch torch's operations: which run, and the bytes of what they return."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.references: list[weakref.ref[Any]] = []
        self.now = self.peak = 0

    def add(self, key: int, size: int) -> None:
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self.sizes:
            return

        def gone(reference: object) -> None:
            self.now -= self.sizes.pop(key)

        self.references.append(weakref.ref(storage, gone))
        self.add(key, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which calls it again with local tensors
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return out


class Products(TorchDispatchMode):
    """Counts the matrix products and attentions that run inside it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(kind in func.name() for kind in ("mm", "attention"))
        return func(*args, **(kwargs or {}))
