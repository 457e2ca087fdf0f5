"""Models in memory as the folders that a run's workers load, and back; rewards as settings.

A reward function that its module's name leads to is named by that, so that every process finds it;
any other function, and a model, is registered here, and the run stays in this process.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from engine.cli.reward_file import each_row
from engine.data.templates import Message, encode_conversation
from engine.errors import ConfigError, RewardError
from engine.models import CriticModel, load_model, save_model, save_tensors
from engine.models.value_head import classifier_of, classifier_tensors
from engine.rewards.reward_function import register_reward
from engine.runtime import HybridActor


def policy_module(model: object) -> Any:
    """Return the transformers model of an actor: itself, or that of a `HybridActor` on one rank."""
    if not isinstance(model, HybridActor):
        return model
    if model._sharded is not None:
        raise ConfigError(
            "RLTrainer got a HybridActor on several ranks; set actor.parallel in config for them"
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
            f"actor_model is a {type(model).__name__}; give a causal LM, a HybridActor, or a path"
        )
    save_model(model, tokenizer, folder)
    return _dtype(model)


def write_critic(
    critic: object, actor: Any, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> str | None:
    """Write what a critic has learned as a folder for `critic.model_path`, which it returns.

    None for a fresh one, `create_critic_model(actor)`: the run makes that itself. Raises
    ConfigError for a critic of another kind.
    """
    if isinstance(critic, str | Path):
        return str(critic)
    if not isinstance(critic, CriticModel):
        raise ConfigError(
            f"critic_model is a {type(critic).__name__}; give create_critic_model(model), or a path"
        )
    if actor is not None and not critic.head.weight.detach().any():
        base, backbone = actor.base_model.state_dict(), critic.backbone.state_dict()
        if base.keys() == backbone.keys() and all(torch.equal(base[k], backbone[k]) for k in base):
            return None
    if bool(critic.head.bias.detach().any()):
        raise ConfigError(
            "critic_model's head has a bias, which a classifier's folder has no place for; set it 0"
        )
    dtype = next(critic.parameters()).dtype
    classifier = classifier_of(critic.config, dtype, int(tokenizer.pad_token_id or 0))
    tensors = classifier_tensors(classifier, critic.state_dict().items())
    save_tensors(classifier, tensors, tokenizer, folder)
    return str(folder)


def hand_back(folder: Path, model: torch.nn.Module) -> None:
    """Load the weights of a model folder into a model in memory."""
    model.load_state_dict(load_model(folder, _dtype(model)).state_dict())


def _dtype(model: torch.nn.Module) -> str:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"actor_model has weights of {dtype}; convert it to torch.float32")
    return dtype


_PROMPTS = ("prompts", "prompt", "queries", "query", "questions")
_COMPLETIONS = ("completions", "completion", "responses", "response", "outputs", "texts")


def reward_settings(
    function: object, models: Sequence[object], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], bool]:
    """Return the section `reward` for a function (or a name) and models, whose values are added.

    Also whether a run of several processes can have it. Raises ConfigError for what is no reward.
    """
    rewards = [_of_function(function)] if function is not None else []
    rewards += [_of_model(model, tokenizer) for model in models]
    specs: list[dict[str, Any]] = [
        {"name": _registered(reward, source)} if callable(reward) else reward
        for reward, source in rewards
    ]
    section: dict[str, Any] = dict(specs[0]) if specs else {}
    if specs[1:]:
        section["components"] = {f"reward_{i}": spec for i, spec in enumerate(specs[1:], start=2)}
    if any(callable(reward) for reward, _ in rewards):
        return section | {"isolation": "none"}, False
    return section, True


# A reward's section, or a function that only this process has; and what it was made from.
_Reward = tuple[dict[str, Any] | Callable[..., object], object]


def _of_function(function: object) -> _Reward:
    if isinstance(function, str):
        return {"name": function}, function
    if not callable(function):
        raise ConfigError(f"reward_fn={function!r} is no function; give one, or a reward's name")
    parameters = inspect.signature(function).parameters
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    is_reward = {"prompts", "completions"} <= parameters.keys()
    in_module = module not in ("", "__main__") and "." not in name
    if is_reward and in_module and getattr(sys.modules.get(module), name, None) is function:
        return {"name": f"{module}:{name}"}, function
    if {"solution_str", "ground_truth"} <= parameters.keys():  # verl's kind, of one row
        return each_row(function), function
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    prompt = next((p for p in _PROMPTS if p in parameters), "")
    completion = next((p for p in _COMPLETIONS if p in parameters), "")
    if not completion:
        raise ConfigError(
            f"reward_fn{inspect.signature(function)} takes no completions; write it as "
            "def reward(prompts, completions, *, ground_truth, **columns) -> list[float]"
        )

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        arguments = {k: v for k, v in columns.items() if takes_all or k in parameters}
        arguments |= {completion: list(completions)} | ({prompt: list(prompts)} if prompt else {})
        scores = function(**arguments)
        return scores.tolist() if isinstance(scores, Tensor) else scores

    return reward, function


def _of_model(model: object, tokenizer: PreTrainedTokenizerBase) -> _Reward:
    if isinstance(model, str | Path):
        return {"name": "reward_model", "options": {"model": str(model)}}, model
    if not callable(model):
        raise ConfigError(f"a reward model is {model!r}; give a model, or the path of one")

    def score(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        messages = columns.get("messages") or [[{"role": "user", "content": p}] for p in prompts]
        turns = [
            [*prompt, {"role": "assistant", "content": completion}]
            for prompt, completion in zip(messages, completions, strict=True)
        ]
        return model_scores(model, tokenizer, turns)

    return score, model


@torch.no_grad()
def model_scores(
    model: Any, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]
) -> list[float]:
    """Return conversations' scores by a model that takes `input_ids` and `attention_mask` `[B, L]`.

    It returns a tensor `[B]` or `[B, 1]`, or an object or mapping with that as `scores` or
    `logits`. Rows are padded on the right. Raises RewardError for any other output.
    """
    rows = [torch.tensor(encode_conversation(tokenizer, turns)) for turns in conversations]
    ids = pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id or 0))
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    device = next((p.device for p in getattr(model, "parameters", tuple)()), ids.device)
    out = model(input_ids=ids.to(device), attention_mask=mask.to(device))
    for name in ("scores", "logits"):
        scores = out.get(name) if isinstance(out, dict) else getattr(out, name, None)
        out = scores if scores is not None else out
    if not isinstance(out, Tensor) or out.numel() != len(rows):
        what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise RewardError(
            f"a reward model of {type(model).__name__} returned {what} for {len(rows)} "
            "conversations; it must return `scores`, a tensor [batch]"
        )
    return [float(score) for score in out.flatten().float()]


def _registered(function: Callable[..., object], source: object) -> str:
    """Register the function under a name of its own, which it returns."""
    digest = hashlib.sha256(f"{source!r}{id(source)}".encode()).hexdigest()[:8]
    name = f"{getattr(source, '__name__', type(source).__name__).strip('<>')}_{digest}"
    function.__qualname__ = name
    register_reward(name)(function)
    return name
