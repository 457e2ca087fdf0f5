"""A policy on many ranks that is called as it is on one: forward, backward, weights for rollout.

The layout of ranks is in `sharded_model`, what an exchange sends in `rollout_weights`; what is
added here is what an ordinary training script expects of a model: `model(ids, labels=…).loss`,
whole logits, and after `backward()` gradients averaged over the ranks that had rows of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import ParallelConfig
from engine.errors import ConfigError, EngineError, RolloutError, StorageError
from engine.models import has_adapters, save_policy
from engine.parallel import fsdp, gradients
from engine.parallel.gather import named_tensors
from engine.parallel.grouping import grouping
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.collective_generate import RolloutPeers
from engine.runtime.rollout_weights import ReshardedWeights, RolloutWeights, mount
from engine.runtime.sharded_model import ShardedModel, device
from engine.weight_transfer.policy_weights import gathered


class ShardedPolicy:
    """This rank's part of a policy, and its place among the ranks."""

    def __init__(self, policy: PreTrainedModel, layout: Layout, rollout_tp: int) -> None:
        """Shard `policy`, in place; every rank brings it whole and alike.

        Raises ConfigError, on every rank, for a model that can't be sharded so.
        """
        if has_adapters(policy) and rollout_tp > 1:
            raise ConfigError(
                f"hybrid_config's rollout_tp_size={rollout_tp} would cut the policy's adapters, "
                "which are merged into whole models; set rollout_tp_size=1"
            )
        self._config = policy.config
        # Adapters are small and their base is not: rollout and files need a whole base again.
        self._whole = copy.deepcopy(policy) if has_adapters(policy) else None
        ranks = Ranks.form(layout, device().type)
        self.peers = RolloutPeers(layout, ranks.rank, grouping(layout, tp=rollout_tp).tp_groups())
        config = ParallelConfig(dp=layout.dp, fsdp=layout.fsdp, tp=layout.tp)
        self._sharded = ShardedModel(policy, ranks, config)
        self.module: Any = self._sharded.module
        self._average_gradients()
        if layout.tp > 1:
            mesh, size = ranks.submesh("tp"), self._config.get_text_config().vocab_size
            head: Any = policy.get_output_embeddings()
            head.register_forward_hook(partial(_gather_logits, mesh, size))
        self.mount: RolloutWeights = mount(self._sharded, rollout_tp, copy=lambda: self._whole)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's rows, logits whole."""
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
        """Drop weights that a forward pass gathered and whose backward pass has not come."""
        fsdp.reshard(self.module)

    def refresh(self) -> int:
        """Bring the rollout's weights up to date; returns the bytes that this rank received.

        Raises RolloutError on every rank where the exchange broke on any.
        """
        problem: EngineError | None = None
        try:
            self.mount.refresh()
        except EngineError as error:
            problem = error
        except RuntimeError as error:
            problem = RolloutError(
                f"the weights did not reach the rollout ranks: {error}; start the ranks anew"
            )
        self.peers.raise_everywhere(problem)
        return self.mount.moved.received if isinstance(self.mount, ReshardedWeights) else 0

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy whole tensors, or what `state_dict` gave on these ranks, into this rank's part.

        Raises CheckpointError for whole tensors of another model.
        """
        if any(isinstance(tensor, DTensor) for tensor in state.values()):
            self.module.load_state_dict(state)
        else:
            self._sharded.load_full_tensors(state)
        if self._whole is not None:
            self._renew_base(self._whole)

    def _renew_base(self, model: PreTrainedModel) -> None:
        """Copy everything into the whole `model`, its base too, which `refresh` leaves alone."""
        own = named_tensors(model)
        with torch.no_grad():
            for name, tensor in self._sharded.full_tensors():
                own[name].copy_(tensor)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Gather the weights and let the first rank write them; all ranks call it together.

        Raises StorageError, on every rank, where the first could not write them.
        """
        first = self._sharded.ranks.rank == 0
        model = gathered(self._sharded, self._empty if first else None)
        problem: EngineError | None = None
        if first:
            try:
                save_policy(model, folder, options)
            except StorageError as error:
                problem = error
        self.peers.raise_everywhere(problem)  # the folder is there when any rank goes on

    def _empty(self) -> PreTrainedModel:
        """A whole policy whose weights are to be filled in."""
        if self._whole is not None:
            return copy.deepcopy(self._whole)
        dtype = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        model: PreTrainedModel = AutoModelForCausalLM.from_config(self._config, dtype=dtype)
        return model

    def _average_gradients(self) -> None:
        """See to it that backward leaves the mean over data ranks, as DDP and FSDP do."""
        layout = self._sharded.ranks.layout
        sharded = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_gradient_divide_factor(float(layout.data_ranks))
        self._finish_backward = layout.tp > 1 or (not sharded and layout.dp > 1)

    def _backward_began(self, _: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Sum what is still in parts; FSDP has averaged by now.

        The mean of replicas that hold the mean is itself, so gradients of earlier backward passes,
        accumulated in the same tensors, stay right.
        """
        ranks = self._sharded.ranks
        trained = [p for p in self.module.parameters() if p.requires_grad]
        gradients.settle(trained)
        if not fsdp.shards(ranks) and ranks.layout.dp > 1:
            gradients.sync_replicas(trained, ranks)
            grads = [gradients.local(p.grad) for p in trained if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / ranks.layout.dp)


def _gather_logits(
    mesh: DeviceMesh, vocabulary: int, head: Any, args: Any, local: Tensor
) -> Tensor:
    """All ranks' logits side by side, `[…, V]`; the gradient goes back to each one's own."""
    shape = (*local.shape[:-1], vocabulary)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    split = DTensor.from_local(
        local,
        mesh,
        [Shard(local.dim() - 1)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    whole: Tensor = split.redistribute(placements=[Replicate()]).to_local()
    return whole
