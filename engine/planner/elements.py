"""Elements of a decoder by part, all of them and those that a token meets: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.parallel.layout import ModelShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of a model by part."""

    layer: int  # the mean layer's, where some have experts and some have none
    layers: int
    embedding: int
    head: int  # 0 where it is the embedding
    experts: int = 0  # of `layer`; a token meets `chosen` of them
    chosen: int = 0

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.layer * self.layers + self.embedding + self.head

    @property
    def active(self) -> int:
        """Of a layer, those that a token meets: its active parameters."""
        return self.layer - self.experts + self.chosen

    def read(self, tokens: float) -> float:
        """Of the whole model, those that so many tokens meet together if experts are chosen evenly:
        a token misses an expert with probability 1 − chosen/experts."""
        missed = (1 - self.chosen / self.experts) ** tokens if self.experts else 0.0
        return self.total - self.layers * self.experts * missed


@lru_cache(maxsize=64)
def sizes(shape: ModelShape) -> Sizes:
    """Elements of a decoder; biases, which few families have, are left out."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * shape.hidden * (queries + keys) + 2 * shape.hidden
    table = shape.vocab * shape.hidden
    head, dense = 0 if shape.tied else table, 3 * shape.hidden * shape.intermediate
    mixture = shape.experts
    if mixture is None:
        return Sizes(layer + dense, shape.layers, table, head)
    one = 3 * shape.hidden * mixture.width
    rest = mixture.layers * (mixture.count * shape.hidden + 3 * shape.hidden * mixture.shared)
    rest += (shape.layers - mixture.layers) * dense
    experts = -(-mixture.layers * mixture.count * one // shape.layers)
    chosen = -(-mixture.layers * mixture.chosen * one // shape.layers)
    layer += experts + -(-rest // shape.layers)
    return Sizes(layer, shape.layers, table, head, experts, chosen)


def kept_of_mlp(shape: ModelShape) -> float:
    """What a token's MLP keeps for the backward pass, in elements, in a mean layer: four products
    of its width. Of experts also the tokens given to each, what each makes of them, and that
    weighted."""
    mixture = shape.experts
    if mixture is None:
        return 4.0 * shape.intermediate
    chosen = mixture.chosen * (4.0 * mixture.width + 3 * shape.hidden) + 4.0 * mixture.shared
    dense = 4.0 * shape.intermediate
    return (mixture.layers * chosen + (shape.layers - mixture.layers) * dense) / shape.layers
