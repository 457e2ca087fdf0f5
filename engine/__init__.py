"""HybridFlyte's post-training engine: dataflows over roles, on one process or many.

Importing it loads nothing heavy: the public names below are loaded on first use. It limits how long
OpenMP threads spin, has freed memory kept for the next step, and keeps transformers from importing
what is not used here.
"""
# ruff: noqa: F401  # the public names, for type checkers

import importlib
import os
from typing import TYPE_CHECKING, Any

from engine.process_setup import keep_freed_memory, skip_optional_imports, spin_briefly

spin_briefly()
skip_optional_imports()
keep_freed_memory()

__version__ = "0.1.0"
# The commands of `python -m engine.NAME`, and verl's published module names.
__path__.append(os.path.join(os.path.dirname(__file__), "cli", "commands"))

# The public names, by the module that has them.
_EXPORTS = {
    "engine.compat.hf_trainer": "Trainer",
    "engine.compat.rl_trainer": "DataPipeline DeviceMesh RLTrainer",
    "engine.data.loader": "make_rl_data_loader",
    "engine.data.training_examples": "read_preferences read_reward_pairs read_steps",
    "engine.models": "create_critic_model",
    "engine.runtime": "HybridActor measure_switch_overhead",
    "engine.trainers.offline": "SFTTrainer",
    "engine.trainers.preference_learning": "LikelihoodRewardTrainer PreferenceTrainer "
    "ProcessRewardTrainer RewardModelTrainer",
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(["__version__", *_HOMES])

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
