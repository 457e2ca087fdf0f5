"""What a completion is worth: which reward functions, and how they are called."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import NamedSection, Options, Section


class OverlongBufferConfig(Section):
    """DAPO's soft penalty on completions that come near the length limit."""

    enable: bool = Field(
        False,
        description="Penalize completions near the length limit (DAPO)",
    )
    len: int = Field(16, ge=1, description="Tokens before the limit where the penalty sets in")
    penalty_factor: float = Field(1.0, ge=0, description="Penalty at the limit")


class RewardSpec(NamedSection):
    """A reward function; its name alone stands for one without options."""

    name: str = Field(
        "answer_match", description="Name in the registry, or package.module:function"
    )
    options: Options = Field({}, description="Options that the reward declares, by name")


class RewardConfig(RewardSpec):
    """What a completion is worth."""

    sources: dict[str, RewardSpec] = Field(
        {}, description="Another reward for the rows of a data_source, by that source's name"
    )
    components: dict[str, RewardSpec] = Field(
        {}, description="Rewards that are added as components, by the component's name"
    )
    timeout_s: float = Field(30.0, gt=0, description="Deadline for scoring one batch")
    sample_timeout_s: float = Field(
        5.0, gt=0, description="Deadline of one completion, for rewards that run in a pool"
    )
    processes: int = Field(0, ge=0, description="Of a reward's pool; 0: the cores, 8 at most")
    isolation: Literal["process", "none"] = Field(
        "process", description="Where a reward of yours runs: a process of its own, or the role's"
    )
    weights: dict[str, float] = Field({}, description="Weights of named components; 1 unless given")
    on_error: Literal["drop", "zero", "fail"] = Field(
        "drop", description="A sample whose reward fails: leave it out, score 0, or end the run"
    )
    clip: tuple[float, float] | None = Field(None, description="Bounds of a completion's reward")
    whiten: bool = Field(False, description="Scale token rewards to unit variance over the batch")
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    def specs(self) -> dict[str, RewardSpec]:
        """All reward functions by the setting that names them, e.g. `reward.components.format`."""
        found: dict[str, RewardSpec] = {"reward": self}
        found |= {f"reward.sources.{name}": spec for name, spec in self.sources.items()}
        return found | {f"reward.components.{name}": s for name, s in self.components.items()}
