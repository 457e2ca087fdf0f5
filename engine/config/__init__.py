"""Every knob of the pipeline: frozen models with defaults, bounds and help texts.

Where verl has the same knob it has the same name. A section is what one stage reads, so that a
change in it reruns that stage and what follows it. Settings that contradict one another are
refused here, before anything is computed. Nothing here reads files other than configurations.

Read `pipeline` for the whole, and `rl` for reinforcement learning; `text` reads and prints them.
"""

# ruff: noqa: F401 (these are the names that other rooms import)

from engine.config.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PreferenceConfig,
    RolloutCorrectionConfig,
    TeacherConfig,
)
from engine.config.base import Options, Section
from engine.config.data import (
    ColumnsConfig,
    DataConfig,
    DecontaminateConfig,
    EvaluationSetConfig,
    LoRAConfig,
    ModelConfig,
    RowsConfig,
    SamplingConfig,
    WeightsConfig,
)
from engine.config.pipeline import (
    ContaminationConfig,
    EvaluateConfig,
    GuardConfig,
    LMEvalConfig,
    Loggers,
    PairsConfig,
    PipelineConfig,
    PromoteConfig,
    RetrainConfig,
    TrackingConfig,
)
from engine.config.rl import (
    ActorConfig,
    CriticConfig,
    GpuKindConfig,
    OverlongBufferConfig,
    PolicyLossConfig,
    RewardConfig,
    RewardSpec,
    RLConfig,
    RolloutConfig,
    TrainerConfig,
)
from engine.config.rollout_engines import (
    AgentConfig,
    EnvironmentSpec,
    MultiTurnConfig,
    ServerConfig,
    VllmConfig,
)
from engine.config.text import config_path, digest, explain, load_config, parse_config
from engine.config.training import (
    OfflineConfig,
    OptimConfig,
    ParallelConfig,
    PoolConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)
