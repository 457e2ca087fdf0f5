"""The state of a model in training that is sharded over ranks: saved once, loaded under any layout.

Each rank saves the boxes of parameters and moments that it stores and no lower rank has, with
their place in the whole; a rank that loads takes what it stores from whichever ranks saved it. So
dp, fsdp, tp, pp and sp may all differ between the two. Not here: files (`engine.checkpoint`), and
the random generators of the process (`state`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.checkpoint.dcp_metadata import BOXES
from engine.checkpoint.rank_state import RankState
from engine.checkpoint.state_dict import StateDict
from engine.errors import CheckpointError
from engine.models import has_adapters
from engine.parallel import fsdp
from engine.parallel.boxes import Box
from engine.parallel.gather import named_tensors
from engine.parallel.gradients import local
from engine.parallel.module_shards import local_box
from engine.runtime.optimizer import Optimizer
from engine.runtime.sharded_model import ShardedModel
from engine.workers.stateful import StatefulWorker


@dataclass(frozen=True, slots=True)
class _Stored:
    """A parameter or buffer, and this rank's part of it."""

    own_name: str  # in this rank's module, e.g. "model.layers.0.mlp.up_proj.weight"
    name: str  # in the whole model
    shape: tuple[int, ...]  # of the whole
    box: Box  # what this rank has
    tensor: Tensor  # it, live

    @property
    def kind(self) -> str:
        """What the whole is, e.g. "float32 [97, 32]"."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')} {list(self.shape)}"


class ShardedTrainState:
    """Saves and loads a sharded model, its optimizer and the generator of its mini-batches.

    Of a model with adapters only these are saved: the base is its folder's. All ranks call each
    method together.
    """

    def __init__(
        self, sharded: ShardedModel, optimizer: Optimizer, generator: torch.Generator
    ) -> None:
        self._sharded, self._optimizer, self._generator = sharded, optimizer, generator
        self._layout: tuple[set[str], dict[str, str]] | None = None

    def state_dict(self) -> StateDict:
        """Tensors are the live ones; on many ranks those that this one is to save."""
        writes, _ = self._gathered()
        kept = [one for one in self._stored() if one.name in writes]
        optimizer = self._optimizer.state_dict()
        moments = optimizer.pop("moments")
        return {
            "model": {one.name: one.tensor for one in kept},
            BOXES: {
                one.name: {
                    "of": one.kind,
                    "shape": list(one.shape),
                    "offset": list(one.box.offset),
                    "size": list(one.box.size),
                }
                for one in kept
            },
            "moments": {one.name: moments[one.own_name] for one in kept if one.own_name in moments},
            "optimizer": optimizer,
            "rng": {"minibatches": self._generator.get_state()},
        }

    def check(self, saved: Sequence[RankState]) -> None:
        """Raise CheckpointError unless ranks saved a model of these names and shapes, whole."""
        _, kinds = self._gathered()
        _check(_pieces(saved), kinds)

    def load(self, own: RankState, saved: Sequence[RankState]) -> None:
        """Restore what ranks saved, the weights in their own storage, which others may share.

        Raises CheckpointError, before anything has changed, for the state of another model.
        """
        self.check(saved)
        pieces = _pieces(saved)
        stored = list(self._stored())
        moments = {one.own_name: _moments(pieces[one.name], one) for one in stored}
        state = dict(own.get("optimizer"))
        known = {name: value for name, value in moments.items() if value}
        self._optimizer.load_state_dict(state | {"moments": known})
        with torch.no_grad():
            for one in stored:
                _fill(one.tensor, one.box, pieces[one.name], "model", one.name)
        self._generator.set_state(own.get("rng", "minibatches").clone())

    def _stored(self) -> Iterator[_Stored]:
        module = self._sharded.module
        fsdp.reshard(module)
        adapters = has_adapters(module)
        for own_name, tensor in named_tensors(module).items():
            if adapters and not tensor.requires_grad:
                continue
            name = self._sharded.full_name(own_name)
            yield _Stored(own_name, name, tuple(tensor.shape), local_box(tensor), local(tensor))

    def _gathered(self) -> tuple[set[str], dict[str, str]]:
        """Names that this rank is to save, and what all are that there are on any rank."""
        if self._layout is None:
            mine = {one.name: (one.kind, one.box) for one in self._stored()}
            every, rank = [mine], 0
            if self._sharded.ranks.layout.world_size > 1:
                every, rank = [mine] * dist.get_world_size(), dist.get_rank()
                dist.all_gather_object(every, mine)
            before = {(name, box) for theirs in every[:rank] for name, (_, box) in theirs.items()}
            writes = {
                name
                for name, (_, box) in mine.items()
                if box.elements and (name, box) not in before
            }
            kinds = {name: kind for theirs in every for name, (kind, _) in theirs.items()}
            self._layout = writes, kinds
        return self._layout


class TrainingWorker(StatefulWorker):
    """A role whose state is a model in training; another number of ranks may load it."""

    ranks_alike = True
    trained: ShardedTrainState  # set by the role, once its optimizer is there

    def state_dict(self) -> StateDict:
        """Weights, moments and the generator that shuffles mini-batches: this rank's part."""
        return self.trained.state_dict()

    def load_sharded_state(self, own: RankState, saved: list[RankState]) -> None:
        """Restore what all ranks saved, in place: engines that share the weights see it too."""
        self.trained.load(own, saved)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the `state_dict` of a single rank."""
        own = RankState.of(state)
        self.load_sharded_state(own, [own])


@torch.no_grad()
def load_weights(model: nn.Module, saved: Sequence[RankState]) -> None:
    """Fill a whole model, in place, with the weights that all ranks of a role saved.

    Of a model with adapters, these alone. Raises CheckpointError, before anything has changed, for
    the state of another model.
    """
    adapters = has_adapters(model)
    own = [
        _Stored(name, name, tuple(tensor.shape), Box.whole(tensor.shape), tensor)
        for name, tensor in named_tensors(model).items()
        if tensor.requires_grad or not adapters
    ]
    pieces = _pieces(saved)
    _check(pieces, {one.name: one.kind for one in own})
    for one in own:
        _fill(one.tensor, one.box, pieces[one.name], "model", one.name)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a parameter that a rank saved."""

    kind: str  # of the whole
    elements: int  # of the whole
    box: Box
    rank: RankState


