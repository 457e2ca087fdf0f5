"""Where the preferences of a pipeline come from: rollouts of its own policy, or files."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Section
from engine.config.parallel import ParallelConfig
from engine.config.reward import RewardConfig


class PairsConfig(Section):
    """The best and the worst of n completions of the policy, or pairs and labelled rows of files.

    Of files `columns`, `templates`, `bad_rows`, `validation_size` and `too_long` are read; of
    rollouts the rest.
    """

    path: str = Field(
        "",
        description="File, folder, s3://… or hf://ID with preferences; empty: rollouts of the "
        "policy on the prompts of data, ranked by a reward",
    )
    columns: dict[str, str] = Field(
        {}, description="Our column (prompt, chosen, rejected, margin; completion, label): theirs"
    )
    templates: dict[str, str] = Field(
        {}, description="Our column: a Jinja2 template of it over the files' columns"
    )
    bad_rows: Literal["fail", "drop"] = Field(
        "fail", description="Rows that are no preference: refuse them by number, or leave them out"
    )
    too_long: Literal["fail", "drop"] = Field(
        "fail", description="Rows over the model's context: refuse them, or leave them out"
    )
    validation_size: int = Field(
        200, ge=0, description="Of files: rows to hold out, all those of a prompt in one piece"
    )
    prompts: int = Field(0, ge=0, description="Prompts of the split train; 0: all")
    n: int = Field(8, ge=2, description="Completions a prompt, of which pairs are made")
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature of the completions that are ranked"
    )
    pairs_a_prompt: int = Field(
        1,
        ge=1,
        description="At most: the best with the worst, the next with the next, …; of labels (KTO) "
        "so many good ones and so many bad ones",
    )
    margin: float = Field(
        0.0, ge=0, description="The two rewards of a pair differ by more than this"
    )
    rounds: int = Field(
        1, ge=1, description="Rollout → rank → update so often, each on the policy before it"
    )
    reward: RewardConfig | None = Field(None, description="What ranks; none: the reward of RL")
    plugins: tuple[str, ...] = Field(
        (), description="Your modules that register the reward; none: those of RL"
    )
    engine: str = Field("native", description="Rollout engine: native or vllm")
    parallel: ParallelConfig | None = Field(
        None, description="As evaluate.parallel: copies of the policy, and ranks that share one"
    )
    named_content: str = Field(
        "", description="Digest of your modules, for the cache; workflows fill it"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path and self.rounds > 1:
            raise ValueError(
                f"pairs.rounds={self.rounds} with pairs.path={self.path!r}: later rounds learn "
                "from rollouts of the policy; leave pairs.path empty, or set pairs.rounds=1"
            )
        if not self.path:
            unread = [n for n in ("columns", "templates") if getattr(self, n)]
            if unread:
                raise ValueError(
                    f"pairs.{unread[0]} has no effect without pairs.path; give the file, or remove "
                    "it"
                )
        return self

    @property
    def scorer(self) -> RewardConfig:
        """The reward that ranks; GSM8K's rule where none is given."""
        return self.reward or RewardConfig()
