"""The settings of a vLLM engine, checked before anything is started, and `vllm.LLM`'s arguments.

On a GPU vLLM does what its users expect: a KV cache in the memory that its share leaves, compiled
forward passes and CUDA graphs, prompts in chunks. On a CPU compiling takes 12-38 s and gains
nothing, and a prompt goes whole: a part of one rewinds its request's generator, which a CPU's
can't. `rollout.vllm.engine_kwargs` passes some of vLLM's own arguments through; they are checked
without importing vLLM, which takes seconds and changes the process.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from engine.config import RolloutConfig
from engine.config.rollout_engines import VllmConfig
from engine.config.text import validated
from engine.errors import ConfigError
from engine.rollout import trainer_model
from engine.rollout.protocol import (
    ENGINE_SETTINGS,
    EngineCapabilities,
    check_lora,
    resolve_max_model_len,
)

WHERE = "rollout.vllm.engine_kwargs"

_SECTION = (
    *("dtype", "gpu_memory_utilization", "enforce_eager", "enable_chunked_prefill"),
    *("enable_prefix_caching", "max_num_batched_tokens", "quantization"),
)
_SETTINGS = {name: f"rollout.vllm.{name}" for name in _SECTION} | {
    "quantization_config": "rollout.vllm.quantization",
    "enable_lora": "rollout.lora",
    "max_lora_rank": "model.lora.rank",
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
    "enable_sleep_mode": "rollout.vllm.sleep",
    "max_num_seqs": "rollout.max_num_seqs",
    "kv_cache_memory_bytes": "rollout.kv_cache_memory_mb",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "seed": "seed",
}
_SET_BY_ENGINE = (  # which relies on them
    *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "runner"),
    *("convert", "load_format", "moe_backend", "model_loader_extra_config", "worker_cls"),
    *("distributed_executor_backend", "worker_extension_cls", "weight_transfer_config"),
    *("logprobs_mode", "generation_config", "override_generation_config", "pooler_config"),
)
_ONE_REPLICA = "each vLLM engine is one replica on rollout.tensor_parallel_size ranks; remove it"
_OFFLOADED = (
    "weights that vLLM keeps on the host can't be the policy's, nor be updated in place; remove it"
)
_SPECULATION = "write speculative_config, with model, method and num_speculative_tokens"
_REFUSED = {  # by name: why
    # Two places for one setting would contradict each other.
    **{name: f"it is a setting of its own; set {setting}" for name, setting in _SETTINGS.items()},
    **dict.fromkeys(_SET_BY_ENGINE, "it is given by the run; remove it"),
    **dict.fromkeys(
        (
            *("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"),
            *("offload_num_in_group", "offload_prefetch_step", "offload_params"),
        ),
        _OFFLOADED,
    ),
    **dict.fromkeys(
        (
            *("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
            *("decode_context_parallel_size", "nnodes"),
        ),
        _ONE_REPLICA,
    ),
    "enable_eplb": "experts that move between ranks can't be updated in place; remove it",
    **dict.fromkeys(("spec_model", "spec_method", "spec_tokens"), _SPECULATION),
}
_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix")  # methods that draft with no model
_WITH_DRAFT = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")


def check_engine_kwargs(engine_kwargs: Mapping[str, object], *, in_process: bool) -> None:
    """Raise ConfigError for the first argument that can't be passed through, with the way out."""
    for name, value in engine_kwargs.items():
        if name in _REFUSED:
            raise ConfigError(f"{WHERE}.{name}={value!r}: {_REFUSED[name]}")
        if name == "enable_expert_parallel" and value and in_process:
            raise ConfigError(
                f"{WHERE}.{name}=True with rollout.vllm.in_process=true: whole experts on one rank "
                "are no shards of the policy's; set rollout.vllm.in_process=false"
            )
        if name == "speculative_config" and value is not None:
            _check_speculation(value)
        valid = argument_names()
        if valid and name not in valid:
            similar = difflib.get_close_matches(name, sorted(valid), n=1)
            hint = f"did you mean {similar[0]}?" if similar else "see vLLM's engine arguments"
            raise ConfigError(f"{WHERE}.{name}: vLLM's engine has no such argument; {hint}")


