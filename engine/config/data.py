"""What to learn from, and the policy's shape."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from engine.config.base import Options, Section


class SamplingConfig(Section):
    """Which prompts a step gets, and how often."""

    weights: dict[str, float] = Field({})
    """data_source: its share of the prompts; none: every row once an epoch"""
    curriculum: str = ""
    """Column with each row's difficulty, e.g. extra_info.level: easy rows first"""
    pass_rate: tuple[float, float] | None = None
    """Least and largest share of right completions, e.g. [0.1, 0.9]: an epoch has the prompts whose
    share was in this range when they were last sampled, and those never sampled"""
    pass_rate_recheck: int = Field(3, ge=0)
    """Epochs after which a prompt outside pass_rate is tried again; 0: never"""
    max_uses: int = Field(0, ge=0, description="Most draws of a prompt in a run; 0: no limit")

    def contradictions(self) -> Iterator[str]:
        if self.pass_rate is not None and not 0 <= self.pass_rate[0] <= self.pass_rate[1] <= 1:
            yield f"sampling.pass_rate={self.pass_rate} must be two shares, the lower first"
        if self.pass_rate is None and self.pass_rate_recheck != 3:
            yield f"sampling.pass_rate_recheck={self.pass_rate_recheck} needs sampling.pass_rate"


class ColumnsConfig(Section):
    """How rows of files become conversations."""

    columns: dict[str, str] = Field({})
    """Our column: the files' column, e.g. {prompt: question, ground_truth: answer}; info.answer is
    the field answer of the column info"""
    templates: dict[str, str] = Field({})
    """Our column: a Jinja2 template of it over the files' columns, e.g. {prompt: '{{ question }}
    Answer with a number.'}"""
    system_prompt: str = Field("", description="System message of prompts that have none")
    apply_chat_template_kwargs: Options = Field({})
    """Variables of the model's chat template, e.g. {enable_thinking: false}"""
    bad_rows: Literal["fail", "drop"] = "fail"
    """Rows that can't be read or break the contract: refuse them by number, or leave them out"""


class RowsConfig(ColumnsConfig):
    """How rows of files become prompts, and which rows are taken."""

    data_source: str = Field("", description="data_source of rows that have none; empty: file")
    sampling: SamplingConfig = SamplingConfig()
    max_prompt_length: int = Field(0, ge=0, description="Longest prompt in tokens; 0: no limit")
    max_response_length: int = Field(64, ge=1, description="Longest completion in tokens")
    control_tokens: Literal["escape", "drop", "fail"] = "escape"
    """Rows whose text spells control tokens such as <|im_end|>: keep that as plain text, leave the
    rows out, or refuse them"""


class DecontaminateConfig(Section):
    """Which training rows are left out because held-out rows contain them."""

    ngram: int = Field(13, ge=2, description="Words in a row that are compared")
    overlap: float = Field(0.8, ge=0, le=1)
    """A row with this share of a held-out prompt's n-grams is left out; 0: only the same words"""
    against: tuple[str, ...] = ()
    """Evaluation sets, held out besides the splits: files, s3://… or hf://ID"""


class EvaluationSetConfig(Section):
    """Problems that models are judged on besides the split `test`, and never trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="e.g. math500; not test or all")
    path: str = Field(min_length=1)
    """File, folder, s3://… or hf://ID: its test split, if it has one"""
    columns: dict[str, str] = Field({}, description="As data.columns; without both: those of data")
    templates: dict[str, str] = Field({}, description="As data.templates")
    data_source: str = Field("", description="data_source of rows that have none; empty: the name")
    size: int = Field(0, ge=0, description="Rows, drawn by seed; 0: all")

    @property
    def split(self) -> str:
        """Return the name of its table in a dataset, e.g. `test_math500`."""
        return f"test_{self.name}"


