"""All stages together: pairs, evaluation, promotion, retraining, tracking, and the whole."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from engine.config.base import Section
from engine.config.data import DataConfig, ModelConfig
from engine.config.rl import RewardConfig, RLConfig
from engine.config.rollout_engines import AgentConfig, MultiTurnConfig
from engine.config.training import (
    ParallelConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)

GuardMetric = Literal["pass_at_1", "sampled", "majority", "format_rate"]


class GuardConfig(Section):
    """Problems on which the new model must not be worse."""

    dataset: str = Field("", description="Problems of this evaluation set; empty: of all")
    data_source: str = Field("", description="Only those of this source; empty: all of them")
    metric: GuardMetric = "pass_at_1"
    """Share of right greedy, sampled or majority answers, or of completions in the right format"""
    tolerance: float = Field(0.0, ge=0, lt=1)
    """How far below 0 the lower end of the change's interval may be"""

    @property
    def name(self) -> str:
        """Return its name in messages and evidence, e.g. `pass_at_1 of gsm8k`."""
        where = " in ".join(filter(None, (self.data_source, self.dataset)))
        return f"{self.metric} of {where or 'all problems'}"


class ContaminationConfig(Section):
    """How many test problems may be known from training."""

    max_share: float = Field(0.01, ge=0, le=1, description="Largest share of test prompts")
    ngram: int = Field(13, ge=2, description="Words in a row that are compared")
    overlap: float = Field(0.8, gt=0, le=1)
    """A prompt counts when this share of its n-grams was trained on"""


class RewardModelGateConfig(Section):
    """When a reward model becomes the champion among reward models."""

    model_name: str = Field("hybridflyte-reward-model", min_length=1, description="Model in MLflow")
    alias: str = Field("champion", min_length=1, description="Alias that a promotion moves")
    minimum_pairs: int = Field(100, ge=1)
    """Held-out pairs that a promotion needs"""
    minimum_accuracy: float = Field(0.5, ge=0, lt=1)
    """The lower end of the share of held-out pairs that it ranks right must be above this"""
    minimum_gain: float = Field(0.0, ge=-1, lt=1)
    """The lower end of the gain over the champion, on the same pairs, must be above this"""


class RecheckConfig(Section):
    """How the gate holds recorded rows against what the models say now."""

    problems: int = Field(32, ge=0)
    """Problems of each set that decides, drawn at random, that candidate and baseline answer again
    before a promotion; 0: none"""
    rounding: float | None = Field(None, ge=0, lt=1)
    """Share of verdicts that rounding on another machine may turn; none: 0.001 without a GPU
    (float32), 0.02 with one (bfloat16)"""


class PromoteConfig(Section):
    """When a model becomes the champion."""

    model_name: str = Field("hybridflyte-policy", min_length=1, description="Model in MLflow")
    alias: str = Field("champion", min_length=1, description="Alias that a promotion moves")
    dataset: str = Field("test", min_length=1)
    """What decides: test, a name of data.evaluation_sets, or all: every one must pass"""
    minimum_problems: int = Field(100, ge=1)
    """Different problems that the evaluation set must have for a promotion"""
    minimum_gain: float = Field(0.0, ge=0, lt=1, description="The gain's lower end must exceed it")
    bootstrap: bool = Field(False, description="Let the first champion in without a gain over SFT")
    minimum_score: float | None = Field(None, ge=0, le=1)
    """Least greedy pass@1 of the new model, at the lower end of its interval"""
    guards: tuple[GuardConfig, ...] = Field((), description="Where it must not be worse")
    max_kl: float | None = Field(None, gt=0)
    """Largest mean KL to the reference over the last tenth of the model's RL steps"""
    max_length_ratio: float | None = Field(None, gt=0)
    """Largest mean response length over the champion's, at the upper end of the interval"""
    contamination: ContaminationConfig = ContaminationConfig()
    recheck: RecheckConfig = RecheckConfig()
    require_reward_audit: bool = False
    """Whether the scorer must pass the reward audit; RL doesn't begin with one that fails"""
    approval: Literal["none", "required"] = Field("none", description="Whether a person must agree")
    reward_model: RewardModelGateConfig = RewardModelGateConfig()