def _check_speculation(value: object) -> None:
    """Raise ConfigError unless a draft has no weights, or has them in its own folder."""
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


def passed_through(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Build vLLM's arguments: null ones keep its default; a draft brings its weights."""
    arguments = {name: value for name, value in engine_kwargs.items() if value is not None}
    draft = arguments.get("speculative_config")
    if draft is not None and draft.get("model") is not None:
        # The policy's own weights are dummies until the first update, and lost in sleep of level 2.
        arguments["speculative_config"] = {"draft_load_config": {"load_format": "auto"}} | draft
        arguments.setdefault("sleep_preserve_parameter_names", ["draft.*"])
    return arguments


@cache
def argument_names() -> frozenset[str]:
    """Read the names of vLLM's engine arguments from its source; none without vLLM."""
    spec = importlib.util.find_spec("vllm")
    source = Path(spec.origin).parent / "engine/arg_utils.py" if spec and spec.origin else None
    if source is None or not source.is_file():
        return frozenset()
    classes = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef)]
    fields = [field for node in classes if node.name == "EngineArgs" for field in node.body]
    named = (f.target for f in fields if isinstance(f, ast.AnnAssign))
    return frozenset(target.id for target in named if isinstance(target, ast.Name))


CPU_KV_CACHE_MB = 256
_STEP_TOKENS = 8192  # of one forward pass, at least a whole prompt's
_BLOCK = 32  # tokens a KV block; a group shares its prompt's full blocks, and 128 is CPU's default
_CHECKED_ONLY = 0.01  # a share that vLLM compares with free memory, and doesn't fill
WEIGHT_TRANSFER = "hybridflyte"  # the name of `worker_extension.BroadcastEngine` in vLLM
_BACKENDS = {"in_process": "uni", "workers": "mp", "ranks": "external_launcher"}
_QUANTIZATIONS = {"fp8": "fp8_per_block"}  # vLLM's names for quantisation while loading


def check_settings(
    settings: VllmConfig, kv_cache_memory_mb: int | None, lora: str, replay: bool
) -> None:
    """Raise ConfigError for what can't be on any machine, before anything is started."""
    check_engine_kwargs(settings.engine_kwargs, in_process=settings.in_process)
    default = VllmConfig().gpu_memory_utilization
    if kv_cache_memory_mb is not None and settings.gpu_memory_utilization != default:
        raise ConfigError(
            f"rollout.vllm.gpu_memory_utilization={settings.gpu_memory_utilization} has no effect "
            f"with rollout.kv_cache_memory_mb={kv_cache_memory_mb}; set one of them"
        )
    check_lora(lora)
    if settings.quantization and lora == "adapter":
        raise ConfigError(
            f"rollout.vllm.quantization={settings.quantization} with rollout.lora=adapter: "
            "weights are quantised with the adapters merged into them; set rollout.lora=merged"
        )
    if replay and not settings.enable_prefix_caching:
        raise ConfigError(
            "rollout.enable_rollout_routing_replay=true with "
            "rollout.vllm.enable_prefix_caching=false: vLLM stores the experts of tokens with its "
            "cached blocks; set enable_prefix_caching=true"
        )


