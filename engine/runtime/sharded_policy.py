"""A policy on many ranks with the interface of a model on one rank, for training scripts.

`policy_runtime` shards and synchronises it; this module adds `model(ids, labels=…).loss`, full
logits, and after `backward()` gradients averaged over the data-parallel ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import ParallelConfig
from engine.errors import ConfigError, EngineError, RolloutError, StorageError
from engine.models import UnloadedModel, has_adapters, save_policy
from engine.parallel import fsdp, gradients
from engine.parallel.gather import named_tensors
from engine.parallel.layout import Layout
from engine.parallel.module_shards import local_tensor
from engine.parallel.process_groups import Ranks
from engine.parallel.rollout_layout import rollout_layout
from engine.runtime.collective_generate import RolloutPeers
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import rollout_weights
from engine.runtime.sharded_model import process_device


class ShardedPolicy:
    """This rank's shard of a policy, and its peers."""

    def __init__(
        self, policy: PreTrainedModel | UnloadedModel, layout: Layout, rollout_tp: int
    ) -> None:
        """Shard `policy` in place; every rank passes the same one, in full or unloaded.

        Raises ConfigError, on every rank, for a model that can't be sharded so.
        """
        model: PreTrainedModel = policy.module if isinstance(policy, UnloadedModel) else policy
        if has_adapters(model) and rollout_tp > 1:
            raise ConfigError(
                f"hybrid_config's rollout_tp_size={rollout_tp} would shard the policy's adapters, "
                "which are merged into full models; set rollout_tp_size=1"
            )
        self._config = model.config
        # Of a policy with adapters, rollout and files need the full base again.
        self._full = copy.deepcopy(model) if has_adapters(model) else None
        ranks = Ranks.form(layout, process_device().type)
        self.peers = RolloutPeers(
            layout, ranks.rank, rollout_layout(layout, tp=rollout_tp).tp_groups()
        )
        config = ParallelConfig(dp=layout.dp, fsdp=layout.fsdp, tp=layout.tp)
        self.runtime = PolicyRuntime(policy, ranks, config)
        self.module = self.runtime.module
        self._average_gradients()
        if layout.tp > 1:
            mesh, size = ranks.submesh("tp"), self._config.get_text_config().vocab_size
            head: nn.Module = model.get_output_embeddings()
            head.register_forward_hook(partial(_gather_logits, mesh, size))
        self.weights = rollout_weights(self.runtime.sharded, rollout_tp, self._full_policy)

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
        """Free weights that a forward pass without backward gathered."""
        fsdp.reshard(self.module)

    def sync_weights(self) -> None:
        """Synchronise the rollout engine with the newest weights.

        Raises RolloutError on every rank if the exchange failed on any.
        """
        problem: EngineError | None = None
        try:
            self.runtime.sync_weights(force=True)
        except EngineError as error:
            problem = error
        except RuntimeError as error:
            problem = RolloutError(
                f"the weights did not reach the rollout ranks: {error}; restart the ranks"
            )
        self.peers.raise_everywhere(problem)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy full tensors, or a `state_dict` of these ranks, into this rank's shard.

        Raises CheckpointError for full tensors of another model.
        """
        if any(isinstance(tensor, DTensor) for tensor in state.values()):
            self.module.load_state_dict(state)
        else:
            self.runtime.sharded.load_full_tensors(state)
        if self._full is not None:
            self._update_full(self._full)

    def _update_full(self, model: PreTrainedModel) -> None:
        """Copy all weights into the full `model`: rollout refreshes its adapters only."""
        own = named_tensors(model)
        with torch.no_grad():
            for name, tensor in self.runtime.sharded.full_tensors():
                own[name].copy_(tensor)

    def save_pretrained(self, folder: str | Path, **options: object) -> None:
        """Gather the weights and let the first rank write them; all ranks call it together.

        Raises StorageError, on every rank, where the first could not write them.
        """
        first = self.runtime.sharded.ranks.rank == 0
        model = self.runtime.full_model(self._empty)
        problem: EngineError | None = None
        if first:
            try:
                save_policy(model, folder, options)
            except StorageError as error:
                problem = error
        self.peers.raise_everywhere(problem)  # no rank continues before the folder is written

    def _full_policy(self) -> PreTrainedModel:
        assert self._full is not None, "kept for a policy with adapters"
        return self._full

    def _empty(self) -> PreTrainedModel:
        """A full policy whose weights are still to be filled."""
        if self._full is not None:
            return copy.deepcopy(self._full)
        dtype = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            self._config, dtype=dtype, trust_remote_code=False
        )
        return model

    def _average_gradients(self) -> None:
        """Make backward average gradients over data-parallel ranks, as DDP and FSDP do."""
        layout = self.runtime.sharded.ranks.layout
        sharded = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_gradient_divide_factor(float(layout.data_ranks))
        self._finish_backward = layout.tp > 1 or (not sharded and layout.dp > 1)

    def _backward_began(self, _: Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Reduce partial gradients; FSDP has averaged its own by now.

        Averaging an average over replicas changes nothing, so gradients that earlier backward
        passes accumulated in the same tensors stay right.
        """
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
