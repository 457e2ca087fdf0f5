"""How rewards or a teacher become a loss: advantages, KL and distillation."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from engine.config.base import Options, Section


class TeacherConfig(Section):
    """One teacher: a model that is loaded, or a server that gives log-probs of prompts."""

    model: str = Field("", description="Model folder or hub id")
    url: str = Field("", pattern=r"^$|^https?://[^/\s]+")
    """In place of a model: a server with prompt_logprobs (vLLM's, or engine.serve), e.g.
    http://10.0.0.7:8000, without /v1"""
    tokenizer: str = ""
    """url: folder of the served model's tokenizer, to be compared; empty: the policy's own"""
    served_model: str = Field("", description="url: its name there; empty: the server is asked")
    api_key_env: str = Field("", description="url: environment variable with the server's key")
    concurrency: int = Field(16, ge=1, description="url: requests under way at once")
    timeout_s: float = Field(1800.0, gt=0, description="url: deadline for one batch")
    request_timeout_s: float = Field(600.0, gt=0, description="url: deadline of one request")
    max_retries: int = Field(5, ge=0, description="url: of a request that failed")
    weight: float = Field(1.0, gt=0, description="Share in the loss, over the sum of all weights")
    rows: str = Field("", description="With route_by: that column's value in rows that it teaches")

    def contradictions(self) -> Iterator[str]:
        if bool(self.model) == bool(self.url):
            yield "a teacher has a model (folder or hub id) or a url, and not both"


class DistillationConfig(Section):
    """Dataflow distillation: the loss, and several teachers."""

    loss: Literal["policy_gradient", "reverse_kl", "forward_kl", "jsd"] = "policy_gradient"
    """policy_gradient: of the reverse KL, by the sampled tokens alone; the others compare
    distributions token by token"""
    beta: float = Field(0.5, gt=0, lt=1)
    """jsd: near 0 as forward_kl, near 1 as reverse_kl"""
    top_k: int = Field(0, ge=0)
    """Likeliest tokens of the teacher to compare, the others as one class; 0: all tokens"""
    teachers: tuple[TeacherConfig, ...] = ()
    """Several teachers, or one behind a url; none: algorithm.teacher"""
    route_by: str = ""
    """Column that chooses a row's teacher (its rows=…); empty: all teach every row, by weight"""

    def contradictions(self) -> Iterator[str]:
        names = [teacher.rows for teacher in self.teachers]
        if self.route_by and (not all(names) or len(set(names)) < len(names) or not names):
            yield (
                f"route_by={self.route_by!r} chooses a teacher by a column's value, and teachers "
                f"have rows={names}; give each another value"
            )
        if not self.route_by and any(names):
            yield f"teachers have rows={names}, which need route_by: the column with these values"


class KLControlConfig(Section):
    """Coefficient of a KL penalty inside the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """A fixed coefficient, or one that steers the KL to target_kl"""
    kl_coef: float = Field(0.001, ge=0)
    """Coefficient of the KL in the reward, at the start where it adapts"""
    horizon: int = Field(10000, ge=1, description="Samples over which an adaptive one reacts")
    target_kl: float = Field(0.1, gt=0, description="KL that an adaptive one steers to")


class RolloutCorrectionConfig(Section):
    """Corrects for tokens that were sampled by another policy than the one that learns."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the importance weights; None: no weights"""
    rollout_is_threshold: str | float = 2.0
    """A number truncates weights (TIS); 'low_high' masks outside (IcePop)"""
    rollout_is_batch_normalize: bool = Field(False, description="Divide by the mean weight")
    rollout_rs: str | None = None
    """Rejection criteria, e.g. token_k1,seq_mean_k3; None: no rejection"""
    rollout_rs_threshold: str | float | None = None
    """Bounds of the criteria, e.g. '0.5_2.0,0.01'"""

    @property
    def enabled(self) -> bool:
        """Tell whether anything is corrected."""
        return self.rollout_is is not None or self.rollout_rs is not None


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: groups without signal are sampled again from other prompts."""

    enable: bool = Field(False, description="Replace groups whose rewards are all equal (DAPO)")
    metric: Literal["score", "reward"] = "score"
    """What must differ in a group: the raw score, or the shaped reward"""
    max_num_gen_batches: int = Field(10, ge=1, description="Most rollouts per step")


class PreferenceConfig(Section):
    """Online DPO: how a pair's loss is made. An option that is None has the loss's own default."""

    loss: str = "sigmoid"
    """Name in the registry of preference losses, or package.module:name"""
    beta: float | None = Field(None, gt=0, description="Penalty for leaving the reference")
    label_smoothing: float | None = Field(None, ge=0, lt=0.5, description="Share of wrong labels")
    length_normalize: bool | None = None
    """Average log-probs over a completion's tokens instead of summing"""
    simpo_gamma: float | None = Field(None, ge=0, description="SimPO's margin")
    sft_weight: float | None = Field(None, ge=0)
    """likelihood: weight of the chosen response's language-model loss"""
    options: Options = Field({}, description="Options of a loss of your own, by name")


class AlgorithmConfig(Section):
    """How rewards become advantages."""

    dataflow: str = "auto"
    """Name in the registry of dataflows, or package.module:function; auto: the estimator's"""
    dataflow_options: Options = Field({}, description="Options of a dataflow of your own, by name")
    adv_estimator: str = "grpo"
    """Name in the registry of advantage estimators, or package.module:name"""
    options: Options = Field({}, description="Options of an estimator of your own, by name")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda")
    whiten: bool = Field(True, description="GAE's advantages get mean 0 and variance 1")
    norm_adv_by_std_in_grpo: bool = Field(True, description="False: Dr. GRPO")
    epsilon: float | None = Field(None, gt=0, description="None: the estimator's own")
    f_norm: float = Field(1.0, gt=0, description="GPG's divisor")
    gdpo_reward_weights: tuple[float, ...] | None = None
    """GDPO: a weight for each reward component; None: 1 each"""
    turn_weight: float = Field(1.0, ge=0)
    """grpo_turn: weight of a turn's own advantage beside the episode's"""
    handle_zero_tail: bool = True
    """optimal_token_baseline: tokens that only one completion of a group reaches have baseline 0"""
    mask_truncated: bool = False
    """Don't learn from completions that a length limit cut; their rewards stay in their group's
    statistics (DAPO's overlong filtering)"""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef times the KL of each token from its reward"""
    kl_penalty: str = Field("k1", description="KL estimator inside the reward")
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    preference: PreferenceConfig = PreferenceConfig()
    teacher: str = Field("", description="Model folder that dataflow distillation learns from")
    distillation: DistillationConfig = DistillationConfig()

    @property
    def teachers(self) -> tuple[TeacherConfig, ...]:
        """Return all teachers: `teacher`, or `distillation.teachers`."""
        alone = (TeacherConfig(model=self.teacher),) if self.teacher else ()
        return alone or self.distillation.teachers

    @property
    def teacher_models(self) -> dict[str, str]:
        """Return the models that teachers are loaded from, by setting."""
        if self.teacher:
            return {"algorithm.teacher": self.teacher}
        several = enumerate(self.distillation.teachers)
        return {
            f"algorithm.distillation.teachers[{i}].model": t.model for i, t in several if t.model
        }

    def contradictions(self) -> Iterator[str]:
        if self.teacher and self.distillation.teachers:
            yield f"teacher={self.teacher!r} with distillation.teachers; put it among these"
