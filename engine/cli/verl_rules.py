"""verl's defaults, and what its command lines leave to them.

`python -m engine.trainer.main_ppo` and `--verl-defaults` take all of them. Otherwise defaults are
this project's, and only the estimator follows verl: keys of a critic ask for one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.cli.settings import RunConfig

if TYPE_CHECKING:
    from engine.cli.resolve import Override, Resolved

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_BOTH: dict[str, object] = {  # of either optimizer
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "lr_warmup_steps_ratio": 0.0,
    "min_lr_ratio": 0.0,
    "lr_scheduler_type": "constant",
}

# What verl's configuration has where this project's default is another one.
VERL_DEFAULTS: dict[str, object] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.model.lora_alpha": 16,
    f"{_ACTOR}.optim.lr": 1e-6,
    **{f"{_ACTOR}.optim.{name}": value for name, value in _BOTH.items()},
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ROLLOUT}.n": 1,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.test_freq": -1,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
# Of the critic, where there is one.
CRITIC_DEFAULTS: dict[str, object] = {
    "critic.optim.lr": 1e-5,
    **{f"critic.optim.{name}": value for name, value in _BOTH.items()},
    "critic.ppo_mini_batch_size": 256,
    "critic.ppo_epochs": 1,
}

# Sections of verl's that say nothing unless another setting turns them on, as in verl itself.
_IDLE = {
    "rl.algorithm.use_kl_in_reward": ("rl.algorithm.kl_ctrl.", "rl.algorithm.kl_penalty"),
    "rl.actor.use_kl_loss": ("rl.actor.kl_loss_coef", "rl.actor.kl_loss_type"),
    "rl.rollout.val_kwargs.do_sample": ("rl.rollout.val_kwargs.",),
}


def choose_estimator(result: Resolved) -> None:
    """verl's default, GAE, where keys of a critic were given, and nothing that chooses without."""
    paths = ("rl.algorithm.adv_estimator", "rl.algorithm.dataflow")
    if any(path in result.overrides for path in paths):
        return
    critic = next(
        (o for path, o in result.overrides.items() if path.startswith("rl.critic.")), None
    )
    if critic is not None:
        result.overrides[paths[0]] = replace(critic, path=paths[0], value="gae", times="")
        result.notices.append(f"algorithm.adv_estimator is gae, as in verl: {critic.key} is given")


def drop_idle(result: Resolved) -> None:
    """verl's keys that have no effect in verl either, or tune an engine that doesn't decode."""
    chosen = result.overrides.get("rl.rollout.engine")
    engine = _default("rl.rollout.engine") if chosen is None else chosen.value
    for path, override in list(result.overrides.items()):
        why = ""
        if engine != "vllm" and path.startswith("rl.rollout.vllm.") and _is_verls(override):
            why = f"{engine} decodes, not vllm; see actor_rollout_ref.rollout.name"
        for switch, idle in _IDLE.items():
            given = result.overrides.get(switch)
            if path.startswith(idle) and not (_default(switch) if given is None else given.value):
                why = f"{switch.removeprefix('rl.')} is false"
        if why and not override.key.startswith("rl."):
            if override.value != _default(path):
                result.notices.append(f"{override.key} has no effect here: {why}")
            del result.overrides[path]


def _default(path: str) -> object:
    """A setting's default here."""
    value: object = RunConfig()
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def _is_verls(override: Override) -> bool:
    return override.key.startswith("actor_rollout_ref.")