class DataConfig(RowsConfig):
    """What to learn from."""

    source: str = "arithmetic"
    """What the rows come from: arithmetic (problems made up here), gsm8k or math (on the hub, or at
    data.path), files (at data.path), or a class of yours as package.module:name"""
    options: Options = Field({}, description="Options of a source of your own, by name")
    plugins: tuple[str, ...] = ()
    """Your modules that register the source; none: those of RL"""
    path: str = ""
    """files, gsm8k, math: a file, a folder, s3://… or hf://ID; empty: the hub's gsm8k or math"""
    splits: dict[str, str] = Field({})
    """files: our split (train, validation, test): the name of it there, e.g. {test: dev}"""
    difficulty: int = Field(2, ge=1, le=5, description="Steps and sizes of arithmetic problems")
    sft_size: int = Field(16384, ge=0, description="Rows for the warm start; files: 0 is all")
    train_size: int = Field(4096, ge=0, description="Prompts for RL; files: 0 is all")
    validation_size: int = Field(256, ge=1, description="Rows for validation")
    test_size: int = Field(512, ge=1, description="Held-out rows, seen in no stage but evaluation")
    evaluation_sets: tuple[EvaluationSetConfig, ...] = ()
    """Problems to evaluate on besides the split test; held out of training, too"""
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    vocab_size: int = Field(512, ge=64, description="Size of the BPE vocabulary trained here")

    def contradictions(self) -> Iterator[str]:
        names = [evaluation_set.name for evaluation_set in self.evaluation_sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"data.evaluation_sets has the name {twice[0]} twice; rename one"
        if taken := {"test", "all"} & set(names):
            yield f"data.evaluation_sets can't have the name {taken.pop()}; rename it"


class AdapterConfig(Section):
    """Train low-rank adapters and the value head, and leave the rest of the critic as it is."""

    rank: int = Field(0, ge=0, description="Rank of the adapters; 0: train all weights")
    alpha: float = Field(32.0, gt=0, description="An adapter's output is scaled by alpha / rank")
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Modules with an adapter: all but the head, or names like q_proj"""


class LoRAConfig(AdapterConfig):
    """Train low-rank adapters, and leave the model's own weights as they are.

    An adapter's folder as `model.path` is merged into its base, and that is what training starts
    from, with new adapters if `rank` asks for them; with `from_folder` its own adapters are trained
    on, and the reference is their base.
    """

    from_folder: bool = False
    """Train on the adapters in model.path: their rank, alpha and modules"""
    quantize: Literal["", "nf4", "int8"] = ""
    """QLoRA: keep the model's own matrices in 4 or 8 bits (bitsandbytes)"""
    dropout: float = Field(0.0, ge=0, lt=1, description="On adapters' inputs, in the warm start")

    def contradictions(self) -> Iterator[str]:
        if self.quantize and not (self.rank or self.from_folder):
            yield (
                f"quantize={self.quantize!r} without adapters leaves nothing to train; set "
                "rank > 0 or from_folder=true, or leave quantize empty"
            )


class WeightsConfig(Section):
    """Weights and adapters of the policy."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The weights' dtype in training and rollout; auto: bfloat16 where hardware computes in it.
    bfloat16 and float16 have float32 masters in the optimizer"""
    lora: LoRAConfig = LoRAConfig()


class ModelConfig(WeightsConfig):
    """The policy: a Hugging Face folder, or a small Qwen2-shaped model made from scratch."""

    path: str = Field("", description="Hugging Face causal LM folder, or hub id; empty: scratch")
    hidden_size: int = Field(96, ge=8, description="Width of a model made from scratch")
    intermediate_size: int = Field(256, ge=8, description="Width inside its MLPs")
    num_hidden_layers: int = Field(3, ge=1, description="Its decoder layers")
    num_attention_heads: int = Field(3, ge=1, description="Its query heads; divides hidden_size")
    num_key_value_heads: int = Field(1, ge=1)
    """Its key and value heads; divides the query heads"""
    max_position_embeddings: int = Field(1024, ge=16, description="Context, in tokens")
    initializer_range: float = Field(0.08, gt=0, description="Std of the initial weights")

    def contradictions(self) -> Iterator[str]:
        if self.hidden_size % self.num_attention_heads:
            yield (
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
