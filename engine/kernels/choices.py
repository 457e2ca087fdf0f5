"""Which of two implementations of a kernel runs on this machine, decided by timing both once.

The compiled loops of `cpu/` and the library's operations (oneDNN's and MKL's products, by PyTorch)
compute the same. Which is faster depends on the processor and the shape. The first use of a shape
times both in turns and writes the choice to a file beside the compiled ones; later processes read
it, so that a run on this machine repeats bit for bit. The compiled one is kept unless the library
takes less than `_MARGIN` of its time. In the same way the instructions of the compiled loops'
products are chosen. `HYBRIDFLYTE_KERNELS=compiled` or `=library` forces a choice, and
`=AVX512-BF16`, `=FMA` or `=AMX` the compiled loops with these instructions.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine.errors import ConfigError
from engine.kernels import cache_folder, has_tiles, sources_digest

log = logging.getLogger(__name__)

VARIABLE = "HYBRIDFLYTE_KERNELS"
IMPLEMENTATIONS = ("compiled", "library")
INSTRUCTIONS = ("AVX512-BF16", "FMA", "AMX")
_MARGIN = 0.9
_ROUNDS = 3
_LONG_S = 0.2  # of a first round, after which one more is enough
_MOST_ROWS = 512  # of the tensors that are timed

_lock = threading.RLock()
_forced = threading.local()


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured of two implementations of a kernel at a shape, and which one runs since."""

    kernel: str  # e.g. linears
    shape: tuple[int, ...]  # e.g. (512, 256, 256, 64, 64): rows, and sizes of the matrices
    threads: int
    first_ms: float
    second_ms: float
    names: tuple[str, str] = IMPLEMENTATIONS

    def __str__(self) -> str:
        """Say it in one line."""
        times = f"{self.names[0]} {self.first_ms:.3f} ms, {self.names[1]} {self.second_ms:.3f} ms"
        sizes = "x".join(map(str, self.shape))
        return f"{self.kernel} {sizes}, {self.threads}: {times} → {self.name}"

    @property
    def name(self) -> str:
        """The implementation that runs."""
        return self.names[self.second_ms < _MARGIN * self.first_ms]

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled kernel runs, and not the library's operations."""
        return self.name == IMPLEMENTATIONS[0]


def choose(
    kernel: str,
    rows: int,
    sizes: tuple[int, ...],
    run: Callable[[bool, int], object],
    names: tuple[str, str] = IMPLEMENTATIONS,
    *,
    clock: Callable[[], float] = time.perf_counter,
    measured: bool = False,
) -> Choice:
    """Return the choice for a shape; at the first use of one `run(first, rows)` is timed.

    Rows are counted in powers of two up to 512; one choice holds for all with the same. A forced
    implementation that isn't one of `names` takes the first, unless it is to be `measured`. `clock`
    may count this thread's CPU seconds. Raises ConfigError for a wrong value of
    HYBRIDFLYTE_KERNELS.
    """
    shape = (min(_MOST_ROWS, 1 << max(4, (rows - 1).bit_length())), *sizes)
    key = (kernel, shape, torch.get_num_threads())
    forced = forced_implementation()
    if forced is not None and not measured:
        is_second = forced == names[1]
        return Choice(*key, first_ms=float(is_second), second_ms=float(not is_second), names=names)
    if (choice := _known().get((*key, names))) is not None:
        return choice
    with _lock:
        _read()
        if (*key, names) not in _known():
            _write(Choice(*key, *_milliseconds(run, shape[0], clock), names))
            _read()  # another process may have been first
        return _known()[(*key, names)]


def all_compiled(choices: Sequence[Choice]) -> bool:
    """Whether several kernels take less time together where all of them are compiled."""
    compiled, library = sum(c.first_ms for c in choices), sum(c.second_ms for c in choices)
    return library >= _MARGIN * compiled


@contextlib.contextmanager
def force(implementation: str) -> Iterator[None]:
    """Run the compiled kernels, or the library's operations, in this thread."""
    before = getattr(_forced, "implementation", None)
    _forced.implementation = implementation
    try:
        yield
    finally:
        _forced.implementation = before


def known_choices() -> list[Choice]:
    """Return what this machine has measured so far, in order."""
    with _lock:
        _read()
        return list(_known().values())


def forced_implementation() -> str | None:
    """Return what this thread or HYBRIDFLYTE_KERNELS forces; ConfigError for an unknown name."""
    forced = getattr(_forced, "implementation", None) or os.environ.get(VARIABLE)
    if forced not in (None, "", *IMPLEMENTATIONS, *INSTRUCTIONS):
        values = ", ".join((*IMPLEMENTATIONS, *INSTRUCTIONS))
        raise ConfigError(f"{VARIABLE} is {forced!r}; set it to one of {values}, or unset it")
    return forced or None


def _milliseconds(
    run: Callable[[bool, int], object], rows: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the least time of the first and of the second implementation, in turns."""

    def seconds(first: bool) -> float:
        begin = clock()
        with torch.no_grad(), _disable_current_modes():  # selective checkpointing counts products
            run(first, rows)
        return clock() - begin

    warm_up = seconds(True) + seconds(False)
    rounds = _ROUNDS if warm_up < _LONG_S else 1
    turns = [(seconds(True), seconds(False)) for _ in range(rounds)]
    first_s, second_s = map(min, zip(*turns, strict=True))
    return round(1e3 * first_s, 4), round(1e3 * second_s, 4)


_Key = tuple[str, tuple[int, ...], int, tuple[str, str]]  # kernel, shape, threads, names


@cache
def _known() -> dict[_Key, Choice]:
    return {}


def _keep(choice: Choice) -> None:
    _known().setdefault((choice.kernel, choice.shape, choice.threads, choice.names), choice)


def _read() -> None:
    """Add what the file has; of two lines of one shape the first holds, in every process."""
    try:
        lines = _file().read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            values = json.loads(line)
            tuples = {name: tuple(values[name]) for name in ("shape", "names")}
            choice = Choice(**values | tuples)
        except (ValueError, TypeError, KeyError):  # cut off by a full disk
            continue
        _keep(choice)


def _write(choice: Choice) -> None:
    """Append a line in one write; where the folder can't be written, this process keeps it."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"{json.dumps(asdict(choice))}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        log.debug("the choice of %s is not kept: %s", choice.kernel, error)
        _keep(choice)


@cache
def _file() -> Path:
    """Return the file of the choices of this processor, these sources and this torch."""
    machine = f"{sources_digest()} {torch.__version__} {processor()}"
    name = hashlib.sha256(machine.encode()).hexdigest()[:20]
    return cache_folder() / f"choices-{name}.jsonl"


def processor() -> str:
    """Return the processor's name and the instructions that matrix products use."""
    name = platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    units = ("AMX",) * has_tiles() + ("AVX512-BF16",) * torch.cpu._is_avx512_bf16_supported()
    return f"{name} ({units[0] if units else 'no bfloat16 products'})"
