"""Causal language models: made from a configuration or loaded from a folder, checked and saved."""

from engine.models.critic import CriticModel, create_critic_model
from engine.models.load import (
    build_model,
    check_context,
    check_vocabulary,
    load_model,
    require_model_folder,
    saved_dtype,
    text_config,
    vocabulary_and_context,
)
from engine.models.lora import (
    BaseModelView,
    adapter_parameters,
    add_adapters,
    has_adapters,
)
from engine.models.policy import load_policy_model, resolve_lora
from engine.models.precision import DTYPES, resolve_dtype
from engine.models.save import save_model, save_policy, save_tensors
from engine.models.unloaded import (
    UnloadedModel,
    open_critic_model,
    open_model,
    open_policy_model,
)
from engine.storage.expert_weights import MIXTURES

__all__ = [
    "DTYPES",
    "MIXTURES",
    "BaseModelView",
    "CriticModel",
    "UnloadedModel",
    "adapter_parameters",
    "add_adapters",
    "build_model",
    "check_context",
    "check_vocabulary",
    "create_critic_model",
    "has_adapters",
    "load_model",
    "load_policy_model",
    "open_critic_model",
    "open_model",
    "open_policy_model",
    "require_model_folder",
    "resolve_dtype",
    "resolve_lora",
    "save_model",
    "save_policy",
    "save_tensors",
    "saved_dtype",
    "text_config",
    "vocabulary_and_context",
]
