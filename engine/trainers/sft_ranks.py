"""Where a warm start's model is: in this process, or on ranks of a layout, which Ray places.

Settings have the names and rules of an RL run's. What a rank does is in `engine.workers.sft`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from engine.config import LoRAConfig, SFTConfig
from engine.controller.launch import Placement, Pool, launch
from engine.controller.roles import Roles
from engine.controller.worker_host import RoleSpec
from engine.errors import ConfigError
from engine.futures import Future
from engine.models import resolve_dtype, text_config
from engine.parallel.layout import Layout
from engine.runtime.save_policy import StartModel
from engine.trainers.layouts import check_parallel
from engine.workers.base import WorkerContext
from engine.workers.sft import SFTWorker

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ROLE = "sft"
T = TypeVar("T")


def is_on_ray(config: SFTConfig) -> bool:
    """Whether the model is in Ray actors: as `placement` says, or where there are several ranks."""
    if config.placement is None:
        return Layout.of(config.parallel).world_size > 1
    return config.placement == "ray"


def check_sft_layout(
    config: SFTConfig, lora: LoRAConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for a layout that the settings, or the model, don't allow."""
    layout = Layout.of(config.parallel)
    check_parallel("sft.parallel", config.parallel, lora, model_config)
    if layout.world_size > 1 and config.placement == "local":
        raise ConfigError(
            f"sft.parallel is a layout of {layout.world_size} ranks ({layout}), and "
            "sft.placement=local runs one process; set sft.placement=ray"
        )
    if config.packing is True and layout.pp * layout.sp > 1:
        raise ConfigError(
            f"sft.packing with {layout}: stages and shares of sequences take padded rows; leave "
            "packing out, or set pp and sp to 1"
        )
    roles = [pool.roles for pool in config.pools]
    if roles not in ([], [(ROLE,)]):
        raise ConfigError(
            f"sft.pools has the roles {roles}; the warm start has one pool, of roles [{ROLE}]"
        )


def sft_dtype(dtype: str, model_path: str, config: SFTConfig) -> str:
    """The dtype of the warm start's weights, `auto` resolved for where they will be."""
    gpu = any(pool.gpus > 0 for pool in config.pools) if is_on_ray(config) else None
    width = text_config(model_path).hidden_size
    return resolve_dtype(dtype, width, gpu=gpu, compute_dtype=config.parallel.compute_dtype)


def sft_placement(config: SFTConfig) -> Placement:
    """`sft.pools`; by default the ranks share this machine's cores."""
    ranks, cores = Layout.of(config.parallel).world_size, config.threads or os.cpu_count() or 1
    pools = [Pool(world_size=ranks, **dict(pool)) for pool in config.pools]
    share = float(cores // ranks) if cores >= ranks else cores / ranks
    return Placement(
        tuple(pools) or (Pool((ROLE,), ranks, cpus=share),),
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
    )


def make_worker(model: PreTrainedModel | StartModel, config: SFTConfig, seed: int) -> SFTWorker:
    """The only rank, in this process."""
    check_sft_layout(config, LoRAConfig())
    return SFTWorker(WorkerContext(ROLE), model=model, config=config, seed=seed)


def launch_ranks(model: PreTrainedModel | StartModel, config: SFTConfig, seed: int) -> Roles:
    """Start the ranks on Ray; each loads what it keeps.

    Raises ConfigError for a layout that can't be, or a model that no rank can load, and
    PlacementError where the cluster has no room.
    """
    layout = Layout.of(config.parallel)
    if not isinstance(model, StartModel):
        raise ConfigError(
            f"sft.parallel is {layout} on Ray, whose processes load the model themselves, and a "
            "model in memory was given; give StartModel(path, dtype), or set sft.placement=local"
        )
    check_sft_layout(config, model.lora or LoRAConfig(), text_config(model.path))
    spec = RoleSpec(
        ROLE,
        SFTWorker,
        {"model": model, "config": config, "seed": seed},
        layout=layout if layout.world_size > 1 else None,
    )
    return launch(sft_placement(config), [spec])


def done(value: T | Future[T]) -> T:
    """What a rank in this process returned, or what is waited for of ranks elsewhere."""
    return value.result() if isinstance(value, Future) else value
