"""`DataPipeline`: the models of a run and its settings, for `RLTrainer(pipeline=…)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True)
class DataPipeline:
    """What a run is made of: one actor, reward models whose scores are added, at most one critic.

    Models are transformers' (or a `HybridActor`), or paths. Without a reward it is that of the
    settings. `rollout_config` and `train_config` have the keys of `RLTrainer`'s `config`. Prompts
    are a loader, or the path of a file.
    """

    actors: Sequence[object]
    reward_models: Sequence[object] = ()
    critics: Sequence[object] = ()
    algorithm: str = "ppo"
    rollout_config: Mapping[str, object] = field(default_factory=dict)
    train_config: Mapping[str, object] = field(default_factory=dict)
    data_loader: object = None
    tokenizer: object = None
    reward_fn: object = None

    def __post_init__(self) -> None:
        if len(self.actors) != 1:
            raise ConfigError(
                f"DataPipeline has {len(self.actors)} actors; give one, the policy that learns"
            )
        if len(self.critics) > 1:
            raise ConfigError(f"DataPipeline has {len(self.critics)} critics; give one, or none")

    def arguments(self) -> dict[str, Any]:
        """The arguments of `RLTrainer` that it stands for."""
        return {
            "actor_model": self.actors[0],
            "critic_model": self.critics[0] if self.critics else None,
            "reward_model": list(self.reward_models),
            "reward_fn": self.reward_fn,
            "algo": self.algorithm,
            "data_loader": self.data_loader,
            "tokenizer": self.tokenizer,
            "config": {**self.rollout_config, **self.train_config},
        }
