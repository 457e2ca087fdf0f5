"""RL by a learned reward: the settings of a run whose reward is a trained reward model.

The reward that was configured, the true one, is measured beside it and weighs nothing.
"""

from __future__ import annotations

from engine.config import RewardSpec, RLConfig
from engine.dataflows import choose_dataflow
from engine.errors import ModelError
from engine.evaluation.overoptimisation import MODEL_REWARD
from engine.models.load import load_model_config
from engine.rewards.combined import ANSWER
from engine.rewards.registry import declared_components


def by_reward_model(config: RLConfig, folder: str) -> RLConfig:
    """The settings of RL with the reward model in `folder` as the only reward that counts.

    A classifier's score is its logit, a language model's the completion's log-prob. The configured
    reward gives the components of weight 0, and says which completions are right.
    Where the dataflow has a critic, it starts from the reward model, unless `critic.model_path`
    names another.
    """
    true, components = config.reward, dict.fromkeys(config.reward.components, 0.0)
    for spec in (true, *true.sources.values()):
        components |= dict.fromkeys(declared_components(spec.name) or (ANSWER,), 0.0)
    name = reward_of(folder)
    model = RewardSpec(name=name, options={"model": folder})
    reward = true.model_copy(
        update={
            "components": {**true.components, MODEL_REWARD: model},
            "weights": components | {MODEL_REWARD: 1.0},
        }
    )
    changes: dict[str, object] = {"reward": reward}
    if "critic" in choose_dataflow(config.algorithm).roles and not config.critic.model_path:
        changes["critic"] = config.critic.model_copy(update={"model_path": folder})
    return config.model_copy(update=changes)


def reward_of(folder: str) -> str:
    """The name of the reward that scores by the reward model in `folder`."""
    return "likelihood" if _is_language_model(folder) else "reward_model"


def _is_language_model(folder: str) -> bool:
    try:
        kinds = load_model_config(folder).architectures or []
    except ModelError:  # loading it says what is wrong
        return False
    return any(kind.endswith("ForCausalLM") for kind in kinds)