def _check_here(options: VllmOptions) -> None:
    """Raise ConfigError for what can't be on this machine and with this model."""
    settings, on_gpu, dtype = options.settings, options.on_gpu, options.dtype
    max_model_len, max_num_seqs = options.max_model_len, options.max_num_seqs
    quantization, tokens = settings.quantization, settings.max_num_batched_tokens
    if settings.enable_chunked_prefill and not on_gpu:
        raise ConfigError(
            "rollout.vllm.enable_chunked_prefill=true on a CPU: a prompt in parts would draw "
            "other tokens for the same seed; leave it out"
        )
    if quantization and not on_gpu:
        raise ConfigError(
            f"rollout.vllm.quantization={quantization} on a CPU: vLLM quantises on GPUs; leave it "
            "out"
        )
    if quantization and dtype == "float32":
        raise ConfigError(
            f"rollout.vllm.quantization={quantization} of float32 weights: vLLM then computes "
            "in bfloat16 or float16; set rollout.vllm.dtype=bfloat16"
        )
    if options.routed_layers and not on_gpu and "cpu" not in _triton_backends():
        raise ConfigError(
            "rollout.enable_rollout_routing_replay=true with rollout.engine=vllm on a CPU: vLLM "
            "records experts in its second model runner, whose kernels need a Triton with a CPU "
            "backend; install triton-cpu, or set rollout.engine=native"
        )
    whole_prompts = settings.enable_chunked_prefill is False or not on_gpu
    if tokens is not None and whole_prompts and tokens < max_model_len:
        raise ConfigError(
            f"rollout.vllm.max_num_batched_tokens={tokens} is less than a prompt and its "
            f"completion ({max_model_len} tokens), and prompts aren't computed in chunks; "
            f"raise it to {max_model_len}"
        )
    if tokens is not None and tokens < max_num_seqs:
        raise ConfigError(
            f"rollout.vllm.max_num_batched_tokens={tokens} is less than rollout.max_num_seqs="
            f"{max_num_seqs}, which each decode one token a pass; raise it, or lower that"
        )


def _triton_backends() -> Container[str]:
    with suppress(ImportError):
        return importlib.import_module("triton.backends").backends
    return ()


