"""Taking away the names of vLLM's shared memory once all its processes have mapped it.

vLLM leaves some of it behind on every exit, and all of it when a process is killed. Memory without
a name ends with its last process.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any


def forget_group_names() -> None:
    """Of this process's tensor parallel group; its first rank does it for all."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.rank_in_group:
        return
    forget_queue_name(group.mq_broadcaster)
    sums = getattr(group.device_communicator, "dist_module", None)
    if (name := getattr(sums, "group_name", None)) is not None:
        for rank in range(group.world_size):
            Path("/dev/shm", f"{name}_{rank}").unlink(missing_ok=True)


def forget_queue_name(queue: Any) -> None:
    """Of one of vLLM's message queues; None is none."""
    buffer = getattr(queue, "buffer", None)
    if buffer is not None:
        with suppress(FileNotFoundError):
            buffer.shared_memory.unlink()
        buffer.is_creator = False  # vLLM would unlink it once more
