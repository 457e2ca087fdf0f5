"""Models with one number a position in place of the vocabulary head: critics and reward models.

Reward models are a `CriticModel` in training, too, read after the last token or after each step;
transformers' classifier of the model's family is the same weights under other names.
"""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.config import LoRAConfig
from engine.errors import ModelError
from engine.models import loading
from engine.models.lora import (
    ADAPTER,
    adapter_tensors,
    add_adapters,
    has_adapters,
    merged_copy,
    write_adapter,
)

KIND = "ForSequenceClassification"  # how the names of transformers' classes end


def is_classifier(path: str | Path) -> bool:
    """Decide whether a folder or hub id holds a classifier of one label."""
    try:
        if loading.adapter_base_path(path) is not None:
            return False
        config = loading.load_model_config(path)
    except ModelError:  # loading it says what is wrong
        return False
    kind = (getattr(config, "architectures", None) or [""])[0]
    return str(kind).endswith(KIND) and config.num_labels == 1


@loading.model_lock()
def load_classifier(path: str | Path, dtype: str) -> PreTrainedModel:
    """Load the classifier in a folder or hub id; raise ModelError where it can't be loaded."""
    loading.require_model_folder(path)
    kind, where = AutoModelForSequenceClassification, repr(str(path))
    return loading.load_pretrained(kind, path, dtype, where, "classifier of sequences")


def score_head(model: nn.Module) -> Tensor | None:
    """Return the matrix `[1, H]` of a classifier of one label; None for any other model."""
    if not type(model).__name__.endswith(KIND):
        return None
    head = [model.get_parameter(name) for name in _head(model)]
    return head[0] if len(head) == 1 and head[0].dim() == 2 and len(head[0]) == 1 else None


class CriticModel(nn.Module):
    """Backbone and value head.

    `forward(input_ids [B, L], attention_mask [B, L] or None)` returns values `[B, L]` in float32:
    the value at column t is that of the state after reading token t.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # a new critic predicts 0 everywhere
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return self.values(hidden)

    def values(self, hidden: Tensor) -> Tensor:
        """Compute values `[B, L]` (float32) of the backbone's outputs `[B, L, H]`."""
        return head_values(self.head, hidden)

    @property
    def base_model(self) -> nn.Module:  # as a language model calls its backbone
        return self.backbone

    @property
    def peft_config(self) -> Any:
        """Peft's settings of the backbone's adapters; None for none."""
        return getattr(self.backbone, "peft_config", None)

    @property
    def config(self) -> PretrainedConfig:
        return self.backbone.config

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute a value head's values `[…]` (float32) of hidden states `[…, H]`."""
    return head(hidden.to(head.weight.dtype)).squeeze(-1).float()


def output_size(config: PretrainedConfig) -> int:
    """Return the columns of a backbone's last hidden state: OPT-350M's is projected."""
    projected = getattr(config, "word_embed_proj_dim", None)
    return int(projected if projected is not None else config.hidden_size)


def create_critic_model(
    model: PreTrainedModel,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    setting: str = "critic.lora",
) -> CriticModel:
    """Make a critic that starts from a copy of `model`'s backbone; `model` is not touched.

    A classifier of one label gives its head as well; else the head is new, and predicts 0. Adapters
    are merged and a quantised base made dense. All of it is trained, or, with `lora`, new adapters
    (drawn from `seed`) and the head; `setting` asked for them.
    """
    plain = merged_copy(model) if has_adapters(model) else model
    backbone = copy.deepcopy(plain.base_model)
    critic = CriticModel(backbone, output_size(model.config.get_text_config()))
    if (head := score_head(model)) is not None:
        critic.head.weight.data.copy_(head.detach())
    critic.to(next(backbone.parameters()).dtype).requires_grad_(True)
    if lora is not None and lora.rank:
        add_adapters(critic.backbone, lora, seed, setting)
    return critic


@loading.model_lock()
def classifier_of(
    config: PretrainedConfig, dtype: torch.dtype, pad_token_id: int, *, of_tokens: bool = False
) -> PreTrainedModel:
    """Make a classifier (of tokens or sequences) of one label for a causal LM, without storage.

    Raises ModelError for a family that has none, or with another head than one row.
    """
    config = copy.deepcopy(config)
    config.num_labels, config.pad_token_id = 1, pad_token_id
    kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    problem = f"no {config.model_type} model can be a reward model here, start from another family"
    try:
        with torch.device("meta"):
            model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        what = "token" if of_tokens else "sequence"
        raise ModelError(f"{problem}: transformers has no {what} classification for it") from error
    head = _head(model)
    expected = ["weight", "bias"] if of_tokens else ["weight"]
    parts = [name.rpartition(".")[2] for name in head]
    if parts != expected or model.get_parameter(head[0]).shape != (1, config.hidden_size):
        raise ModelError(f"{problem}: its classifier's head is {head}, not {expected}")
    return model


def classifier_tensors(
    classifier: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a critic's tensors under the classifier's names; a bias that it lacks is left out."""
    known, head = classifier.state_dict().keys(), _of_head(classifier)
    for name, tensor in tensors:
        body_name = name.replace("backbone.", f"{classifier.base_model_prefix}.", 1)
        if (renamed := head.get(name, body_name)) in known:
            yield renamed, tensor


def save_adapted(
    classifier: PreTrainedModel,
    critic: CriticModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write a critic with adapters as the classifier that they make of its base.

    Adapters and head alone go to `folder/adapter`. Raises StorageError as `save_tensors`.
    """
    head = {f"head.{name}": value for name, value in critic.head.state_dict().items()}
    plain = merged_copy(critic.backbone).state_dict()
    merged = {f"backbone.{name}": value for name, value in plain.items()} | head
    tensors = classifier_tensors(classifier, merged.items())
    loading.save_tensors(classifier, tensors, tokenizer, folder)
    adapters = adapter_tensors(critic.backbone)
    named = {f"{classifier.base_model_prefix}.{name}": value for name, value in adapters.items()}
    named |= dict(classifier_tensors(classifier, head.items()))
    modules = sorted({name.rpartition(".")[0] for name in _head(classifier)})
    settings = copy.copy(critic.peft_config[ADAPTER])
    settings.task_type = "TOKEN_CLS" if "head.bias" in _of_head(classifier) else "SEQ_CLS"
    settings.modules_to_save = modules
    write_adapter(named, settings, folder / loading.ADAPTER_FOLDER)
    tokenizer.save_pretrained(folder / loading.ADAPTER_FOLDER)


def _head(classifier: Any) -> list[str]:
    """Return the names of the parameters beside the body."""
    body = f"{classifier.base_model_prefix}."
    return [name for name, _ in classifier.named_parameters() if not name.startswith(body)]


def _of_head(classifier: PreTrainedModel) -> dict[str, str]:
    """Return the classifier's names of a critic's head, e.g. {"head.weight": "score.weight"}."""
    return {f"head.{name.rpartition('.')[2]}": name for name in _head(classifier)}
