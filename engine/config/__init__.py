"""Every knob of the pipeline: frozen models with defaults, bounds and help texts.

Where verl has the same knob it has the same name. A section is what one stage reads, so that a
change in it reruns that stage and what follows it. Settings that contradict one another are
refused here, before anything is computed. Nothing here reads files other than configurations.
"""

from engine.config.agents import AgentConfig, EnvironmentSpec, MultiTurnConfig
from engine.config.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PreferenceConfig,
    RolloutCorrectionConfig,
)
from engine.config.base import Options, Section
from engine.config.data import (
    DataConfig,
    DecontaminateConfig,
    EvaluationSetConfig,
    LoRAConfig,
    ModelConfig,
    RowsConfig,
    SamplingConfig,
)
from engine.config.distillation import DistillationConfig, TeacherConfig
from engine.config.gpus import GpuKindConfig
from engine.config.pairs import PairsConfig
from engine.config.parallel import ParallelConfig, PoolConfig
from engine.config.parse import config_path, digest, explain, load_config, parse_config
from engine.config.pipeline import EvaluateConfig, LMEvalConfig, PipelineConfig
from engine.config.promotion import ContaminationConfig, GuardConfig, PromoteConfig
from engine.config.retrain import RetrainConfig
from engine.config.reward import OverlongBufferConfig, RewardConfig, RewardSpec
from engine.config.rl import (
    ActorConfig,
    CriticConfig,
    PolicyLossConfig,
    RLConfig,
    RolloutConfig,
    TrainerConfig,
)
from engine.config.server import ServerConfig
from engine.config.tracking import Loggers, TrackingConfig
from engine.config.training import (
    OfflineConfig,
    OptimConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)
from engine.config.vllm import VllmConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "ContaminationConfig",
    "CriticConfig",
    "DataConfig",
    "DecontaminateConfig",
    "DistillationConfig",
    "EnvironmentSpec",
    "EvaluateConfig",
    "EvaluationSetConfig",
    "FilterGroupsConfig",
    "GpuKindConfig",
    "GuardConfig",
    "KLControlConfig",
    "LMEvalConfig",
    "LoRAConfig",
    "Loggers",
    "ModelConfig",
    "MultiTurnConfig",
    "OfflineConfig",
    "OptimConfig",
    "Options",
    "OverlongBufferConfig",
    "PairsConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PolicyLossConfig",
    "PoolConfig",
    "PreferenceConfig",
    "PreferenceTrainingConfig",
    "PromoteConfig",
    "RLConfig",
    "RetrainConfig",
    "RewardConfig",
    "RewardModelTrainingConfig",
    "RewardSpec",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RowsConfig",
    "SFTConfig",
    "SamplingConfig",
    "Section",
    "ServerConfig",
    "TeacherConfig",
    "TrackingConfig",
    "TrainerConfig",
    "VllmConfig",
    "config_path",
    "digest",
    "explain",
    "load_config",
    "parse_config",
]
