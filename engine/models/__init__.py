"""Causal language models: made from a configuration or loaded from a folder, checked and saved."""
# ruff: noqa: F401  # what other rooms import

from engine.models.loading import (
    DTYPES,
    build_model,
    check_context,
    check_vocabulary,
    high_learning_rate,
    load_model,
    parameter_count,
    require_model_folder,
    resolve_dtype,
    save_model,
    save_policy,
    save_tensors,
    saved_dtype,
    text_config,
    vocabulary_and_context,
)
from engine.models.lora import BaseModelView, adapter_parameters, add_adapters, has_adapters
from engine.models.policy import (
    UnloadedModel,
    load_policy_model,
    open_critic_model,
    open_model,
    open_policy_model,
    resolve_lora,
)
from engine.models.value_head import CriticModel, create_critic_model
from engine.storage.weight_files import MIXTURES
