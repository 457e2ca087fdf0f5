"""Models in memory as the folders that a run's workers load, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from engine.errors import ConfigError
from engine.models import CriticModel, load_model, save_model, save_tensors
from engine.models.classifier import classifier_of, classifier_tensors
from engine.runtime import HybridActor

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def policy_module(model: object) -> Any:
    """The transformers model of an actor: itself, or that of a `HybridActor` on one rank."""
    if not isinstance(model, HybridActor):
        return model
    if model._sharded is not None:
        raise ConfigError(
            "RLTrainer got a HybridActor on several ranks; start RLTrainer in one process, and set "
            "actor.parallel in config for its ranks"
        )
    return model.policy


def write_actor(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> str:
    """Write a model in memory with its tokenizer; return its dtype's name.

    Raises ConfigError for what is no causal language model of transformers, or has no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("RLTrainer got a model in memory and no tokenizer; give tokenizer=…")
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ConfigError(
            f"actor_model is a {type(model).__name__}; give a transformers causal LM, a "
            "HybridActor, or the path of one"
        )
    save_model(model, tokenizer, folder)
    dtype = next(model.parameters()).dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"actor_model has weights of {dtype}; convert it to torch.float32")
    return _DTYPES[dtype]


def write_critic(
    critic: object, actor: object, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> str | None:
    """Write what a critic has learned as a folder for `critic.model_path`, which it returns.

    None for a fresh one, `create_critic_model(actor)`: the run makes that itself. Raises
    ConfigError for a critic of another kind.
    """
    if isinstance(critic, str | Path):
        return str(critic)
    if not isinstance(critic, CriticModel):
        raise ConfigError(
            f"critic_model is a {type(critic).__name__}; make it with create_critic_model(model), "
            "or give the path of a model"
        )
    if _is_fresh(critic, actor):
        return None
    if bool(critic.head.bias.detach().any()):
        raise ConfigError(
            "critic_model's head has a bias, which a classifier's folder has no place for; set it "
            "to 0, or begin with create_critic_model(model)"
        )
    config, dtype = critic.config, next(critic.parameters()).dtype
    classifier = classifier_of(config, dtype, int(tokenizer.pad_token_id or 0))
    tensors = classifier_tensors(classifier, critic.state_dict().items())
    save_tensors(classifier, tensors, tokenizer, folder)
    return str(folder)


def hand_back(folder: Path, model: torch.nn.Module) -> None:
    """Load the weights of a model folder into a model in memory."""
    trained = load_model(folder, _DTYPES[next(model.parameters()).dtype])
    model.load_state_dict(trained.state_dict())


def _is_fresh(critic: CriticModel, actor: Any) -> bool:
    if actor is None or bool(critic.head.weight.detach().any()):
        return False
    own = actor.base_model.state_dict()
    there = critic.backbone.state_dict()
    return own.keys() == there.keys() and all(torch.equal(own[k], there[k]) for k in own)
