"""Causal language models: made from a configuration or loaded from a folder, checked and saved."""

from engine.models.critic import CriticModel, create_critic_model
from engine.models.load import (
    build_model,
    check_context,
    check_vocabulary,
    load_model,
    require_model_folder,
    vocabulary_and_context,
)
from engine.models.save import save_model

__all__ = [
    "CriticModel",
    "build_model",
    "check_context",
    "check_vocabulary",
    "create_critic_model",
    "load_model",
    "require_model_folder",
    "save_model",
    "vocabulary_and_context",
]
