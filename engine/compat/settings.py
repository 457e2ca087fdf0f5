"""A dictionary of settings as articles and other libraries write it, as a run's configuration.

Keys are those of `main_ppo`, dotted or in sections (verl's and this project's), or one of the short
names below. A wrong one is an error that names the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from engine.cli.resolve import Resolved, flatten, known_keys, resolve_pairs
from engine.errors import ConfigError

ALGORITHMS = {
    "ppo": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
}

# Short names, and the settings that they are.
SHORT: dict[str, str] = {
    "lr": "actor.optim.lr",
    "learning_rate": "actor.optim.lr",
    "actor_lr": "actor.optim.lr",
    "critic_lr": "critic.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "warmup_steps": "actor.optim.warmup_steps",
    "warmup_ratio": "actor.optim.warmup_ratio",
    "lr_scheduler_type": "actor.optim.schedule",
    "max_grad_norm": "actor.optim.grad_clip",
    "grad_clip": "actor.optim.grad_clip",
    "batch_size": "trainer.train_batch_size",
    "train_batch_size": "trainer.train_batch_size",
    "rollout_batch_size": "trainer.train_batch_size",
    "mini_batch_size": "actor.ppo_mini_batch_size",
    "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "ppo_epochs": "actor.ppo_epochs",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "group_size": "rollout.n",
    "n": "rollout.n",
    "max_new_tokens": "data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "max_response_length": "data.max_response_length",
    "response_length": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "rollout_engine": "rollout.engine",
    "engine": "rollout.engine",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kl_coef": "actor.kl_loss_coef",
    "init_kl_coef": "actor.kl_loss_coef",
    "kl_loss_coef": "actor.kl_loss_coef",
    "beta": "actor.kl_loss_coef",
    "clip_ratio": "actor.clip_ratio",
    "clip_range": "actor.clip_ratio",
    "cliprange": "actor.clip_ratio",
    "epsilon": "actor.clip_ratio",
    "cliprange_value": "critic.cliprange_value",
    "entropy_coef": "actor.entropy_coeff",
    "entropy_coeff": "actor.entropy_coeff",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "gae_lambda": "algorithm.lam",
    "adv_estimator": "algorithm.adv_estimator",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "dtype": "model.dtype",
    "total_steps": "trainer.total_training_steps",
    "total_training_steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "num_steps": "trainer.total_training_steps",
    "save_freq": "trainer.save_freq",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "placement": "trainer.placement",
    "threads": "trainer.threads",
}


def read_settings(values: Mapping[str, object], algorithm: str | None = None) -> Resolved:
    """The configuration that `values` make; `algorithm` is `ppo`, `grpo`, or an estimator's name.

    Raises ConfigError in the words of `values`.
    """
    pairs = list(_pairs(values))
    if algorithm is not None:
        name = ALGORITHMS.get(algorithm.lower(), algorithm)
        pairs.append(("algorithm.adv_estimator", name))
    return resolve_pairs(pairs)


def _pairs(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = str(key)
        if name in SHORT and not isinstance(value, Mapping):
            yield SHORT[name], value
            continue
        if isinstance(value, Mapping) or "." in name or name in known_keys():
            yield from flatten(dict(value) if isinstance(value, Mapping) else value, name)
            continue
        near = difflib.get_close_matches(name, [*SHORT, *known_keys()], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"config has no setting {name!r}{hint}")