def _pieces(saved: Sequence[RankState]) -> dict[str, list[_Piece]]:
    found: dict[str, list[_Piece]] = {}
    for rank in saved:
        for name, it in rank.get(BOXES).items():
            box = Box(tuple(it["offset"]), tuple(it["size"]))
            piece = _Piece(it["of"], math.prod(it["shape"]), box, rank)
            found.setdefault(name, []).append(piece)
    return found


def _check(pieces: dict[str, list[_Piece]], kinds: dict[str, str]) -> None:
    """Raise CheckpointError unless the checkpoint is of this model, whole."""
    for name in sorted(pieces.keys() | kinds.keys()):
        there = pieces[name][0].kind if name in pieces else "missing"
        here = kinds.get(name, "missing")
        if there != here:
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} is {there} there and {here} here; "
                "resume with the model that was saved, or save into another folder"
            )
        covered, elements = sum(p.box.elements for p in pieces[name]), pieces[name][0].elements
        if covered != elements:
            raise CheckpointError(
                f"the checkpoint has {covered} of the {elements} elements of {name!r}; load what "
                "all ranks saved"
            )


def _moments(pieces: list[_Piece], one: _Stored) -> dict[str, Tensor]:
    """AdamW's state of what this rank stores of a parameter; none where none was saved."""
    near = [p for p in pieces if p.box.intersect(one.box)] or pieces[:1]
    known = near[0].rank.get("moments", one.name)
    if not known:
        return {}
    found: dict[str, Tensor] = {}
    for key, value in known.items():
        if value.dim() == 0 or near[0].box == one.box:  # the count of steps
            found[key] = value
        else:
            whole = torch.empty(one.box.size, dtype=value.dtype)
            found[key] = _fill(whole, one.box, near, "moments", one.name, key)
    return found


def _fill(target: Tensor, box: Box, pieces: list[_Piece], *path: str) -> Tensor:
    """Copy what `pieces` have of `box` into `target`, which is it."""
    for piece in pieces:
        common = piece.box.intersect(box)
        if common is not None:
            into = _slices(common, box)
            target[into].copy_(piece.rank.get(*path)[_slices(common, piece.box)])
    return target


def _slices(part: Box, outer: Box) -> tuple[slice, ...]:
    starts = part.start_in(outer, (0,) * len(part.size))
    return tuple(slice(a, a + n) for a, n in zip(starts, part.size, strict=True))


def weights_fingerprint(model: nn.Module) -> str:
    """Tells the weights that training starts from apart from others, by a few values of each.

    Adapters aside, which are new or their folder's. To be asked before the first step.
    """
    found = hashlib.sha256()
    for name, tensor in model.named_parameters():
        if ".lora_" not in name and tensor.numel():
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // 64)].contiguous()
            found.update(name.encode() + some.cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
