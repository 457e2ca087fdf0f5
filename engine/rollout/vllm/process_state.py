"""Restoring this process's state after vLLM has started in it; its children don't run `__main__`.

vLLM in process replaces `torch.set_num_threads`, reseeds every global generator, writes environment
variables that children would inherit, and logs thousands of lines.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine's cores are not vLLM's alone
}
WORKER_MARK = "HYBRIDFLYTE_VLLM_WORKER"  # set in vLLM's worker processes
_WORKER_SETTINGS = {
    WORKER_MARK: "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # only there a worker says why it can't start
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def set_for_workers(threads: int) -> None:
    """Set the environment that worker processes inherit; call it in a block of `unchanged`."""
    os.environ.update(_WORKER_SETTINGS | {"OMP_NUM_THREADS": str(threads)})


@contextmanager
def unchanged() -> Iterator[None]:
    """After the block restore environment, random states, threads, log levels and warnings."""
    environment = dict(os.environ)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update(_SETTINGS)
    try:
        with warnings.catch_warnings(), _silenced("vllm"):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        if device_states:
            torch.cuda.set_rng_state_all(device_states)
        np.random.set_state(states[1])
        random.setstate(states[2])
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Let a library log nothing while it starts, and nothing short of critical from then on.

    Its failures are raised as errors. A level that the user has set is kept.
    """
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before if before != logging.NOTSET else logging.CRITICAL)


@contextmanager
def no_request_proxies() -> Iterator[None]:
    """Hide modules that have Flask's request proxies while vLLM starts.

    vLLM inspects every object of every module, and such a proxy raises outside a request. Flask
    comes with MLflow.
    """
    hidden: dict[str, ModuleType] = {}
    werkzeug = sys.modules.get("werkzeug.local")
    if werkzeug is not None:
        for name, module in list(sys.modules.items()):
            values = list((getattr(module, "__dict__", None) or {}).values())
            if any(type(value) is werkzeug.LocalProxy for value in values):
                hidden[name] = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def inspectable_objects() -> Iterator[None]:
    """Let vLLM's inspection pass objects whose `__dict__` is no dictionary, such as llvmlite's.

    llvmlite comes with numba, which speculation with n-grams loads: no engine could start after it.
    """
    from vllm.triton_utils import dispatcher

    names = vars(dispatcher)
    names["vars"] = _vars
    try:
        yield
    finally:
        del names["vars"]


def _vars(value: object) -> Mapping[str, object]:
    found: object = value.__dict__
    return found if isinstance(found, Mapping) else {}


@contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection, which would walk over vLLM's many imported objects."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep a user's script out of worker processes: a spawned child would run it once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
