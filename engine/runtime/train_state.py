"""The state of a sharded model in training: saved once, loaded under any layout and dtype."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.checkpoint.format import RankState
from engine.checkpoint.state_dict import BOXES, StateDict
from engine.config import OptimConfig
from engine.errors import CheckpointError
from engine.models import UnloadedModel, has_adapters
from engine.parallel import fsdp
from engine.parallel.module_shards import local_box, local_tensor, named_tensors
from engine.parallel.shard_maps import Box
from engine.runtime.optimizer import MASTER, has_master
from engine.runtime.sharded_model import ShardedModel, sharded_optimizer
from engine.storage.weight_files import spread_sample

_FLOATS = ("float32", "bfloat16", "float16")  # weights of one may be loaded as another


@dataclass(frozen=True, slots=True)
class _LocalTensor:
    module_name: str  # in this rank's module, e.g. "model.layers.0.mlp.up_proj.weight"
    name: str  # in the full model
    shape: tuple[int, ...]  # of the full tensor
    box: Box  # this rank's part of it
    tensor: Tensor  # live

    @property
    def kind(self) -> str:
        """The full tensor's dtype and shape, e.g. "float32 [97, 32]"."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')} {list(self.shape)}"

    def description(self) -> StateDict:
        """Which part of which tensor it is, as `_saved_boxes` reads it."""
        offset, size = list(self.box.offset), list(self.box.size)
        return {"of": self.kind, "shape": list(self.shape), "offset": offset, "size": size}


class ShardedTrainState:
    """A sharded model's optimizer and mini-batch generator; all ranks call each method together."""

    def __init__(
        self, sharded: ShardedModel, config: OptimConfig, total_steps: int, seed: int
    ) -> None:
        self.optimizer = sharded_optimizer(sharded, config, total_steps)
        self.generator = torch.Generator().manual_seed(seed)
        self._sharded = sharded
        self._saved_names: tuple[set[str], dict[str, str]] | None = None

    def state_dict(self) -> StateDict:
        writes, _ = self._assign_saves()
        parts = [part for part in self._local_tensors() if part.name in writes]
        optimizer = self.optimizer.state_dict()
        moments = optimizer.pop("moments")
        weights = {part.name: part.tensor for part in parts}
        if self._sharded.offloads:
            with self._sharded.on_device():
                weights = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
        return {
            "model": weights,
            BOXES: {part.name: part.description() for part in parts},
            "moments": {p.name: moments[p.module_name] for p in parts if p.module_name in moments},
            "optimizer": optimizer,
            "rng": {"minibatches": self.generator.get_state()},
        }

    def check(self, saved: Sequence[RankState]) -> None:
        """Raise CheckpointError unless ranks saved all of a model of these names and shapes."""
        _, kinds = self._assign_saves()
        _check(_saved_boxes(saved), kinds)

    def load(self, own: RankState, saved: Sequence[RankState]) -> None:
        """Restore what ranks saved, in place; CheckpointError first, if of another model."""
        self.check(saved)
        boxes = _saved_boxes(saved)
        stored = list(self._local_tensors())
        trained = {name for name, p in self._sharded.module.named_parameters() if p.requires_grad}
        moments = {
            part.module_name: _moments(boxes[part.name], part, trained=part.module_name in trained)
            for part in stored
        }
        state = dict(own.get("optimizer"))
        known = {name: value for name, value in moments.items() if value}
        self.optimizer.load_state_dict(state | {"moments": known})
        with torch.no_grad(), self._sharded.on_device():
            for part in stored:
                _fill_weights(part, boxes[part.name])
        self.generator.set_state(own.get("rng", "minibatches").clone())

    def _local_tensors(self) -> Iterator[_LocalTensor]:
        module = self._sharded.module
        fsdp.reshard(module)
        adapters = has_adapters(module)
        for module_name, tensor in named_tensors(module).items():
            if adapters and not tensor.requires_grad:
                continue
            name = self._sharded.full_name(module_name)
            yield _LocalTensor(
                module_name, name, tuple(tensor.shape), local_box(tensor), local_tensor(tensor)
            )

    def _assign_saves(self) -> tuple[set[str], dict[str, str]]:
        """Names that this rank saves, and dtype and shape of every name on any rank."""
        if self._saved_names is None:
            mine = {part.name: (part.kind, part.box) for part in self._local_tensors()}
            by_rank, rank = [mine], 0
            if self._sharded.ranks.layout.world_size > 1:
                by_rank, rank = [mine] * dist.get_world_size(), dist.get_rank()
                dist.all_gather_object(by_rank, mine)
            before = {(name, box) for parts in by_rank[:rank] for name, (_, box) in parts.items()}
            writes = {
                name
                for name, (_, box) in mine.items()
                if box.elements and (name, box) not in before
            }
            kinds = {name: kind for parts in by_rank for name, (kind, _) in parts.items()}
            self._saved_names = writes, kinds
        return self._saved_names


@torch.no_grad()
def load_weights(model: nn.Module, saved: Sequence[RankState]) -> None:
    """Fill a full model, or its adapters, with the weights that all ranks of a role saved.

    Raises CheckpointError, before anything has changed, for the state of another model.
    """
    check_weights(model, saved)
    boxes = _saved_boxes(saved)
    for part in _whole_tensors(model):
        _fill_weights(part, boxes[part.name])


def check_weights(model: nn.Module | UnloadedModel, saved: Sequence[RankState]) -> None:
    """Raise CheckpointError unless ranks saved the weights, or adapters, of a model like this."""
    module = model.module if isinstance(model, UnloadedModel) else model
    _check(_saved_boxes(saved), {part.name: part.kind for part in _whole_tensors(module)})


