"""Every knob of the pipeline: frozen models with defaults, bounds and help texts.

Where verl has the same knob it has the same name. A section is what one stage reads, so that a
change in it reruns that stage and what follows it. Settings that contradict one another are
refused here. Read `pipeline` for the whole, and `rl`; `text` reads and prints them.
"""

# ruff: noqa: F401 (these are the names that other rooms import)

from engine.config.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    PreferenceConfig,
    TeacherConfig,
)
from engine.config.base import Section
from engine.config.data import (
    DataConfig,
    EvaluationSetConfig,
    LoRAConfig,
    ModelConfig,
    RowsConfig,
    SamplingConfig,
)
from engine.config.pipeline import (
    ContaminationConfig,
    EvaluateConfig,
    GuardConfig,
    LineageConfig,
    LMEvalConfig,
    PairsConfig,
    PipelineConfig,
    PromoteConfig,
    RecheckConfig,
    RetrainConfig,
)
from engine.config.rl import (
    ActorConfig,
    CriticConfig,
    PolicyLossConfig,
    RewardConfig,
    RewardSpec,
    RLConfig,
    RolloutConfig,
)
from engine.config.rollout_engines import AgentConfig, MultiTurnConfig, ServerConfig
from engine.config.text import config_path, digest, explain, load_config, parse_config, validated
from engine.config.training import (
    OfflineConfig,
    OptimConfig,
    ParallelConfig,
    PoolConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)
