"""What engines read of a trainer's model, a transformers causal LM, and its evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from torch import Tensor, nn


class CausalLM(Protocol):
    """The methods of a causal LM that `nn.Module` has not."""

    def get_input_embeddings(self) -> nn.Embedding: ...


def embedding_weight(model: nn.Module) -> Tensor:
    """The input embedding, `[V, hidden]`."""
    return cast(CausalLM, model).get_input_embeddings().weight


def context_length(model: object) -> int | None:
    """`max_position_embeddings` of the model's (text) config; None if it has none."""
    config: object = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    if text_config is not None:
        config = text_config()
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else int(length)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set `model.eval()` for the block (no dropout), then restore each module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
