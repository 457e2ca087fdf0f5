"""A trained reward model as transformers' model for sequence or token classification, with one
label.

In training it is a backbone with a head (`critic.CriticModel`), read after the last token, or after
each step. The
classifier that a model's family has in transformers is the same weights under other names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.errors import ModelError
from engine.models.critic import CriticModel
from engine.models.load import with_model_lock
from engine.models.lora import ADAPTER, adapter_tensors, merged_copy, write_adapter
from engine.models.save import ADAPTER_FOLDER, save_tensors


@with_model_lock
def classifier_of(
    config: PretrainedConfig, dtype: torch.dtype, pad_token_id: int, *, of_tokens: bool = False
) -> PreTrainedModel:
    """The classifier of one label, without storage, for the backbone of a causal LM's `config`: of
    sequences, or of tokens.

    Raises ModelError for a family that has none, or one with more than a matrix as its head.
    """
    own = copy.deepcopy(config)
    own.num_labels, own.pad_token_id = 1, pad_token_id
    kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    try:
        with torch.device("meta"):
            model = kind.from_config(own, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        what = "token" if of_tokens else "sequence"
        raise ModelError(
            f"transformers has no {what} classification for {config.model_type} models, so none "
            "can be a reward model; start from a model of another family"
        ) from error
    head = _head(model)
    wanted = ["weight", "bias"] if of_tokens else ["weight"]
    parts = [name.rpartition(".")[2] for name in head]
    if parts != wanted or model.get_parameter(head[0]).shape != (1, own.hidden_size):
        raise ModelError(
            f"the head of transformers' classifier of {config.model_type} models is {head}, not "
            f"one {' and one '.join(wanted)}; start a reward model from a model of another family"
        )
    return model


def classifier_tensors(
    classifier: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """A critic's tensors under the classifier's names; a bias of the head that it has no place for
    is 0, and left out."""
    known = classifier.state_dict().keys()
    head = _of_head(classifier)
    for name, tensor in tensors:
        if name in head:
            yield head[name], tensor
            continue
        renamed = name.replace("backbone.", f"{classifier.base_model_prefix}.", 1)
        if renamed in known:
            yield renamed, tensor


def save_adapted(
    classifier: PreTrainedModel,
    critic: CriticModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write a critic with adapters as the classifier that they make of its base; and they and the
    head alone, in peft's format, to `folder/adapter`.

    Raises StorageError as `save_tensors`.
    """
    head = {f"head.{name}": value for name, value in critic.head.state_dict().items()}
    plain = merged_copy(critic.backbone).state_dict()
    whole = {f"backbone.{name}": value for name, value in plain.items()} | head
    save_tensors(classifier, classifier_tensors(classifier, whole.items()), tokenizer, folder)
    adapters = adapter_tensors(critic.backbone)
    named = {f"{classifier.base_model_prefix}.{name}": value for name, value in adapters.items()}
    named |= dict(classifier_tensors(classifier, head.items()))
    modules = sorted({name.rpartition(".")[0] for name in _head(classifier)})
    settings = copy.copy(critic.peft_config[ADAPTER])
    settings.task_type = "TOKEN_CLS" if "head.bias" in _of_head(classifier) else "SEQ_CLS"
    settings.modules_to_save = modules
    write_adapter(named, settings, folder / ADAPTER_FOLDER)
    tokenizer.save_pretrained(folder / ADAPTER_FOLDER)


def _head(classifier: PreTrainedModel) -> list[str]:
    body = f"{classifier.base_model_prefix}."
    return [name for name, _ in classifier.named_parameters() if not name.startswith(body)]


def _of_head(classifier: PreTrainedModel) -> dict[str, str]:
    """The classifier's names of a critic's head, e.g. {"head.weight": "score.weight"}."""
    return {f"head.{name.rpartition('.')[2]}": name for name in _head(classifier)}
