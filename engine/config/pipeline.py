"""All stages together: evaluation, and the whole."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from engine.config.agents import AgentConfig, MultiTurnConfig
from engine.config.base import Section
from engine.config.data import DataConfig, ModelConfig
from engine.config.pairs import PairsConfig
from engine.config.parallel import ParallelConfig
from engine.config.promotion import PromoteConfig
from engine.config.retrain import RetrainConfig
from engine.config.reward import RewardConfig
from engine.config.rl import RLConfig
from engine.config.tracking import TrackingConfig
from engine.config.training import (
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)


class LMEvalConfig(Section):
    """Tasks of the lm-evaluation-harness, run on both models beside the test split."""

    tasks: tuple[str, ...] = Field((), description="Names of its tasks; none: it is not run")
    include_path: str = Field("", description="Folder with task files (YAML) of your own")
    num_fewshot: int | None = Field(
        None, ge=0, description="Examples in a prompt; none: the task's"
    )
    limit: int = Field(0, ge=0, description="Documents a task; 0: all")
    batch_size: int = Field(8, ge=1, description="Documents in a batch of the harness")
    apply_chat_template: bool = Field(False, description="Put prompts into the model's template")
    offline: bool = Field(True, description="Take data from this machine alone, not from the hub")
    python: str = Field("", description="A Python that has lm_eval; empty: the run's own")
    timeout_s: float = Field(6 * 3600.0, gt=0, description="Longest run on one model, in seconds")
    named_content: str = Field(
        "", description="Digest of include_path, for the cache; workflows fill it"
    )


class EvaluateConfig(Section):
    """How the two models are compared."""

    k: int = Field(4, ge=1, description="pass@k")
    samples: int = Field(4, ge=1, description="Samples a problem for pass@k and majority vote")
    temperature: float = Field(
        0.8, gt=0, description="Sampling temperature of pass@k and majority vote"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Level of the intervals")
    bootstrap_samples: int = Field(
        10000, ge=100, description="Resamples of the problems for the paired interval"
    )
    engine: str = Field("native", description="Rollout engine: native or vllm")
    parallel: ParallelConfig | None = Field(
        None,
        description="dp copies of the model share the problems, each on tp ranks; none: copies on "
        "all GPUs of the machine",
    )
    map_parts: int = Field(
        1, ge=1, description="Machines that share the problems, by a map task of Flyte"
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the ranks to be up")
    step_timeout_s: float = Field(7200.0, gt=0, description="Deadline for one call to a rank")
    lm_eval: LMEvalConfig = LMEvalConfig()
    multi_turn: MultiTurnConfig | None = Field(
        None, description="Problems are played as episodes; none: where RL's rollout does so"
    )
    agent: AgentConfig | None = Field(
        None, description="What they are played with; none: rollout.agent of RL"
    )
    reward: RewardConfig | None = Field(
        None, description="What tells right answers from wrong ones; none: the reward of RL"
    )
    plugins: tuple[str, ...] = Field(
        (), description="Your modules that register the reward; none: those of RL"
    )
    named_content: str = Field(
        "", description="Digest of your modules, for the cache; workflows fill it"
    )

    @property
    def scorer(self) -> RewardConfig:
        """The reward that scores; GSM8K's rule where none is given."""
        return self.reward or RewardConfig()

    @property
    def plays_episodes(self) -> bool:
        """Whether a problem is an episode with an environment."""
        return self.multi_turn is not None and self.multi_turn.enable

    @property
    def environments(self) -> AgentConfig:
        """What episodes are played with."""
        return self.agent or AgentConfig()

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.samples < self.k:
            raise ValueError(
                f"evaluate.samples={self.samples} must be at least evaluate.k={self.k}"
            )
        return self


class PipelineConfig(Section):
    """All of it: the one input of `workflows/rlhf.py:rlhf` and of the others that train.

    Each reads its own sections: `pairs`, `preference` and `reward_model` those of
    `workflows/preference.py`.
    """

    seed: int = Field(0, ge=0, description="Seed of data, weights, batches and samples")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    sft: SFTConfig = SFTConfig()
    pairs: PairsConfig = PairsConfig()
    preference: PreferenceTrainingConfig = PreferenceTrainingConfig()
    reward_model: RewardModelTrainingConfig = RewardModelTrainingConfig()
    rl: RLConfig = RLConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    promote: PromoteConfig = PromoteConfig()
    retrain: RetrainConfig = RetrainConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _judged_sets_are_there(self) -> Self:
        names = ["test", *(one.name for one in self.data.evaluation_sets)]
        asked = {"promote.dataset": self.promote.dataset} if self.promote.dataset != "all" else {}
        asked |= {f"promote.guards ({g.name})": g.dataset for g in self.promote.guards if g.dataset}
        for setting, name in asked.items():
            if name not in names:
                raise ValueError(
                    f"{setting} names the evaluation set {name!r}, and there are "
                    f"{', '.join(names)}; add it to data.evaluation_sets, or name one of these"
                )
        return self

    def evaluation(self) -> EvaluateConfig:
        """The section `evaluate`, with RL's reward, plugins and episodes where it has none."""
        own, rollout = self.evaluate, self.rl.rollout
        filled: dict[str, object] = {
            "reward": own.reward or self.rl.reward,
            "plugins": own.plugins or self.rl.plugins,
        }
        if own.multi_turn is None and rollout.multi_turn.enable:
            filled["multi_turn"] = rollout.multi_turn
        if own.agent is None and (own.plays_episodes or "multi_turn" in filled):
            filled["agent"] = rollout.agent
        return own.model_copy(update=filled)

    def ranking(self) -> PairsConfig:
        """The section `pairs`, by RL's reward and plugins where it names none of its own."""
        own = self.pairs
        reward, plugins = own.reward or self.rl.reward, own.plugins or self.rl.plugins
        return own.model_copy(update={"reward": reward, "plugins": plugins})
