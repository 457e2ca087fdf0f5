"""Every knob of the pipeline: frozen models with defaults, bounds and help texts.

Where verl has the same knob it has the same name. A section is what one stage reads, so that a
change in it reruns that stage and what follows it. Settings that contradict one another are
refused here, before anything is computed. Nothing here reads files other than configurations.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )


class DataConfig(Section):
    """What to learn from."""

    source: Literal["arithmetic", "gsm8k"] = Field("arithmetic", description="Where rows come from")
    path: str = Field("", description="Folder, s3:// prefix or hub id (gsm8k only)")
    difficulty: int = Field(2, ge=1, le=5, description="Steps and sizes of arithmetic problems")
    sft_size: int = Field(16384, ge=1, description="Rows for the warm start (0 < rows)")
    train_size: int = Field(4096, ge=1, description="Prompts for RL")
    validation_size: int = Field(256, ge=1, description="Rows for validation")
    test_size: int = Field(512, ge=1, description="Held-out rows, seen in no stage but evaluation")
    max_prompt_length: int = Field(0, ge=0, description="Longest prompt in tokens; 0: as they come")
    max_response_length: int = Field(64, ge=1, description="Longest completion in tokens")
    vocab_size: int = Field(512, ge=64, description="Size of the BPE vocabulary trained here")


class ModelConfig(Section):
    """The policy: a Hugging Face folder, or a small Qwen2-shaped model made from scratch."""

    path: str = Field(
        "", description="Hugging Face causal LM folder or hub id; empty: from scratch"
    )
    hidden_size: int = Field(96, ge=8)
    intermediate_size: int = Field(256, ge=8)
    num_hidden_layers: int = Field(3, ge=1)
    num_attention_heads: int = Field(3, ge=1)
    num_key_value_heads: int = Field(1, ge=1)
    max_position_embeddings: int = Field(1024, ge=16, description="Context, in tokens")
    initializer_range: float = Field(0.08, gt=0, description="Spread of random initial weights")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Dtype of the weights")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        return self


class OptimConfig(Section):
    """AdamW with a warm-up and a schedule."""

    lr: float = Field(1e-3, gt=0, description="Peak learning rate")
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the gradient's mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the gradient's square")
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of the steps spent warming up")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Where the schedule ends, over lr")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm")


class SFTConfig(Section):
    """The warm start: supervised fine-tuning on prompt/response rows."""

    epochs: float = Field(5.0, gt=0)
    max_steps: int = Field(0, ge=0, description="Stop after so many steps; 0: by epochs")
    train_batch_size: int = Field(32, ge=1, description="Rows an optimizer step")
    max_tokens_per_micro_batch: int = Field(8192, ge=64)
    validate_every: int = Field(200, ge=1, description="Steps between validation losses")
    optim: OptimConfig = OptimConfig(lr=2e-3, schedule="cosine")
    threads: int = Field(0, ge=0, description="CPU threads; 0: all cores")


class KLControlConfig(Section):
    """Coefficient of a KL penalty inside the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0)
    horizon: int = Field(10000, ge=1, description="Samples over which an adaptive one reacts")
    target_kl: float = Field(0.1, gt=0, description="KL that an adaptive one steers to")


class AlgorithmConfig(Section):
    """How rewards become advantages."""

    adv_estimator: str = Field("grpo", description="Name in the registry of advantage estimators")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda")
    norm_adv_by_std_in_grpo: bool = Field(True, description="False: Dr. GRPO")
    use_kl_in_reward: bool = False
    kl_penalty: str = Field("k1", description="KL estimator inside the reward")
    kl_ctrl: KLControlConfig = KLControlConfig()


class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: str = Field("vanilla", description="Name in the registry of policy losses")


