"""HybridFlyte's post-training engine: dataflows over roles, on one process or many.

Importing it loads nothing heavy: the public names below are loaded on first use. It limits how long
OpenMP threads spin, has freed memory kept for the next step, and keeps transformers from importing
what is not used here.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from engine.process_setup import keep_freed_memory, skip_optional_imports

# OpenMP threads wait for each other by spinning. On a busy machine that turns milliseconds into
# seconds; with a short spin they sleep soon, at no cost on an idle machine. Read when torch is
# imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
skip_optional_imports()
keep_freed_memory()

__version__ = "0.1.0"
# The commands of `python -m engine.NAME`, and verl's published module names.
__path__.append(os.path.join(os.path.dirname(__file__), "cli", "commands"))

if TYPE_CHECKING:
    from engine.compat.hf_trainer import Trainer
    from engine.compat.rl_trainer import DataPipeline, DeviceMesh, RLTrainer
    from engine.data.loader import make_rl_data_loader
    from engine.data.training_examples import read_preferences, read_reward_pairs, read_steps
    from engine.models import create_critic_model
    from engine.runtime import HybridActor, measure_switch_overhead
    from engine.trainers.offline import SFTTrainer
    from engine.trainers.preference_learning import (
        LikelihoodRewardTrainer,
        PreferenceTrainer,
        ProcessRewardTrainer,
        RewardModelTrainer,
    )

__all__ = [
    "DataPipeline",
    "DeviceMesh",
    "HybridActor",
    "LikelihoodRewardTrainer",
    "PreferenceTrainer",
    "ProcessRewardTrainer",
    "RLTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "Trainer",
    "__version__",
    "create_critic_model",
    "make_rl_data_loader",
    "measure_switch_overhead",
    "read_preferences",
    "read_reward_pairs",
    "read_steps",
]

_HOMES = {
    "DataPipeline": "engine.compat.rl_trainer",
    "DeviceMesh": "engine.compat.rl_trainer",
    "HybridActor": "engine.runtime",
    "LikelihoodRewardTrainer": "engine.trainers.preference_learning",
    "PreferenceTrainer": "engine.trainers.preference_learning",
    "ProcessRewardTrainer": "engine.trainers.preference_learning",
    "RLTrainer": "engine.compat.rl_trainer",
    "RewardModelTrainer": "engine.trainers.preference_learning",
    "SFTTrainer": "engine.trainers.offline",
    "Trainer": "engine.compat.hf_trainer",
    "create_critic_model": "engine.models",
    "make_rl_data_loader": "engine.data.loader",
    "measure_switch_overhead": "engine.runtime",
    "read_preferences": "engine.data.training_examples",
    "read_reward_pairs": "engine.data.training_examples",
    "read_steps": "engine.data.training_examples",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
