"""`rollout.vllm.engine_kwargs`: what of vLLM's own arguments a run may pass through, and what not.

Checked without importing vLLM, which takes seconds and changes the process.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

WHERE = "rollout.vllm.engine_kwargs"

_OWN = {  # arguments that have a setting: two places would contradict each other
    **{
        name: f"rollout.vllm.{name}"
        for name in (
            "dtype",
            "gpu_memory_utilization",
            "enforce_eager",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "max_num_batched_tokens",
            "quantization",
        )
    },
    "quantization_config": "rollout.vllm.quantization",
    "enable_lora": "rollout.vllm.lora",
    "max_lora_rank": "model.lora.rank",
    "enable_sleep_mode": "rollout.vllm.sleep",
    "max_num_seqs": "rollout.max_num_seqs",
    "kv_cache_memory_bytes": "rollout.kv_cache_memory_mb",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "seed": "seed",
}
_GIVEN = (  # by this engine, which relies on them
    "model",
    "tokenizer",
    "tokenizer_mode",
    "skip_tokenizer_init",
    "trust_remote_code",
    "runner",
    "convert",
    "load_format",
    "moe_backend",
    "model_loader_extra_config",
    "distributed_executor_backend",
    "worker_cls",
    "worker_extension_cls",
    "weight_transfer_config",
    "logprobs_mode",
    "generation_config",
    "override_generation_config",
    "pooler_config",
)
_ONE_REPLICA = "each vLLM engine is one replica on rollout.tensor_parallel_size ranks"
_OFFLOADED = "weights that vLLM keeps on the host can't be the policy's, nor be updated in place"
_REFUSED = {
    **dict.fromkeys(
        (
            "cpu_offload_gb",
            "cpu_offload_params",
            "offload_backend",
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
        ),
        _OFFLOADED,
    ),
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "nnodes",
        ),
        _ONE_REPLICA,
    ),
    "enable_eplb": "experts that move between ranks can't be updated in place",
    "spec_model": "write speculative_config, with model, method and num_speculative_tokens",
    "spec_method": "write speculative_config, with model, method and num_speculative_tokens",
    "spec_tokens": "write speculative_config, with model, method and num_speculative_tokens",
}
_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix")  # methods that draft with no model
_WITH_DRAFT = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")


def check_engine_kwargs(given: Mapping[str, object], *, in_process: bool) -> None:
    """Raise ConfigError for the first argument that can't be passed through, with the way out."""
    for name, value in given.items():
        if name in _OWN:
            raise ConfigError(f"{WHERE}.{name} is a setting of its own; set {_OWN[name]}")
        if name in _GIVEN:
            raise ConfigError(f"{WHERE}.{name} is given by the run; remove it")
        if name in _REFUSED:
            raise ConfigError(f"{WHERE}.{name}={value!r}: {_REFUSED[name]}; remove it")
        if name == "enable_expert_parallel" and value and in_process:
            raise ConfigError(
                f"{WHERE}.{name}=True with rollout.vllm.in_process=true: whole experts on one rank "
                "are no shards of the policy's; set rollout.vllm.in_process=false"
            )
        if name == "speculative_config" and value is not None:
            _check_speculation(value)
        known = argument_names()
        if known and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "see vLLM's engine arguments"
            raise ConfigError(f"{WHERE}.{name}: vLLM's engine has no such argument; {hint}")


def _check_speculation(value: object) -> None:
    """A draft must come without weights, or with weights in a folder of its own."""
    where = f"{WHERE}.speculative_config"
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}={value!r} must be a mapping, such as "
            "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
        )
    method, model = value.get("method"), value.get("model")
    if model is None and method not in _WITHOUT_DRAFT:
        raise ConfigError(
            f"{where}.method={method!r} drafts with layers of the policy's own folder, which "
            f"training doesn't update; use one of {', '.join(_WITHOUT_DRAFT)}, or name a draft's "
            "folder as model"
        )
    if model is not None and method not in (None, *_WITHOUT_DRAFT, *_WITH_DRAFT):
        raise ConfigError(
            f"{where}.method={method!r} can't be used with updated weights; use one of "
            f"{', '.join((*_WITHOUT_DRAFT, *_WITH_DRAFT))}"
        )


def passed_through(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for vLLM: those that are null keep its default; a draft brings its weights."""
    arguments = {name: value for name, value in given.items() if value is not None}
    draft = arguments.get("speculative_config")
    if draft is not None and draft.get("model") is not None:
        # The policy's own weights are dummies until the first update, and lost in sleep of level 2.
        arguments["speculative_config"] = {"draft_load_config": {"load_format": "auto"}} | draft
        arguments.setdefault("sleep_preserve_parameter_names", ["draft.*"])
    return arguments


@cache
def argument_names() -> frozenset[str]:
    """The names of vLLM's engine arguments, from its source; none where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    source = Path(places[0]) / "engine" / "arg_utils.py" if places else None
    if source is None or not source.is_file():
        return frozenset()
    classes = (n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef))
    engine = next((node for node in classes if node.name == "EngineArgs"), None)
    fields = engine.body if engine is not None else []
    return frozenset(
        field.target.id
        for field in fields
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
