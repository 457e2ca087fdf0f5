"""The inputs of stages beside artifacts: their run, and their share of the settings.

A plan splits a configuration into `SFTSettings` of the stage `sft` and others, so that a changed
setting changes the inputs of those stages alone that read it.
"""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from engine.config import (
    DataConfig,
    EvaluateConfig,
    LineageConfig,
    LoRAConfig,
    ModelConfig,
    PairsConfig,
    PreferenceTrainingConfig,
    PromoteConfig,
    RetrainConfig,
    RewardConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
)
from engine.config.pipeline import RewardModelGateConfig
from engine.data.incremental_data import DataFile
from engine.stages.profiles import Profile


class _Values(BaseModel):
    model_config = ConfigDict(frozen=True)


class RunContext(_Values):
    """The pipeline run that a stage belongs to. Never part of a cache key."""

    run_id: str  # ours, unique, e.g. "20261121-024512-3f9a"
    mlflow_run: str  # parent run in MLflow
    experiment: str  # MLflow experiment, e.g. "hybridflyte"
    started_at: float  # seconds since the epoch
    mlflow_url: str = ""  # page of the parent run, which Flyte's console shows among the inputs
    logger: tuple[str, ...] = ("console",)  # `tracking.logger`


class _Seeded(_Values):
    seed: int


class _OfData(_Seeded):
    data: DataConfig


class _OnPairs(_Seeded):
    dtype: str  # of the weights; empty: the folder's
    too_long: str  # `pairs.too_long`


class DatasetSettings(_OfData):
    source_digest: str  # what the source holds now
    model_path: str  # the start model's folder, or owner/name@commit; empty for one from scratch
    model_digest: str  # content of that folder, or owner/name@commit
    context: int  # the model's limit in tokens, which the longest prompt and response must fit


class NewData(_Values):
    """The files that a retraining run adds to the champion's dataset."""

    prefix: str  # e.g. "s3://bucket/problems"
    files: list[DataFile]
    dataset: str  # address of the champion's dataset artifact
    dataset_digest: str  # its content


class IngestSettings(_OfData):
    new_data: NewData
    retrain: RetrainConfig


class SFTSettings(_Seeded):
    start: ModelConfig
    start_digest: str  # content of the start model's folder, or owner/name@commit
    config: SFTConfig


class RewardAuditSettings(_Values):
    rewards: dict[str, RewardConfig]  # by who scores by it: rl, and evaluation where it has another
    plugins: tuple[str, ...]
    code: dict[str, str]  # digests of the modules that they are in
    required: bool  # `promote.require_reward_audit`


class RLSettings(_OfData):
    config: RLConfig
    lora: LoRAConfig
    dtype: str = ""  # `model.dtype`; empty: that of the warm start's folder, which resolved it


class PairsSettings(_OfData):
    config: PairsConfig
    source_digest: str  # what the files of preferences hold now; empty for rollouts
    kind: Literal["pairs", "labels"]  # labels are for KTO


class PreferenceSettings(_OnPairs):
    config: PreferenceTrainingConfig
    lora: LoRAConfig


class RewardModelSettings(_OnPairs):
    config: RewardModelTrainingConfig


class RewardModelGateSettings(_Seeded):
    config: RewardModelGateConfig
    lineage: LineageConfig = LineageConfig()


class EvaluationSettings(_OfData):
    config: EvaluateConfig


class PromotionSettings(_OfData):
    evaluate: EvaluateConfig
    config: PromoteConfig
    lineage: LineageConfig = LineageConfig()


class Plan(NamedTuple):
    """A run that was opened, its machines, and the settings of each stage."""

    run: RunContext
    profile: Profile
    sft_profile: Profile  # without a warm start one without GPUs: the stage copies files
    dataset: DatasetSettings
    audit_profile: Profile  # one without GPUs, unless a model scores
    sft: SFTSettings
    reward_audit: RewardAuditSettings
    rl: RLSettings
    pairs: PairsSettings
    preference: PreferenceSettings
    reward_model: RewardModelSettings
    reward_model_gate: RewardModelGateSettings
    evaluation: EvaluationSettings
    promotion: PromotionSettings
    needs_approval: bool
    config_digest: str


class PromotionPlan(NamedTuple):
    """What `promote` needs in a run of its own."""

    run: RunContext
    profile: Profile
    promotion: PromotionSettings
    needs_approval: bool


class RetrainingPlan(NamedTuple):
    """A retraining run: whether there is enough new data to train, and the stages' settings."""

    run: RunContext
    profile: Profile
    proceed: bool
    skip_reason: str  # empty when `proceed`
    champion: str  # e.g. "models:/hybridflyte-policy/7"
    ingest: IngestSettings
    audit_profile: Profile
    reward_audit: RewardAuditSettings
    rl: RLSettings
    evaluation: EvaluationSettings
    promotion: PromotionSettings
    needs_approval: bool
    config_digest: str
