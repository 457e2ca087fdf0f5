"""A classifier of one label, such as a reward model, as a critic starts from it: with its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from engine.errors import ModelError
from engine.models.load import (
    adapter_base_path,
    load_model_config,
    require_model_folder,
    with_model_lock,
)
from engine.models.precision import DTYPES
from engine.storage.hub import loading_error, split_revision

KIND = "ForSequenceClassification"  # how the names of transformers' classes end


def is_classifier(path: str | Path) -> bool:
    """Whether a folder or hub id holds a classifier of one label."""
    try:
        if adapter_base_path(path) is not None:
            return False
        config = load_model_config(path)
    except ModelError:  # loading it says what is wrong
        return False
    kind = (getattr(config, "architectures", None) or [""])[0]
    return str(kind).endswith(KIND) and config.num_labels == 1


@with_model_lock
def load_classifier(path: str | Path, dtype: str) -> PreTrainedModel:
    """The classifier in a folder or hub id, whole; ModelError where it can't be loaded."""
    require_model_folder(path)
    name, revision = split_revision(path)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            name,
            revision=revision or "main",
            dtype=DTYPES[dtype],
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{str(path)!r} can't be loaded for sequence classification: {loading_error(error)}"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{str(path)!r} lacks {len(missing)} of the classifier's weights, first "
            f"{missing[0]!r}; copy the whole folder"
        )
    return model


def score_head(model: nn.Module) -> Tensor | None:
    """The matrix `[1, H]` of a classifier of one label; None for any other model."""
    if not type(model).__name__.endswith(KIND):
        return None
    body = f"{model.base_model_prefix}."
    head = [tensor for name, tensor in model.named_parameters() if not name.startswith(body)]
    if len(head) != 1 or head[0].dim() != 2 or head[0].shape[0] != 1:
        return None
    found: Tensor = head[0]
    return found