def engine_arguments(options: VllmOptions) -> dict[str, object]:
    """Return keyword arguments of `vllm.LLM`, but for the model's folder and vLLM's own classes."""
    settings = options.settings
    arguments: dict[str, object] = {
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": _BACKENDS[options.mode],
        "seed": options.seed,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if name := settings.quantization:
        arguments["quantization"] = _QUANTIZATIONS.get(name, name)
    if options.adapter_rank:
        arguments |= {"enable_lora": True, "max_loras": 1}
    if options.routed_layers:
        arguments["enable_return_routed_experts"] = True
    chunked = options.on_gpu and settings.enable_chunked_prefill is not False
    step_tokens = max(_STEP_TOKENS, options.max_num_seqs, options.max_model_len)
    step_default = None if chunked else step_tokens
    arguments |= {
        "enforce_eager": settings.enforce_eager or not options.on_gpu,
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": settings.max_num_batched_tokens or step_default,
    }
    if options.on_gpu:
        # Other kernels shuffle experts' weights, where updates don't fit.
        arguments["moe_backend"] = "triton"
    else:
        arguments["block_size"] = _BLOCK
    if options.kv_cache_memory_mb is None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        size = (options.kv_cache_memory_mb << 20) // options.tensor_parallel_size  # of each rank
        arguments |= {"kv_cache_memory_bytes": size, "gpu_memory_utilization": _CHECKED_ONLY}
    return arguments | passed_through(settings.engine_kwargs)


Mode = Literal["in_process", "workers", "ranks"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """One engine's settings, with nothing left open."""

    mode: Mode  # where the model runs: in this process, in vLLM's own, or over the trainer's ranks
    on_gpu: bool  # whether vLLM runs on GPUs
    max_num_seqs: int  # completions decoded at once, e.g. 512
    max_model_len: int  # longest prompt plus completion, in tokens, e.g. 1024
    kv_cache_memory_mb: int | None  # of the whole engine, e.g. 256; None: what vLLM's share leaves
    seed: int
    dtype: str  # of vLLM's weights, e.g. "bfloat16"
    tensor_parallel_size: int
    rank_groups: tuple[tuple[int, ...], ...]  # of mode "ranks", e.g. ((0, 2), (1, 3)); else ()
    adapter_rank: int  # of LoRA adapters that vLLM applies itself; 0: none
    routed_layers: tuple[int, ...]  # whose experts are recorded, e.g. (0, 1); (): none
    share: bool  # whether vLLM's parameters may be the trainer's, and so must outlast its sleep
    settings: VllmConfig


def capabilities(config: RolloutConfig) -> EngineCapabilities:
    """Return what vLLM can do with these settings, in this process."""
    level = config.vllm.sleep
    return EngineCapabilities(
        streams=True,
        cuts=True,
        streams_experts=True,
        adapters=True,
        exclusive=True,
        loads_shards=True,
        receives=not config.vllm.quantization,
        own_processes=not config.vllm.in_process,
        memory_share=config.vllm.gpu_memory_utilization if config.kv_cache_memory_mb is None else 0,
        stays_awake=level == 0,
        sleep_level=(2 if on_gpu() else 0) if level is None else level,
        settings=frozenset(ENGINE_SETTINGS) - {"cuda_graphs", "server"},
    )


def on_gpu() -> bool:
    """Whether vLLM would run on a GPU here."""
    return torch.accelerator.is_available()


def resolve(
    model: nn.Module,
    *,
    max_num_seqs: int = 512,
    max_model_len: int | None = None,
    kv_cache_memory_mb: int | None = None,
    seed: int = 0,
    tensor_parallel_size: int = 1,
    rank_groups: Sequence[Sequence[int]] | None = None,
    lora: str = "",
    routed_experts: bool = False,
    **settings: object,
) -> VllmOptions:
    """Check the settings against `model` and each other; raise ConfigError for what can't be.

    `settings` are those of `rollout.vllm`, and `lora` is `rollout.lora`. With `in_process=False`,
    or a `tensor_parallel_size` above 1, the model runs in that many worker processes; with
    `rank_groups` over the ranks of the default process group, e.g. [[0, 1], [2, 3]]. `seed` is
    added to that of each request. Without `kv_cache_memory_mb` the KV cache has 256 MB on a CPU,
    and on a GPU what vLLM's share leaves. `routed_experts`: completions say which experts their
    tokens were given to.
    """
    vllm = validated(VllmConfig, settings, "rollout.vllm: ")
    for name, value in (("max_num_seqs", max_num_seqs), ("kv_cache_memory_mb", kv_cache_memory_mb)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is too small for any work; use 1 or more")
    check_settings(vllm, kv_cache_memory_mb, lora, routed_experts)
    config: Any = model.config
    groups = tuple(tuple(group) for group in rank_groups or ())
    _check_parallel(config, tensor_parallel_size, groups)
    mode: Mode = "ranks" if groups else "in_process"
    if not groups and (tensor_parallel_size > 1 or not vllm.in_process):
        mode = "workers"
    dtype = vllm.dtype or str(trainer_model.model_dtype(model)).removeprefix("torch.")
    gpu = on_gpu()
    length = resolve_max_model_len(max_model_len, getattr(config, "max_position_embeddings", None))
    rank = trainer_model.adapter_rank(model)
    preferred = gpu and not vllm.quantization and trainer_model.adapts_decoder(model)
    apart = lora == "adapter" or (preferred and not lora)
    shareable = mode == "in_process" and not vllm.quantization and (apart or not rank)
    options = VllmOptions(
        mode=mode,
        on_gpu=gpu,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        kv_cache_memory_mb=kv_cache_memory_mb or (None if gpu else CPU_KV_CACHE_MB),
        seed=seed,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        rank_groups=groups,
        adapter_rank=rank if apart else 0,
        routed_layers=tuple(trainer_model.routers(model)) if routed_experts else (),
        share=shareable and trainer_model.can_be_shared(model, DTYPES[dtype]),
        settings=vllm,
    )
    _check_here(options)
    return options


def _check_parallel(config: object, size: int, groups: tuple[tuple[int, ...], ...]) -> None:
    """Check the size; vLLM repeats key and value heads, so it need not divide them."""
    if size < 1:
        raise ConfigError(f"tensor_parallel_size={size} is no number of workers; use 1 or more")
    heads = getattr(config, "num_attention_heads", size)
    if heads % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model's num_attention_heads={heads}; "
            "choose a divisor of it"
        )
    ranks = sorted(rank for group in groups for rank in group)
    if {len(group) for group in groups} - {size} or ranks != list(range(len(ranks))):
        raise ConfigError(
            f"rank_groups={[list(group) for group in groups]} must have each rank from 0 once, in "
            f"groups of tensor_parallel_size={size}"
        )
