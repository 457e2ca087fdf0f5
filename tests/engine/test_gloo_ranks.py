"""The ranks of the tests: one that is done keeps its groups until all are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks


def threads_of_the_first() -> list[str]:
    """Of rank 0, which has been done for a while; nothing on rank 0 itself."""
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 0)
    if dist.get_rank() == 0:
        return []
    time.sleep(0.5)
    return [path.read_text() for path in Path(f"/proc/{int(pid)}/task").glob("*/comm")]


def test_a_rank_that_is_done_breaks_no_connection_of_the_others() -> None:
    names = run_ranks(2, threads_of_the_first)[1]
    assert any("gloo" in name for name in names)
