"""Writing a model folder that transformers, vLLM and this project can load again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import StorageError
from engine.models.lora import has_adapters, merged_copy, save_adapter
from engine.storage.expert_weights import file_tensors
from engine.storage.weight_files import write_weights

ADAPTER_FOLDER = "adapter"  # below a model that was trained with adapters


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write safetensors, configuration and tokenizer of a transformers model to `folder`.

    A model with adapters is written as the plain model that they make of it, and they alone, in
    peft's format, to `folder/adapter`; `model` itself stays as it is.

    Raises StorageError (disk full, no permission). The caller publishes the folder by renaming
    it, so a half-written one is never seen.
    """
    folder = Path(folder)
    policy: Any = model
    with _writing(folder):
        if has_adapters(policy):
            merged_copy(policy).save_pretrained(folder)
            save_adapter(policy, folder / ADAPTER_FOLDER)
            tokenizer.save_pretrained(folder / ADAPTER_FOLDER)
        else:
            policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def save_tensors(
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    adapters: Mapping[str, Tensor] | None = None,
) -> Path:
    """`save_model` of a model whose tensors come one by one: few are in memory at a time.

    They are a plain model's, and `adapters` by parameter name those that were merged into it. Of
    `model` itself only the class and the configuration are read.
    """
    folder = Path(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(file_tensors(model.config.model_type, tensors), folder)
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if adapters:
            save_adapter(model, folder / ADAPTER_FOLDER, adapters)
            tokenizer.save_pretrained(folder / ADAPTER_FOLDER)
        tokenizer.save_pretrained(folder)
    return folder


def save_policy(model: nn.Module, folder: str | Path, options: dict[str, object]) -> None:
    """Write what transformers' `save_pretrained(folder, **options)` writes of `model`.

    Raises StorageError as `save_model`, also for what `save_pretrained` doesn't take.
    """
    policy: Any = model
    try:
        with _writing(Path(folder)):
            policy.save_pretrained(folder, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StorageError(f"the model could not be written to {folder}: {error}") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with `folder` into a StorageError."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"the model can't be written to {folder}: it is a file; name a folder")
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the model could not be written to {folder}: {error}; free space or choose another "
            "place with HYBRIDFLYTE_HOME"
        ) from error
