"""A policy on many ranks with the interface of a model on one rank, for training scripts."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import ParallelConfig, RolloutConfig
from engine.errors import ConfigError, EngineError, RolloutError
from engine.models import UnloadedModel, has_adapters, save_policy
from engine.parallel import fsdp, gradients
from engine.parallel.layout import Layout, rollout_layout
from engine.parallel.module_shards import local_tensor, named_tensors
from engine.parallel.process_groups import Ranks
from engine.rollout.protocol import Completion, SamplingParams
from engine.runtime.apply_layout import floating_dtype
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import rollout_weights
from engine.runtime.sharded_model import process_device

Prompts = Sequence[Sequence[int]]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutTask:
    prompts: list[Sequence[int]]  # may be empty
    params: SamplingParams  # of the first rank; `first_prompt` numbers the prompts of all ranks
    by_data_index: dict[int, Prompts]  # the prompts of all ranks


class RolloutPeers:
    """All ranks of an actor. Every method is a collective: all ranks call it together.

    Ranks of one data-parallel index (they differ in tp only) pass the same prompts. The ranks of a
    rollout group decode the union of their prompts together; groups with the same union decode a
    part of it each.
    """

    def __init__(self, layout: Layout, rank: int, groups: Sequence[Sequence[int]]) -> None:
        """`groups`: ranks that share matrices in rollout, group by group."""
        self._layout, self._rank = layout, rank
        self._groups = [sorted(group) for group in groups]
        indices = [tuple(sorted({self._data_index(r) for r in group})) for group in self._groups]
        # Groups of the same data indices split one union of prompts; unions are ordered by index.
        self._unions = {u: [g for g, i in enumerate(indices) if i == u] for u in sorted(indices)}
        self._union_of = indices
        self._group = next(g for g, members in enumerate(self._groups) if rank in members)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise a problem of the block on every rank: its own error, else the lowest rank's."""
        problem: EngineError | None = None
        try:
            yield
        except EngineError as error:
            problem = error
        problems: list[EngineError | None] = []
        try:
            problems = self._gather(problem)
        except RolloutError:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        for rank, other in enumerate(problems):
            if other is not None:
                raise other.with_message(f"rank {rank} of {len(problems)}: {other}") from other

    def any_rank(self, flag: bool) -> bool:
        return any(self._gather(flag))

    def scatter(self, prompts: Prompts, params: SamplingParams) -> RolloutTask:
        """What this rank's group decodes; ConfigError, on every rank, where arguments differ."""
        calls = self._gather((list(map(list, prompts)), params))
        by_index, first = self._by_data_index(calls), calls[0][1]
        for rank, (_, other) in enumerate(calls):
            if dataclasses.replace(other, seed=0) != dataclasses.replace(first, seed=0):
                raise ConfigError(
                    f"rank {rank} generates with {other} and rank 0 with {first}; call "
                    "generate with the same arguments on all ranks"
                )
        indices = self._union_of[self._group]
        before = sum(len(by_index[i]) for other in self._unions if other < indices for i in other)
        union = [prompt for i in indices for prompt in by_index[i]]
        groups = self._unions[indices]
        index = groups.index(self._group)
        low, high = (len(union) * i // len(groups) for i in (index, index + 1))
        params = dataclasses.replace(first, first_prompt=first.first_prompt + before + low)
        return RolloutTask(union[low:high], params, by_index)

    def gather(self, task: RolloutTask, done: Sequence[Completion]) -> list[Completion]:
        """The completions of this rank's own prompts, from its own and other groups."""
        union, completions = self._union_of[self._group], list(done)
        if max(map(len, self._unions.values())) > 1:
            leads = self._rank == self._groups[self._group][0]
            by_rank = self._gather(completions if leads else [])
            completions = [c for g in self._unions[union] for c in by_rank[self._groups[g][0]]]
        index, n = self._data_index(self._rank), task.params.n
        before = sum(len(task.by_data_index[i]) for i in union if i < index)
        end = before + len(task.by_data_index[index])
        return [
            dataclasses.replace(completion, prompt_index=i // n)
            for i, completion in enumerate(completions[before * n : end * n])
        ]

    def _by_data_index(self, calls: Sequence[tuple[Prompts, SamplingParams]]) -> dict[int, Prompts]:
        """The prompts of each data index; its ranks must have passed the same."""
        by_index: dict[int, tuple[int, Prompts]] = {}
        for rank, (prompts, _) in enumerate(calls):
            first, known = by_index.setdefault(self._data_index(rank), (rank, prompts))
            if known != prompts:
                raise ConfigError(
                    f"ranks {first} and {rank} share their rows (tp_size={self._layout.tp}) and "
                    "were given different prompts; give both the same"
                )
        return {index: prompts for index, (_, prompts) in by_index.items()}

    def _data_index(self, rank: int) -> int:
        where = self._layout.coordinates(rank)
        return where["dp"] * self._layout.fsdp + where["fsdp"]

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self._layout.world_size
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise RolloutError(
                f"rank {self._rank} of {len(values)} got no answer from the others: {error}; "
                "all ranks must call the actor's methods together. Restart the ranks"
            ) from error
        return values


class ShardedPolicy:
    """This rank's shard of a policy, and its peers.

    Adds to a `PolicyRuntime` `model(ids, labels=…).loss`, full logits, and after `backward()`
    gradients averaged over the data-parallel ranks.
    """

    def __init__(
        self, policy: PreTrainedModel | UnloadedModel, layout: Layout, rollout_tp: int
    ) -> None:
        """Shard `policy` in place; ConfigError, on every rank, for one that can't be."""
        model: PreTrainedModel = policy.module if isinstance(policy, UnloadedModel) else policy
        if has_adapters(model) and rollout_tp > 1:
            raise ConfigError(
                f"hybrid_config's rollout_tp_size={rollout_tp} would shard the policy's adapters, "
                "which are merged into full models; set rollout_tp_size=1"
            )
        self._config = model.config
        # Of a policy with adapters, rollout and files need the full base again.
        self._full: Any = copy.deepcopy(model) if has_adapters(model) else None
        ranks = Ranks.form(layout, process_device().type)
        self.peers = RolloutPeers(
            layout, ranks.rank, rollout_layout(layout, tp=rollout_tp).tp_groups()
        )
        config = ParallelConfig(dp=layout.dp, fsdp=layout.fsdp, tp=layout.tp)
        self.runtime = PolicyRuntime(policy, ranks, config)
        self.module = self.runtime.module
        # Make backward average gradients over data-parallel ranks, as DDP and FSDP do.
        sharded = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for shard in sharded:
            shard.set_gradient_divide_factor(float(layout.data_ranks))
        self._finish_backward = layout.tp > 1 or (not sharded and layout.dp > 1)
        if layout.tp > 1:
            mesh, size = ranks.submesh("tp"), self._config.get_text_config().vocab_size
            head: nn.Module = model.get_output_embeddings()
            head.register_forward_hook(partial(_gather_logits, mesh, size))
        rollout = RolloutConfig(engine="native", tensor_parallel_size=rollout_tp)
        self.weights = rollout_weights(self.runtime.sharded, rollout, lambda: self._full)

    def forward(self, *args: object, **kwargs: object) -> object:
        """The model's output for this rank's rows, with full logits."""
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.reshard()  # no backward pass will
        elif self._finish_backward:
            leaves = pytree.tree_leaves(output)
            watched = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            if watched:
                register_multi_grad_hook(watched, self._backward_began, mode="any")
        return output

    def reshard(self) -> None:
        fsdp.reshard(self.module)

    def sync_weights(self) -> None:
        """Synchronise the rollout engine; RolloutError on every rank if any failed."""
        with self.peers.together():
            try:
                self.runtime.sync_weights(force=True)
            except RuntimeError as error:
                raise RolloutError(
                    f"the weights did not reach the rollout ranks: {error}; restart the ranks"
                ) from error

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy full tensors, or these ranks' `state_dict`; CheckpointError for another model's."""
        if any(isinstance(tensor, DTensor) for tensor in state.values()):
            self.module.load_state_dict(state)
        else:
            self.runtime.sharded.load_full_tensors(state)
        if self._full is not None:  # rollout refreshes its adapters only
            full = named_tensors(self._full)
            with torch.no_grad():
                for name, tensor in self.runtime.sharded.full_tensors():
                    full[name].copy_(tensor)

    def save_pretrained(self, folder: str | Path, **options: object) -> None:
        """Gather the weights and let rank 0 write them; all raise its StorageError."""
        model = self.runtime.full_model(self._empty)
        with self.peers.together():  # no rank continues before the folder is written
            if self.runtime.sharded.ranks.rank == 0:
                save_policy(model, folder, options)

    def _empty(self) -> Any:
        if self._full is not None:
            return copy.deepcopy(self._full)
        dtype, config = floating_dtype(self.module), self._config
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)

    def _backward_began(self, _: Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Reduce partial gradients; FSDP has averaged its own by now."""
        # An average over replicas stays as it is, so what earlier passes accumulated stays right.
        ranks = self.runtime.sharded.ranks
        trained = [p for p in self.module.parameters() if p.requires_grad]
        gradients.redistribute_gradients(trained)
        if not fsdp.shards_weights(ranks) and ranks.layout.dp > 1:
            gradients.all_reduce_gradients(trained, ranks)
            grads = [local_tensor(p.grad) for p in trained if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / ranks.layout.dp)


def _gather_logits(
    mesh: DeviceMesh, vocabulary: int, head: nn.Module, args: object, local: Tensor
) -> Tensor:
    """All ranks' logits concatenated, `[…, V]`; each rank's gradient is that of its own."""
    shape = torch.Size((*local.shape[:-1], vocabulary))
    stride, shard = torch.empty(shape, device="meta").stride(), [Shard(local.dim() - 1)]
    split = DTensor.from_local(local, mesh, shard, run_check=False, shape=shape, stride=stride)
    return split.redistribute(placements=[Replicate()]).to_local()
