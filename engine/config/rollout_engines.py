"""How completions are sampled: vLLM, rollout servers, and episodes of several turns."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from engine.config.base import NamedSection, Options, Section


class VllmConfig(Section):
    """A vLLM engine (`rollout.engine=vllm`)."""

    in_process: bool = True
    """In the policy's processes, on its own storage where layouts agree; false: in
    rollout.tensor_parallel_size processes of vLLM's own for each of them"""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of vLLM's weights; empty: the policy's, whose weights vLLM then shares"""
    bucket_mb: int = Field(64, ge=1, description="Size of one transfer to vLLM's processes")
    sleep: Literal[0, 1, 2] | None = None
    """Between rollouts free vLLM's device memory: 1 keeps weights on the host, 2 throws them away;
    0: keep all; null: 2 on a GPU. Weights that are the policy's own stay"""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of each GPU's memory for vLLM: weights, activations and KV cache. CPUs: see
    rollout.kv_cache_memory_mb"""
    enforce_eager: bool = Field(False, description="No CUDA graphs and no compilation")
    enable_chunked_prefill: bool | None = None
    """Compute long prompts in parts, beside decoding; null: on a GPU"""
    enable_prefix_caching: bool = True
    """Compute what prompts begin with once, such as a group's prompt"""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward pass; null: vLLM's default for the device"""
    quantization: Literal["", "fp8", "fp8_per_tensor", "fp8_per_channel"] = ""
    """Quantise vLLM's weights at each update, so they are a copy; fp8: in blocks of 128 x 128. The
    policy needs bfloat16 or float16, or rollout.vllm.dtype"""
    engine_kwargs: Options = Field({})
    """Further arguments of vLLM's engine, by its names, such as kv_cache_dtype"""


_ADDRESS = r"^https?://[^/\s]+"


class ServerConfig(Section):
    """An inference server that was started elsewhere (`rollout.engine=server`)."""

    url: str = Field("", pattern=rf"^$|{_ADDRESS}")
    """e.g. http://10.0.0.7:8000, without /v1"""
    urls: tuple[str, ...] = ()
    """Several servers instead of one url; a request goes to the one with the least work"""
    served_model: str = Field("", description="The model's name there; empty: the server is asked")
    api_key_env: str = Field("", description="Environment variable that holds the server's key")
    concurrency: int = Field(64, ge=1, description="Requests at once, per server")
    completions_per_request: int = Field(32, ge=1)
    """Most completions of one prompt that a request asks for; a retry decodes all of them again"""
    timeout_s: float = Field(1800.0, gt=0, description="Deadline of one rollout or weight update")
    request_timeout_s: float = Field(600.0, gt=0, description="Deadline of one request")
    max_retries: int = Field(5, ge=0)
    """Retries of a request: connection lost, deadline passed, 429, 5xx, no JSON"""
    backoff_s: float = Field(0.25, gt=0)
    """Longest pause before the first retry; doubles with each, to 30 s"""
    weights: str = "vllm"
    """How the server gets new weights: vllm, folder, or none (they stay)"""
    allow_fixed_policy: bool = False
    """weights=none: keep the server's policy while the trainer's is updated"""
    weights_dir: str = ""
    """Folder that both machines see at this path; weights pass through it"""
    reload_url: str = ""
    """weights=folder: address that is sent {version, tag, path}, and loads the weights"""
    version_url: str = "/v1/models"
    """weights=folder: address whose answer holds the tag of the served weights"""
    probe_tolerance: float = Field(0.1, ge=0)
    """Largest mean difference between the server's log-probs and the policy's after an update; 0:
    no check"""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all servers: `url`, or `urls`."""
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


class EnvironmentSpec(NamedSection):
    """An environment; its name alone stands for one without options."""

    name: str = Field("", description="Name in the registry, or package.module:Class")
    options: Options = Field({}, description="Options that the environment declares, by name")


class AgentSpec(NamedSection):
    """An agent that plays episodes by itself; its name alone stands for one without options."""

    name: str = Field("", description="path/to/file.py:function, package.module:…, or a command")
    options: Options = Field({}, description="Keyword-only parameters of the function, by name")


class MultiTurnConfig(Section):
    """Episodes of several turns in place of single completions."""

    enable: bool = False
    """Roll out episodes with rollout.agent.environment or rollout.agent.play"""
    max_assistant_turns: int | None = Field(None, ge=1)
    """Turns of the policy in an episode; null: no limit of its own"""
    max_turn_length: int | None = Field(None, ge=1)
    """Tokens of one turn; null: what data.max_response_length leaves"""
    format: str = "hermes"
    """How tool calls are written: name of a parser, or package.module:name"""
    history: Literal["append", "branches"] = "append"
    """If the chat template rewrites earlier turns (leaves thoughts out): append keeps them as
    sampled; branches continues from the rewritten text, as another sequence"""


class AgentConfig(Section):
    """The environment of episodes, or the agent that plays them, and their limits."""

    environment: EnvironmentSpec = EnvironmentSpec()
    play: AgentSpec = AgentSpec()
    """An agent in place of an environment: `async def play(row, client)`, or a program, which asks
    the policy through OpenAI's API and gives the reward"""
    num_workers: int = Field(1, ge=0)
    """Processes that environments run in, which may hang or die; 0: the rollout's own, for light
    ones that never block"""
    concurrency: int = Field(0, ge=0, description="Episodes under way; 0: rollout.max_num_seqs")
    timeout_s: float = Field(600.0, gt=0, description="No turn of an episode begins later")
    turn_timeout_s: float | None = Field(None, gt=0)
    """Deadline of one turn, which is cut there and ends its episode; null: no limit"""
    call_timeout_s: float = Field(60.0, gt=0, description="Deadline for one answer")
    on_limit: Literal["score", "drop"] = "score"
    """An episode that a limit of turns, tokens or time ends: learn from it, or leave it out"""
    on_error: Literal["drop", "score"] = "drop"
    """An episode whose environment fails: leave it out, or error_reward"""
    error_reward: float = Field(0.0, description="With on_error=score: added to its last turn")
    named_content: str = ""
    """Digest of the modules and files that environment and tools name, for the cache; workflows
    fill it"""

    save_freq_s: float = Field(60.0, ge=0)
    """sync, with checkpoints: seconds between saves of the episodes of a step under way; 0: none"""

    def contradictions(self) -> Iterator[str]:
        if self.environment.name and self.play.name:
            yield (
                f"environment.name={self.environment.name} answers the policy's turns, and "
                f"play.name={self.play.name} asks for them; set one of the two"
            )
        if self.error_reward and self.on_error == "drop":
            yield f"error_reward={self.error_reward} needs on_error=score; set it, or remove this"
