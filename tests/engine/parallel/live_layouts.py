"""Live models on layouts of gloo ranks and rollout's storages beside them, for reshard's tests."""

from __future__ import annotations

from typing import Any

import torch
from reshard_cases import shards_of_rank, view
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.config import ParallelConfig
from engine.parallel.fsdp import shard_model
from engine.parallel.layout import Layout
from engine.parallel.pipeline_parallel import extract_stage
from engine.parallel.process_groups import Ranks
from engine.parallel.shard_maps import ShardMap
from engine.parallel.tensor_parallel import apply_tensor_parallel

EMPTY = -7.0  # what a rollout storage holds before, so that nothing is right by chance


def tiny(vocabulary: int = 128, tied: bool = False) -> Qwen2ForCausalLM:
    """The same weights for the same arguments, on every rank; float32."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # biases and norms too
        return model


def trained(model: Qwen2ForCausalLM, layout: Layout) -> nn.Module:
    """This rank's share of the model, as the trainer makes it."""
    ranks = Ranks.form(layout)
    part: Any = model
    if layout.pp > 1:
        part = extract_stage(model, ranks.index("pp"), layout.pp)
    if layout.tp > 1:
        apply_tensor_parallel(part, ranks.submesh("tp"))
    layers = part.layers if layout.pp > 1 else part.model.layers
    shard_model(part, ranks, ParallelConfig(**layout.sizes), layers=list(layers))
    return part


def storages(target: ShardMap, rank: int, pad: int = 0) -> dict[str, Tensor]:
    """Rollout's tensors on a rank; vocabularies have `pad` rows that no parameter fills."""
    found: dict[str, Tensor] = {}
    for name, storage, shard in shards_of_rank(target, rank):
        rows = found[storage].shape[0] if storage in found else 0
        more = pad if "embed" in storage or "lm_head" in storage else 0
        shape = (max(rows, shard.start[0] + shard.box.size[0] + more), *shard.box.size[1:])
        found[storage] = torch.full(shape, EMPTY, dtype=target.dtypes[name])
    return found


def wrong(target: ShardMap, rank: int, filled: dict[str, Tensor], whole: dict[str, Tensor]) -> list:
    """Parameters that differ from the whole model's, and storages with rows written beyond."""
    found, covered = [], {name: torch.zeros(t.shape) for name, t in filled.items()}
    for name, storage, shard in shards_of_rank(target, rank):
        expected = view(whole[name], shard.box.offset, shard.box.size).to(filled[storage].dtype)
        if not torch.equal(view(filled[storage], shard.start, shard.box.size), expected):
            found.append(name)
        view(covered[storage], shard.start, shard.box.size).fill_(1)
    return found + [n for n, t in filled.items() if not (t[covered[n] == 0] == EMPTY).all()]