def _whole_tensors(model: nn.Module) -> list[_LocalTensor]:
    """Return what a checkpoint holds of a full model."""
    adapters = has_adapters(model)
    return [
        _LocalTensor(name, name, tuple(tensor.shape), Box.whole(tensor.shape), tensor)
        for name, tensor in named_tensors(model).items()
        if tensor.requires_grad or not adapters
    ]


@dataclass(frozen=True, slots=True)
class _SavedBox:
    kind: str  # of the full tensor
    elements: int  # of the full tensor
    box: Box
    rank: RankState


def _saved_boxes(saved: Sequence[RankState]) -> dict[str, list[_SavedBox]]:
    by_name: dict[str, list[_SavedBox]] = {}
    for rank in saved:
        for name, it in rank.get(BOXES).items():
            box = Box(tuple(it["offset"]), tuple(it["size"]))
            saved_box = _SavedBox(it["of"], math.prod(it["shape"]), box, rank)
            by_name.setdefault(name, []).append(saved_box)
    return by_name


def _check(boxes: dict[str, list[_SavedBox]], kinds: dict[str, str]) -> None:
    for name in sorted(boxes.keys() | kinds.keys()):
        there = boxes[name][0].kind if name in boxes else "missing"
        here = kinds.get(name, "missing")
        if _comparable(there) != _comparable(here):
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} is {there} there and {here} here; "
                "resume with the model that was saved, or save into another folder"
            )
        covered, elements = sum(p.box.elements for p in boxes[name]), boxes[name][0].elements
        if covered != elements:
            raise CheckpointError(
                f"the checkpoint has {covered} of the {elements} elements of {name!r}; load what "
                "all ranks saved"
            )


def _comparable(kind: str) -> str:
    """A kind in which all dtypes of weights are one."""
    dtype, _, shape = kind.partition(" ")
    return f"float {shape}" if dtype in _FLOATS else kind


def _moments(
    boxes: list[_SavedBox], parameter: _LocalTensor, *, trained: bool
) -> dict[str, Tensor]:
    """AdamW's state of this rank's part of a parameter, and its master; {} where it has none."""
    near = [p for p in boxes if p.box.intersect(parameter.box)] or boxes[:1]
    state: dict[str, Tensor] = {}
    for key, value in (near[0].rank.get("moments", parameter.name) or {}).items():
        if key == MASTER and not has_master(parameter.tensor):
            continue
        if value.dim() == 0 or near[0].box == parameter.box:  # the count of steps
            state[key] = value
        else:
            part = torch.empty(parameter.box.size, dtype=value.dtype)
            state[key] = _fill(part, parameter.box, near, "moments", parameter.name, key)
    if trained and has_master(parameter.tensor) and MASTER not in state:
        part = torch.empty(parameter.box.size, dtype=torch.float32)
        state[MASTER] = _fill(part, parameter.box, boxes, "model", parameter.name)
    return state


def _fill_weights(part: _LocalTensor, boxes: list[_SavedBox]) -> None:
    """Copy the saved weights; from their masters where they were stored in another dtype."""
    path: tuple[str, ...] = ("model", part.name)
    masters = boxes[0].rank.get("moments", part.name, MASTER)
    if masters is not None and boxes[0].kind != part.kind:
        path = ("moments", part.name, MASTER)
    _fill(part.tensor, part.box, boxes, *path)


def _fill(target: Tensor, box: Box, boxes: list[_SavedBox], *path: str) -> Tensor:
    """Copy the saved elements of `box` into `target`, which has its shape."""
    for saved in boxes:
        common = saved.box.intersect(box)
        if common is not None:
            into = _slices(common, box)
            target[into].copy_(saved.rank.get(*path)[_slices(common, saved.box)])
    return target


def _slices(part: Box, outer: Box) -> tuple[slice, ...]:
    starts = part.start_in(outer, (0,) * len(part.size))
    return tuple(slice(a, a + n) for a, n in zip(starts, part.size, strict=True))


def weights_fingerprint(model: nn.Module | UnloadedModel) -> str:
    """A digest of a few values of each weight, to recognise the weights that training starts from.

    Adapters are left out; weights that are not float32 have their dtype before it. Take it before
    the model is sharded.
    """
    unloaded = model if isinstance(model, UnloadedModel) else None
    module = model.module if isinstance(model, UnloadedModel) else model
    digest, dtypes = hashlib.sha256(), set[str]()
    for name, tensor in module.named_parameters():
        if ".lora_" not in name and tensor.numel():
            some = spread_sample(tensor)
            if unloaded is not None:
                some = unloaded.files.sample(unloaded.names[name]).to(tensor.dtype)
            some = some.contiguous()
            digest.update(name.encode() + some.cpu().view(torch.uint8).numpy().tobytes())
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
    reduced = sorted(dtypes & {"bfloat16", "float16"})
    return ":".join([*reduced, digest.hexdigest()])


def check_start(saved: RankState, fingerprint: str, path: str) -> None:
    """Raise CheckpointError where training began with other weights than those at `path`.

    That isn't known where the two fingerprints are of different dtypes.
    """
    there = saved.get("start")
    same_dtype = (there or "").rpartition(":")[0] == fingerprint.rpartition(":")[0]
    if there != fingerprint and same_dtype:
        raise CheckpointError(
            "the checkpoint is of another model: training began with other weights than those in "
            f"{path}; resume with the model that it began with"
        )