class RetrainConfig(Section):
    """Which new data a scheduled run ingests."""

    path: str = ""
    """Folder or s3:// prefix of dated folders (2026-11-20/ or dt=2026-11-20/) with .parquet or
    .jsonl files of RL rows"""
    minimum_rows: int = Field(64, ge=1, description="Fewer new problems wait for the next run")
    lookback_days: int = Field(30, ge=1)
    """Older dated folders are not read, even if data arrived late"""
    replay: float = Field(0.25, ge=0, lt=1)
    """Share of the prompts that the champion was trained on before"""


def _names(value: object) -> object:
    """One name or several; `jsonl` is verl's for the file."""
    names = value if isinstance(value, list | tuple) else [value]
    return tuple("file" if name == "jsonl" else name for name in names)


_Logger = Literal["console", "file", "mlflow", "tensorboard", "wandb"]
Loggers = Annotated[tuple[_Logger, ...], BeforeValidator(_names)]


class TrackingConfig(Section):
    """Where runs are recorded."""

    experiment: str = Field("hybridflyte", min_length=1)
    """MLflow experiment, project of Weights & Biases"""
    logger: Loggers = ("console",)
    """Where the steps of the warm start and RL go besides MLflow, which has them all: console, file
    (or jsonl), tensorboard, wandb"""
    price_per_hour: float = Field(0.0, ge=0)
    """What all machines of RL cost in an hour, in any currency, for the estimate of a dry run"""


class ScoredRolloutConfig(Section):
    """How completions of a model are decoded and scored."""

    engine: str = Field("native", description="Rollout engine: native or vllm")
    parallel: ParallelConfig | None = None
    """dp copies share the prompts, each on tp ranks; none: copies on all GPUs of the machine"""
    reward: RewardConfig | None = None
    """What scores completions; none: RL's reward"""
    plugins: tuple[str, ...] = Field((), description="Your modules that register it; none: RL's")
    named_content: str = Field("", description="Digest of your modules; workflows fill it")

    @property
    def scorer(self) -> RewardConfig:
        """Return the reward that scores; GSM8K's rule where none is set."""
        return self.reward or RewardConfig()


class PairsConfig(ScoredRolloutConfig):
    """The best and the worst of n completions of the policy, or pairs and labelled rows of files.

    `columns`, `templates`, `bad_rows`, `validation_size` and `too_long` are for files, the other
    settings for rollouts.
    """

    path: str = ""
    """File, folder, s3://… or hf://ID with preferences; empty: rollouts of the policy on the
    prompts of data, ranked by a reward"""
    columns: dict[str, str] = Field({})
    """Our column (prompt, chosen, rejected, margin; completion, label): theirs"""
    templates: dict[str, str] = Field({})
    """Our column: a Jinja2 template of it over the files' columns"""
    bad_rows: Literal["fail", "drop"] = "fail"
    """Rows that are no preference: refuse them by number, or leave them out"""
    too_long: Literal["fail", "drop"] = "fail"
    """Rows over the model's context: refuse them, or leave them out"""
    validation_size: int = Field(200, ge=0)
    """Rows of files to hold out, all those of a prompt together"""
    prompts: int = Field(0, ge=0, description="Prompts of the split train; 0: all")
    n: int = Field(8, ge=2, description="Completions per prompt, from which pairs are made")
    temperature: float = Field(1.0, gt=0, description="Temperature of ranked completions")
    pairs_a_prompt: int = Field(1, ge=1)
    """Most pairs per prompt: the best with the worst, the second best with the second worst, …;
    for labels (KTO) most good rows and most bad rows"""
    margin: float = Field(0.0, ge=0, description="A pair's two rewards differ by more than this")
    rounds: int = Field(1, ge=1)
    """Times to sample, rank and update, each with the policy of the round before"""

    def contradictions(self) -> Iterator[str]:
        if self.path and self.rounds > 1:
            yield (
                f"pairs.rounds={self.rounds} with pairs.path={self.path!r}: later rounds learn "
                "from rollouts of the policy; leave pairs.path empty, or set pairs.rounds=1"
            )
        if not self.path:
            for name in ("columns", "templates"):
                if getattr(self, name):
                    yield f"pairs.{name} has no effect without pairs.path; give it, or remove this"


