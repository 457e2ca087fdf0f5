"""The random number generators of a process: Python's, NumPy's and torch's own."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from engine.checkpoint.state_dict import StateDict

log = logging.getLogger(__name__)


def process_rng() -> StateDict:
    """The state of all global generators of this process, as a state dict."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: StateDict = {
        "python": {"version": version, "words": _int64(words), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": _int64(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _int64(words: ArrayLike) -> Tensor:
    return torch.from_numpy(np.array(words, dtype=np.int64))


def set_process_rng(state: StateDict) -> None:
    """Restore what `process_rng` gave."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state:
        torch.cuda.set_rng_state_all(device_states(state["cuda"], torch.cuda.device_count()))


def device_states(states: Sequence[Tensor], devices: int) -> list[Tensor]:
    """Copies of the generators' states for `devices` devices, the first ones.

    Warns where more were saved: what drew from the others will draw other numbers.
    """
    if len(states) > devices:
        log.warning(
            "the checkpoint has generators of %d GPUs and this process sees %d; the others are "
            "left out, and what drew from them will draw other numbers",
            len(states),
            devices,
        )
    return [state.clone() for state in states[:devices]]
