"""`torch.cuda` over the pretended device: what torch was not compiled with is put in its place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

TOTAL = 16 << 30  # bytes that the device says it has


class Stream:
    """The one stream: whatever was asked of it has been done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """A point of the stream, always past."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class CUDAGraph:
    """Operations on fixed addresses; `replay` runs them again."""

    key: int | None = None

    def replay(self) -> None:
        assert self.key is not None, "nothing was captured"
        _device().replay(self.key)

    def __del__(self) -> None:
        if self.key is not None:
            _device().forget_graph(self.key)


@contextlib.contextmanager
def graph(into: CUDAGraph, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
    into.key = _device().start_capture()
    try:
        yield
    finally:
        _device().end_capture()


@contextlib.contextmanager
def use(where: Any) -> Iterator[None]:
    """`torch.cuda.stream` and `torch.cuda.device`: there is one of each."""
    yield


def _device() -> Any:
    import pretended_cuda_device

    return pretended_cuda_device


def install() -> None:
    """Put the device behind `torch.cuda`."""
    device = _device()
    draws = device.default_draws()
    said = SimpleNamespace(name="pretended", major=9, minor=0, total_memory=TOTAL)
    values: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "stream": functools.partial(use),
        "device": functools.partial(use),
        "default_generators": (draws,),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda _=None: said.name,
        "get_device_capability": lambda _=None: (said.major, said.minor),
        "get_device_properties": lambda _=None: said,
        "current_stream": lambda _=None: Stream(),
        "default_stream": lambda _=None: Stream(),
        "graph_pool_handle": lambda: (0, 1),
        "memory_allocated": lambda _=None: device.memory_in_use(),
        "memory_reserved": lambda _=None: device.memory_in_use(),
        "max_memory_allocated": lambda _=None: device.memory_peak(),
        "max_memory_reserved": lambda _=None: device.memory_peak(),
        "reset_peak_memory_stats": lambda _=None: device.forget_peak(),
        "mem_get_info": lambda _=None: (TOTAL - device.memory_in_use(), TOTAL),
        "set_per_process_memory_fraction": lambda fraction, _=None: None,
        "manual_seed": draws.manual_seed,
        "manual_seed_all": draws.manual_seed,
        "get_rng_state": lambda _=None: draws.get_state(),
        "get_rng_state_all": lambda: [draws.get_state()],
        "set_rng_state": lambda state, _=None: draws.set_state(state),
        "set_rng_state_all": lambda states: draws.set_state(states[0]),
    }
    for name in ("_lazy_init", "init", "empty_cache", "set_device", "synchronize"):
        values[name] = lambda _=None: None  # one each: torch.compile's rules are by function
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = lambda _: 0  # bitsandbytes looks for it, on import
    on_cpu = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return on_cpu(self, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self.to("cuda")  # type: ignore[method-assign]
