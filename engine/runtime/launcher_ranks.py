"""The ranks that a launcher such as torchrun started this process with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from engine.errors import ConfigError
from engine.parallel.process_groups import init_process_group

RENDEZVOUS_TIMEOUT_S = 120.0


def init_from_launcher() -> tuple[int, int]:
    """Initialise the process group of this launch; return the world size and the local world size.

    Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) the default process group
    is created unless there is one. Raises ConfigError for an incomplete environment and WorkerError
    if other ranks don't connect.
    """
    world_size = _whole_number("WORLD_SIZE", 1)
    if not dist.is_initialized() and world_size > 1:
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise ConfigError(
                f"the environment has WORLD_SIZE={world_size} and no {', '.join(missing)}; start "
                "the program with torchrun, or unset WORLD_SIZE for one rank"
            )
        if torch.cuda.is_available():
            torch.cuda.set_device(_whole_number("LOCAL_RANK", 0) % torch.cuda.device_count())
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        init_process_group(address, _whole_number("RANK", 0), world_size, RENDEZVOUS_TIMEOUT_S)
    if not dist.is_initialized():
        return 1, 1
    world_size = dist.get_world_size()
    return world_size, _whole_number("LOCAL_WORLD_SIZE", world_size)


def _whole_number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text or default)
    except ValueError:
        raise ConfigError(
            f"the environment has {name}={text!r}, which is no whole number; start the program "
            "with torchrun, or unset it"
        ) from None
