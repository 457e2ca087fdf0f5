"""Episodes of several turns: the environment, its tools, and what an episode may use."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config.base import NamedSection, Options, Section


class EnvironmentSpec(NamedSection):
    """An environment; its name alone stands for one without options."""

    name: str = Field("", description="Name in the registry, or package.module:Class")
    options: Options = Field({}, description="Options that the environment declares, by name")


class MultiTurnConfig(Section):
    """Episodes of several turns in place of single completions."""

    enable: bool = Field(False, description="Roll out episodes with rollout.agent.environment")
    max_assistant_turns: int | None = Field(
        None, ge=1, description="Turns of the policy in an episode; null: no limit of its own"
    )
    max_turn_length: int | None = Field(
        None, ge=1, description="Tokens of one turn; null: what data.max_response_length leaves"
    )
    format: str = Field(
        "hermes", description="How tool calls are written: name of a parser, or package.module:name"
    )
    history: Literal["append", "branches"] = Field(
        "append",
        description="Where the chat template rewrites earlier turns (thoughts left out): append "
        "keeps them as sampled; branches goes on from what it writes, as another sequence",
    )


class AgentConfig(Section):
    """What the policy plays with."""

    environment: EnvironmentSpec = EnvironmentSpec()
    num_workers: int = Field(
        1,
        ge=0,
        description="Processes that environments run in, which may hang or die; 0: the rollout's "
        "own, for light ones that never block",
    )
    concurrency: int = Field(
        0, ge=0, description="Episodes played at a time; 0: rollout.max_num_seqs"
    )
    timeout_s: float = Field(
        600.0, gt=0, description="Of an episode: no turn begins later than that"
    )
    turn_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Of one turn: it is cut there, and the last of its episode; null: no limit",
    )
    call_timeout_s: float = Field(60.0, gt=0, description="Deadline for one answer")
    on_limit: Literal["score", "drop"] = Field(
        "score",
        description="An episode that a limit of turns, tokens or seconds ends: learn from it as it "
        "is, or leave it out",
    )
    on_error: Literal["drop", "score"] = Field(
        "drop", description="An episode whose environment fails: leave it out, or error_reward"
    )
    error_reward: float = Field(0.0, description="With on_error=score: added to its last turn")
    named_content: str = Field(
        "",
        description="Digest of the modules and files that environment and tools name, for the "
        "cache; workflows fill it",
    )

    save_freq_s: float = Field(
        60.0,
        ge=0,
        description="sync, with checkpoints: seconds between saves of the episodes of a step under "
        "way; 0: none",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.error_reward and self.on_error == "drop":
            raise ValueError(
                f"error_reward={self.error_reward} has no effect with on_error=drop; set "
                "on_error=score, or remove it"
            )
        return self
