"""Where a rollout server is, how it is spoken to, and how it gets new weights."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from engine.config.base import Section

_ADDRESS = r"^https?://[^/\s]+"


class ServerConfig(Section):
    """An inference server that was started elsewhere (`rollout.engine=server`)."""

    url: str = Field(
        "", pattern=rf"^$|{_ADDRESS}", description="e.g. http://10.0.0.7:8000, without /v1"
    )
    urls: tuple[str, ...] = Field(
        (), description="Several servers in place of one url: requests go where least is under way"
    )
    api: Literal["openai", "tgi"] = Field(
        "openai", description="/v1/completions with token ids (vLLM and others), or TGI's /generate"
    )
    served_model: str = Field("", description="The model's name there; empty: the server is asked")
    tokenizer: str = Field("", description="tgi: a model folder; empty: that of the policy")
    api_key_env: str = Field("", description="Environment variable that holds the server's key")
    concurrency: int = Field(64, ge=1, description="Requests under way at once, a server")
    completions_per_request: int = Field(
        32, ge=1, description="openai: of one prompt; a retry decodes so many again"
    )
    timeout_s: float = Field(1800.0, gt=0, description="Deadline of one rollout or weight update")
    request_timeout_s: float = Field(600.0, gt=0, description="Deadline of one request")
    max_retries: int = Field(
        5, ge=0, description="Of a request: connection lost, deadline passed, 429, 5xx, no JSON"
    )
    backoff_s: float = Field(
        0.25, gt=0, description="Longest pause before the first retry; doubles with each, to 30 s"
    )
    weights: str = Field(
        "vllm", description="How the server gets new weights: vllm, folder, or none (they stay)"
    )
    allow_fixed_policy: bool = Field(
        False, description="weights=none: keep the server's policy while the trainer's is updated"
    )
    weights_dir: str = Field(
        "", description="Folder that both machines see at this path; weights pass through it"
    )
    reload_url: str = Field(
        "", description="weights=folder: is sent {version, tag, path} and loads that folder"
    )
    version_url: str = Field(
        "/v1/models", description="weights=folder: its answer holds the tag of what is served"
    )
    probe_tolerance: float = Field(
        0.1,
        ge=0,
        description="Mean distance of the server's log-probs from the policy's that is refused "
        "when weights arrive; 0: no check",
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all servers: `url`, or `urls`."""
        return (self.url,) if self.url else self.urls

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.match(_ADDRESS, url):
                raise ValueError(f"{url!r} is no address such as http://10.0.0.7:8000")
        if len(set(urls)) < len(urls):
            raise ValueError("an address is in it twice; name each server once")
        return urls
