"""Experts' matrices in a model's files, each by itself, and in transformers' modules, all in one.

A file of Mixtral, Qwen2-MoE or Qwen3-MoE has three matrices an expert, by names that vLLM and TGI
know too; a module has two tensors for all of a layer's experts, `gate_up_proj` [E, 2·I, H], the
gate's rows above, and `down_proj` [E, H, I]. No other weight has another name or shape, but
Mixtral's router.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from engine.storage.weight_files import WeightFiles

_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_BLOCKS = {  # by model type: the block's name in files, and matrices that a tensor has
    "mixtral": ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen2_moe": ("mlp", _GATED),
    "qwen3_moe": ("mlp", _GATED),
}
_BLOCK = "mlp"  # its name in modules

MIXTURES = tuple(_BLOCKS)  # model types whose experts and routers are known


def stack_experts(files: WeightFiles, model_type: str, wanted: Mapping[str, Tensor]) -> None:
    """Let `files` have the tensors `wanted` of a module of `model_type`, by its own names.

    Nothing is read, and what files have under those names already stays.
    """
    if model_type not in _BLOCKS:
        return
    block, matrices = _BLOCKS[model_type]
    for name, tensor in wanted.items():
        if name in files.shapes:
            continue
        owner, _, own = name.rpartition(".")
        there = _in_files(owner, block)
        if own in matrices and owner.endswith(".experts"):
            parts = [
                [f"{there}.{expert}.{matrix}.weight" for matrix in matrices[own]]
                for expert in range(tensor.shape[0])
            ]
            if all(part in files.shapes for row in parts for part in row):
                files.stack(name, parts)
        elif (alias := f"{there}.{own}") != name and alias in files.shapes:
            files.alias(name, alias)


def file_tensors(
    model_type: str, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """A module's whole tensors as its files name and cut them; matrices are views."""
    block, matrices = _BLOCKS.get(model_type, (_BLOCK, {}))
    for name, tensor in named:
        owner, _, own = name.rpartition(".")
        there = _in_files(owner, block)
        if own not in matrices or not owner.endswith(".experts"):
            yield f"{there}.{own}" if owner else name, tensor
            continue
        for expert, whole in enumerate(tensor):
            parts = whole.chunk(len(matrices[own]))
            for matrix, part in zip(matrices[own], parts, strict=True):
                yield f"{there}.{expert}.{matrix}.weight", part


def _in_files(owner: str, block: str) -> str:
    """A module's path with the block's name in files."""
    return ".".join(block if piece == _BLOCK else piece for piece in owner.split("."))
