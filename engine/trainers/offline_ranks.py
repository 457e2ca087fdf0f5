"""Where the model of a warm start, or of other training on rows, is.

In this process, or on ranks of a layout, which Ray places. Settings have the names and rules of an
RL run's. What a rank does is in `engine.workers`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from engine.config import LoRAConfig, OfflineConfig
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
from engine.workers.sft import OfflineWorker

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")
W = TypeVar("W", bound=OfflineWorker)


def is_on_ray(config: OfflineConfig) -> bool:
    """Whether the model is in Ray actors: as `placement` says, or where there are several ranks."""
    if config.placement is None:
        return Layout.of(config.parallel).world_size > 1
    return config.placement == "ray"


def check_offline_layout(
    config: OfflineConfig, lora: LoRAConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for a layout that the settings, or the model, don't allow."""
    layout, section = Layout.of(config.parallel), config.section
    check_parallel(f"{section}.parallel", config.parallel, lora, model_config)
    if layout.world_size > 1 and config.placement == "local":
        raise ConfigError(
            f"{section}.parallel is a layout of {layout.world_size} ranks ({layout}), and "
            f"{section}.placement=local runs one process; set {section}.placement=ray"
        )
    roles = [pool.roles for pool in config.pools]
    if roles not in ([], [(section,)]):
        raise ConfigError(
            f"{section}.pools has the roles {roles}; there is one pool here, of roles [{section}]"
        )


def offline_dtype(dtype: str, model_path: str, config: OfflineConfig) -> str:
    """The dtype of the weights, `auto` resolved for where they will be."""
    gpu = any(pool.gpus > 0 for pool in config.pools) if is_on_ray(config) else None
    width = text_config(model_path).hidden_size
    return resolve_dtype(dtype, width, gpu=gpu, compute_dtype=config.parallel.compute_dtype)


def offline_placement(config: OfflineConfig) -> Placement:
    """The pools of the section; by default the ranks share this machine's cores."""
    ranks, cores = Layout.of(config.parallel).world_size, config.threads or os.cpu_count() or 1
    pools = [Pool(world_size=ranks, **dict(pool)) for pool in config.pools]
    share = float(cores // ranks) if cores >= ranks else cores / ranks
    return Placement(
        tuple(pools) or (Pool((config.section,), ranks, cpus=share),),
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
    )


def make_worker(
    worker: type[W], model: PreTrainedModel | StartModel, config: OfflineConfig, seed: int
) -> W:
    """The only rank, in this process."""
    check_offline_layout(config, LoRAConfig())
    return worker(WorkerContext(config.section), model=model, config=config, seed=seed)


def launch_ranks(
    worker: type[OfflineWorker],
    model: PreTrainedModel | StartModel,
    config: OfflineConfig,
    seed: int,
) -> Roles:
    """Start the ranks on Ray; each loads what it keeps.

    Raises ConfigError for a layout that can't be, or a model that no rank can load, and
    PlacementError where the cluster has no room.
    """
    layout, section = Layout.of(config.parallel), config.section
    if not isinstance(model, StartModel):
        raise ConfigError(
            f"{section}.parallel is {layout} on Ray, whose processes load the model themselves, "
            "and a model in memory was given; give StartModel(path, dtype), or set "
            f"{section}.placement=local"
        )
    check_offline_layout(config, model.lora or LoRAConfig(), text_config(model.path))
    spec = RoleSpec(
        section,
        worker,
        {"model": model, "config": config, "seed": seed},
        layout=layout if layout.world_size > 1 else None,
    )
    return launch(offline_placement(config), [spec])


def done(value: T | Future[T]) -> T:
    """What a rank in this process returned, or what is waited for of ranks elsewhere."""
    return value.result() if isinstance(value, Future) else value