class LMEvalConfig(Section):
    """Tasks of the lm-evaluation-harness, run on both models beside the test split."""

    tasks: tuple[str, ...] = Field((), description="Names of its tasks; none: it is not run")
    include_path: str = Field("", description="Folder with task files (YAML) of your own")
    num_fewshot: int | None = Field(None, ge=0, description="Examples per prompt; none: the task's")
    limit: int = Field(0, ge=0, description="Documents per task; 0: all")
    batch_size: int = Field(8, ge=1, description="Documents in a batch of the harness")
    apply_chat_template: bool = Field(False, description="Put prompts into the model's template")
    offline: bool = Field(True, description="Use only data on this machine, not the hub")
    python: str = Field("", description="A Python that has lm_eval; empty: the run's own")
    timeout_s: float = Field(6 * 3600.0, gt=0, description="Longest run on one model, in seconds")
    named_content: str = Field("", description="Digest of include_path; workflows fill it")


class EvaluateConfig(ScoredRolloutConfig):
    """How the two models are compared."""

    k: int = Field(4, ge=1, description="pass@k")
    samples: int = Field(4, ge=1, description="Samples per problem for pass@k and majority vote")
    temperature: float = Field(0.8, gt=0, description="Temperature of pass@k and majority vote")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Level of the intervals")
    map_parts: int = Field(1, ge=1, description="Machines that share the problems (a map task)")
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the ranks to start")
    step_timeout_s: float = Field(7200.0, gt=0, description="Deadline for one call to a rank")
    lm_eval: LMEvalConfig = LMEvalConfig()
    multi_turn: MultiTurnConfig | None = None
    """Episodes of several turns; none: where RL's rollout has them"""
    agent: AgentConfig | None = None
    """Their environment and its limits; none: rollout.agent of RL"""

    @property
    def runs_episodes(self) -> bool:
        """Tell whether a problem is an episode with an environment."""
        return self.multi_turn is not None and self.multi_turn.enable

    @property
    def environments(self) -> AgentConfig:
        """Return the environment of episodes, and its limits."""
        return self.agent or AgentConfig()

    def contradictions(self) -> Iterator[str]:
        if self.samples < self.k:
            yield f"evaluate.samples={self.samples} must be at least evaluate.k={self.k}"


class LineageConfig(Section):
    """Whose artifacts count."""

    require_signatures: bool = False
    """The gate refuses what is not signed by one of the public keys"""
    public_keys: tuple[str, ...] = ()
    """Ed25519 public keys (hex), in addition to those in $HYBRIDFLYTE_PUBLIC_KEYS"""


class PipelineConfig(Section):
    """The whole pipeline: the one input of all workflows that train; each reads its sections."""

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
    lineage: LineageConfig = LineageConfig()
    retrain: RetrainConfig = RetrainConfig()
    tracking: TrackingConfig = TrackingConfig()

    def contradictions(self) -> Iterator[str]:
        names = ["test", *(evaluation_set.name for evaluation_set in self.data.evaluation_sets)]
        judged = {f"promote.guards ({g.name})": g.dataset for g in self.promote.guards if g.dataset}
        if self.promote.dataset != "all":
            judged["promote.dataset"] = self.promote.dataset
        for setting, name in judged.items():
            if name not in names:
                yield (
                    f"{setting} names the evaluation set {name!r}, and there are "
                    f"{', '.join(names)}; add it to data.evaluation_sets, or name one of these"
                )

    def evaluation(self) -> EvaluateConfig:
        """Return `evaluate` with RL's reward, plugins and episodes where it has none."""
        section, rollout = self.evaluate, self.rl.rollout
        filled: dict[str, object] = {
            "reward": section.reward or self.rl.reward,
            "plugins": section.plugins or self.rl.plugins,
        }
        if section.multi_turn is None and rollout.multi_turn.enable:
            filled["multi_turn"] = rollout.multi_turn
        if section.agent is None and (section.runs_episodes or "multi_turn" in filled):
            filled["agent"] = rollout.agent
        return section.model_copy(update=filled)

    def ranking(self) -> PairsConfig:
        """Return `pairs` with RL's reward and plugins where it names none."""
        rl, pairs = self.rl, self.pairs
        update = {"reward": pairs.reward or rl.reward, "plugins": pairs.plugins or rl.plugins}
        return pairs.model_copy(update=update)
