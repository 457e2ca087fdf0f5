"""vLLM over the trainer's own ranks (its external launcher): each runs one shard of the model.

Every rank of a group makes the same engine and gives it the same requests; schedules and draws are
deterministic, so all get the same tokens. A rank that dies leaves its peers waiting in a
collective: the controller must then end the group.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from engine.errors import ConfigError


def check_ranks(groups: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless the default process group has just the ranks of `groups`."""
    count = sum(map(len, groups))
    there = dist.get_world_size() if dist.is_initialized() else 0
    if there != count:
        raise ConfigError(
            f"rank_groups={[list(group) for group in groups]} are {count} ranks, the default "
            f"process group has {there}; create it first (torch.distributed.init_process_group)"
        )


@contextmanager
def launched_by_trainer(groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let vLLM's external launcher find this process's rank, and make `groups` its own.

    vLLM takes adjacent ranks for a group, and torch sorts them, where a rank's place in its group
    is the index of its shard. vLLM also names its shared memory after the launcher's address, which
    is a constant: two jobs on a machine would share it.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.executor import uniproc_executor

    check_ranks(groups)
    rank, order = dist.get_rank(), [rank for group in groups for rank in group]
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0)
    executor = uniproc_executor.ExecutorWithExternalLauncher
    arguments, form = executor._distributed_args, parallel_state.init_model_parallel_group
    new_group = dist.new_group

    def init_in_order(group_ranks: list[list[int]], *rest: object, **options: object) -> object:
        return form([[order[at] for at in group] for group in group_ranks], *rest, **options)

    dist.new_group = partial(new_group, sort_ranks=False)
    executor._distributed_args = lambda _: (f"file:///{names[0]}", rank, _device_index(rank))
    parallel_state.init_model_parallel_group = init_in_order
    try:
        yield
    finally:
        dist.new_group = new_group
        executor._distributed_args = arguments
        parallel_state.init_model_parallel_group = form


def _device_index(rank: int) -> int:
    if torch.cuda.is_available():
        return torch.cuda.current_device()
    return int(os.environ.get("LOCAL_RANK", rank))
