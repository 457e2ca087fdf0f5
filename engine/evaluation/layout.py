"""On how many ranks a model is evaluated: copies of it (dp), each on one rank or on several (tp).

Values only; the ranks are started in `decode`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from engine.config import EvaluateConfig, ParallelConfig, RolloutConfig
from engine.errors import ConfigError, PlacementError
from engine.models import text_config
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.sharding_specs import ROLLOUT_FAMILIES
from engine.rollout.protocol import EngineCapabilities, engine_capabilities

GIB = 1 << 30
WEIGHT_BYTES = 2  # of an element on a GPU: bfloat16
KEPT = 0.9  # of a GPU's memory that weights can fill


def uses_ranks(config: EvaluateConfig) -> bool:
    """Whether ranks are started: by the settings, or where this machine has several GPUs."""
    if config.parallel is not None:
        return Layout.of(config.parallel).world_size > 1
    return torch.cuda.device_count() > 1


def evaluation_layout(config: EvaluateConfig, folder: str | Path) -> Layout:
    """`evaluate.parallel`; by default copies on all GPUs of this machine.

    Raises ConfigError for a layout that the model can't be split by, PlacementError for a model
    that the GPUs can't hold.
    """
    if not uses_ranks(config):
        return Layout()
    model = text_config(folder)
    if config.parallel is not None:
        check_evaluation_layout(config, model)
        return Layout.of(config.parallel)
    gpus = torch.cuda.device_count()
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    tp = gpus_of_copy(config, model, memory, gpus)
    return Layout(dp=gpus // tp, tp=tp)


def check_evaluation_layout(
    config: EvaluateConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for a layout that the settings, or the model, don't allow."""
    if config.plays_episodes and not _capabilities(config.engine).streams:
        raise ConfigError(
            f"evaluate.engine={config.engine} with evaluate.multi_turn: it decodes whole batches, "
            "and turns are decoded in a stream; set evaluate.engine to native or vllm"
        )
    if config.parallel is None:
        return
    for name, value in config.parallel:
        if name not in ("dp", "tp") and value != getattr(ParallelConfig(), name):
            raise ConfigError(
                f"evaluate.parallel.{name}={value} has no effect on decoding; set dp (copies of "
                "the model) and tp (ranks that share a copy)"
            )
    layout = Layout.of(config.parallel)
    if layout.tp == 1:
        return
    if config.plays_episodes:
        raise ConfigError(
            f"evaluate.parallel.tp={layout.tp} with evaluate.multi_turn: turns are decoded on one "
            "rank each; set tp=1, and dp for copies"
        )
    if not _splits(config.engine):
        raise ConfigError(
            f"evaluate.parallel.tp={layout.tp} with evaluate.engine={config.engine}, which decodes "
            "whole models only; set engine to native or vllm, or tp=1"
        )
    if model_config is None:
        return
    if model_config.model_type not in ROLLOUT_FAMILIES:
        raise ConfigError(
            f"evaluate.parallel.tp={layout.tp} with a model of type {model_config.model_type!r}: "
            f"evaluation splits {', '.join(ROLLOUT_FAMILIES)} models; set tp=1, and dp for copies"
        )
    check_layout(layout, layout.world_size, ModelShape.of(model_config))


def gpus_of_copy(
    config: EvaluateConfig, model_config: PretrainedConfig, gpu_memory: int, gpus: int
) -> int:
    """GPUs of a machine that one copy takes: the fewest on which its weights fill at most half.

    The other half is for keys and values. `gpu_memory`: bytes of one. A model whose sizes nobody
    knows takes one. Raises PlacementError where weights alone are more than the GPUs hold.
    """
    need = _weight_bytes(model_config)
    sizes = [
        tp for tp in range(1, gpus + 1) if gpus % tp == 0 and _allowed(config, model_config, tp)
    ]
    for tp in sizes:
        if need / tp <= gpu_memory / 2:
            return tp
    if need / sizes[-1] <= gpu_memory * KEPT:
        return sizes[-1]
    raise PlacementError(
        f"evaluate can't fit: the model's weights take {need / GIB:.0f} GiB in bfloat16, and a "
        f"copy can be on {sizes[-1]} of a machine's {gpus} GPUs of {gpu_memory / GIB:.0f}; take "
        "machines with more or larger GPUs"
    )


def check_evaluation_memory(
    config: EvaluateConfig, model_config: PretrainedConfig, gpu_memory: int, gpus: int
) -> None:
    """Raise PlacementError where a machine's GPUs can't hold what evaluation keeps on them.

    The sentence has the layout that would fit.
    """
    fewest = gpus_of_copy(config, model_config, gpu_memory, gpus)
    if config.parallel is None:
        return
    layout, need = Layout.of(config.parallel), _weight_bytes(model_config)
    if need / layout.tp > gpu_memory * KEPT:
        raise PlacementError(
            f"evaluate can't fit: with evaluate.parallel {layout} a GPU keeps "
            f"{need / layout.tp / GIB:.0f} GiB of weights, and has {gpu_memory / GIB:.0f}; "
            f"evaluate.parallel {Layout(dp=gpus // fewest, tp=fewest)} would"
        )


def _capabilities(engine: str) -> EngineCapabilities:
    return engine_capabilities(RolloutConfig(engine=engine))


def _splits(engine: str) -> bool:
    found = _capabilities(engine)
    return found.decodes_shards or found.loads_shards


def _allowed(config: EvaluateConfig, model_config: PretrainedConfig, tp: int) -> bool:
    """Whether a copy can be on so many ranks."""
    if tp == 1:
        return True
    if config.plays_episodes:  # turns are decoded on one rank each
        return False
    if model_config.model_type not in ROLLOUT_FAMILIES or not _splits(config.engine):
        return False
    try:
        check_layout(Layout(tp=tp), tp, ModelShape.of(model_config))
    except ConfigError:
        return False
    return True


def _weight_bytes(model_config: PretrainedConfig) -> int:
    """Of all weights in bfloat16; 0 for a model that transformers can't build."""
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
    except ValueError:
        return 0
    return WEIGHT_BYTES * sum(weight.numel() for weight in model.parameters())
