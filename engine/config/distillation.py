"""Whom a policy learns from by distillation, and by which loss."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Section


class TeacherConfig(Section):
    """One teacher: a model that is loaded, or a server that gives log-probs of prompts."""

    model: str = Field("", description="Model folder or hub id")
    url: str = Field(
        "",
        pattern=r"^$|^https?://[^/\s]+",
        description="In place of a model: a server with prompt_logprobs (vLLM's, or engine.serve), "
        "e.g. http://10.0.0.7:8000, without /v1",
    )
    tokenizer: str = Field(
        "",
        description="url: folder of the served model's tokenizer, to be compared; empty: the "
        "policy's own",
    )
    served_model: str = Field(
        "", description="url: the model's name there; empty: the server is asked"
    )
    api_key_env: str = Field("", description="url: environment variable with the server's key")
    concurrency: int = Field(16, ge=1, description="url: requests under way at once")
    timeout_s: float = Field(1800.0, gt=0, description="url: deadline for one batch")
    request_timeout_s: float = Field(600.0, gt=0, description="url: deadline of one request")
    max_retries: int = Field(5, ge=0, description="url: of a request that failed")
    weight: float = Field(1.0, gt=0, description="Share in the loss, over the sum of all weights")
    rows: str = Field(
        "", description="With route_by: the value in that column of the rows that it teaches"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.model) == bool(self.url):
            raise ValueError("a teacher has a model (folder or hub id) or a url, and not both")
        return self


class DistillationConfig(Section):
    """Dataflow distillation: the loss, and several teachers."""

    loss: Literal["policy_gradient", "reverse_kl", "forward_kl", "jsd"] = Field(
        "policy_gradient",
        description="policy_gradient: of the reverse KL, by the sampled tokens alone; the others "
        "compare distributions token by token",
    )
    beta: float = Field(
        0.5, gt=0, lt=1, description="jsd: near 0 it is like forward_kl, near 1 like reverse_kl"
    )
    top_k: int = Field(
        0,
        ge=0,
        description="Compare the teacher's likeliest tokens, and all others together; 0: the whole "
        "vocabulary",
    )
    teachers: tuple[TeacherConfig, ...] = Field(
        (), description="Several teachers, or one behind a url; none: algorithm.teacher"
    )
    route_by: str = Field(
        "",
        description="Column of the rows whose value chooses the teacher (its rows=…); empty: all "
        "teach every row, by weight",
    )

    @model_validator(mode="after")
    def _every_row_has_one(self) -> Self:
        names = [teacher.rows for teacher in self.teachers]
        if self.route_by and (not all(names) or len(set(names)) < len(names) or not names):
            raise ValueError(
                f"route_by={self.route_by!r} chooses a teacher by a column's value, and teachers "
                f"have rows={names}; give each another value"
            )
        if not self.route_by and any(names):
            raise ValueError(
                f"teachers have rows={names}, which need route_by: the column with these values"
            )
        return self