class ActorConfig(Section):
    """The policy's update."""

    optim: OptimConfig = OptimConfig(lr=5e-4, weight_decay=0.0)
    ppo_mini_batch_size: int = Field(0, ge=0, description="Completions an optimizer step; 0: all")
    ppo_epochs: int = Field(1, ge=1)
    max_tokens_per_micro_batch: int = Field(16384, ge=64)
    old_log_probs: Literal["auto", "rollout", "trainer"] = Field(
        "auto", description="As sampled, or by a forward pass; auto: as sampled where they agree"
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    clip_ratio: float | None = Field(None, gt=0, lt=1, description="None: the loss's own (0.2)")
    clip_ratio_low: float | None = Field(None, gt=0, lt=1, description="None: clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0, description="None: clip_ratio")
    clip_ratio_c: float | None = Field(None, gt=1, description="Dual clip; None: the loss's own")
    loss_agg_mode: str | None = Field(
        None, description="How token losses become one number; None: the loss's own, or token-mean"
    )
    entropy_coeff: float = Field(0.0, ge=0)
    use_kl_loss: bool = Field(True, description="KL to the reference as a term of the loss")
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = Field("low_var_kl", description="KL estimator in the loss")


class CriticConfig(Section):
    """The value model of PPO."""

    optim: OptimConfig = OptimConfig(lr=1e-3, weight_decay=0.0)
    ppo_mini_batch_size: int = Field(0, ge=0, description="Completions an optimizer step; 0: all")
    ppo_epochs: int = Field(2, ge=1)
    max_tokens_per_micro_batch: int = Field(16384, ge=64)
    cliprange_value: float = Field(0.5, gt=0)


class RolloutConfig(Section):
    """How completions are sampled."""

    engine: str = Field("native", description="native or vllm")
    n: int = Field(8, ge=1, description="Completions a prompt")
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_num_seqs: int = Field(512, ge=1, description="Completions decoded at once")
    kv_cache_memory_mb: int = Field(256, ge=16, description="vLLM's KV cache (CPU)")


class RewardConfig(Section):
    """What a completion is worth."""

    name: str = Field(
        "answer_match", description="Name in the registry, or package.module:function"
    )
    timeout_s: float = Field(30.0, gt=0, description="Deadline for scoring one batch")


class TrainerConfig(Section):
    """The RL loop."""

    total_training_steps: int = Field(80, ge=1)
    train_batch_size: int = Field(128, ge=1, description="Prompts a step")
    test_freq: int = Field(20, ge=1, description="Steps between greedy validations")
    placement: Literal["ray", "local"] = Field("ray", description="Ray actors, or this process")
    threads: int = Field(0, ge=0, description="CPU threads of a worker; 0: all cores")
    start_timeout_s: float = Field(120.0, gt=0, description="Deadline for the workers to be up")
    step_timeout_s: float = Field(1800.0, gt=0, description="Deadline for one call to a worker")


class RLConfig(Section):
    """Reinforcement learning from the warm start."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def recompute_old_log_probs(self) -> bool:
        """Whether old log-probs come from the trainer's forward, not from sampling.

        Truncated sampling (top-k, top-p) renormalises, so its log-probs are not the policy's.
        """
        mode = self.actor.old_log_probs
        truncated = self.rollout.top_k > 0 or self.rollout.top_p < 1.0
        return mode == "trainer" or (mode == "auto" and truncated)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.algorithm.adv_estimator.startswith("grpo") and self.rollout.n < 2:
            raise ValueError(
                "rollout.n=1 with algorithm.adv_estimator=grpo: an advantage is relative to the "
                "prompt's other completions; set rollout.n to 2 or more, or use adv_estimator=gae"
            )
        rows = self.trainer.train_batch_size * self.rollout.n
        for role, size in (
            ("actor", self.actor.ppo_mini_batch_size),
            ("critic", self.critic.ppo_mini_batch_size),
        ):
            if size > rows:
                raise ValueError(
                    f"{role}.ppo_mini_batch_size={size} is more than the {rows} completions of a "
                    "step (trainer.train_batch_size × rollout.n); lower it, or set 0 for all"
                )
        return self


class EvaluateConfig(Section):
    """How the two models are compared."""

    k: int = Field(4, ge=1, description="pass@k")
    samples: int = Field(4, ge=1, description="Samples a problem for pass@k and majority vote")
    temperature: float = Field(0.8, gt=0)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    bootstrap_samples: int = Field(10000, ge=100)
    engine: str = Field("native", description="native or vllm")

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.samples < self.k:
            raise ValueError(
                f"evaluate.samples={self.samples} must be at least evaluate.k={self.k}"
            )
        return self


class PromoteConfig(Section):
    """When a model becomes the champion."""

    model_name: str = Field("hybridflyte-policy", min_length=1)
    alias: str = Field("champion", min_length=1)
    minimum_gain: float = Field(
        0.0, ge=0, lt=1, description="Lower end of the interval must top it"
    )


class TrackingConfig(Section):
    """Where runs are recorded."""

    experiment: str = Field("hybridflyte", min_length=1)


class PipelineConfig(Section):
    """All of it: the one input of `workflows/rlhf.py:rlhf`."""

    seed: int = Field(0, ge=0)
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    promote: PromoteConfig = PromoteConfig()
    tracking: TrackingConfig = TrackingConfig()


def digest(section: BaseModel) -> str:
    """Return the SHA-256 (hex) of a section's values, whatever the order of its keys."""
    canonical = json.dumps(section.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse_config(values: dict[str, Any]) -> PipelineConfig:
    """Build a PipelineConfig; raise ConfigError with one line a wrong key."""
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def load_config(path: str | Path) -> PipelineConfig:
    """Read a YAML or JSON file; raise ConfigError when it is missing, malformed or wrong."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"config file {path} does not exist; give the path of a YAML file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} can't be read: {error}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(
            f"config file {path} holds a {type(values).__name__}; its top level must be sections "
            "such as `data:` and `rl:`"
        )
    return parse_config(values or {})


def explain(error: ValidationError) -> str:
    """Turn pydantic's report into sentences that name the field, the value and the way out."""
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {field!r}; check its spelling and its section")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        elif field:
            lines.append(f"{field}={item['input']!r}: {item['msg']}")
        else:
            lines.append(item["msg"])
    return "; ".join(lines)
