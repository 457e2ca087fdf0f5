"""Over how many ranks a run is split: `trainer.n_gpus_per_node` and `nnodes`, as verl counts them.

`fill_layouts` fills in the layouts that the settings leave open; `gpu_pools` gives each rank its
GPU, once it is known what Ray has. A layout by hand is `rl.actor.parallel`, one by estimate
`rl.trainer.placement=auto`.
"""

from __future__ import annotations

from engine.cli.settings import RunConfig
from engine.config import ParallelConfig, PoolConfig, RLConfig
from engine.console import say
from engine.errors import ConfigError, PlacementError
from engine.parallel.layout import AXES, Layout


def fill_layouts(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with layouts of so many ranks as are asked for, and notices about them.

    Sizes that are given stay; of the rest `fsdp` takes all, or `dp` where `fsdp` is given. Raises
    ConfigError where they don't multiply to the ranks.
    """
    asked, rl, notices = ranks_of(config), config.rl, list[str]()
    actor = rl.actor.parallel
    if asked is not None:
        actor = _filled("actor", actor, asked)
    if actor.offload_params and actor.fsdp * actor.sp == 1 and asked is not None:
        actor = actor.model_copy(update={"offload_params": False})
        notices.append("actor.parallel.offload_params has no effect on one rank: weights stay")
    critic = rl.critic.parallel
    if critic is not None:
        if not critic.model_fields_set.intersection(AXES):  # only other settings were given
            critic = critic.model_copy(update={axis: getattr(actor, axis) for axis in AXES})
        elif asked is not None:
            critic = _filled("critic", critic, asked)
        if critic.offload_params and critic.fsdp * critic.sp == 1:
            critic = critic.model_copy(update={"offload_params": False})
    reference = rl.reference
    if reference.offload_params and actor.fsdp * actor.sp == 1:
        reference = reference.model_copy(update={"offload_params": False})
        notices.append("reference.offload_params has no effect on one rank: its weights stay")
    rl = rl.model_copy(
        update={
            "actor": rl.actor.model_copy(update={"parallel": actor}),
            "critic": rl.critic.model_copy(update={"parallel": critic}),
            "reference": reference,
        }
    )
    return config.model_copy(update={"rl": rl}), notices


def ranks_of(config: RunConfig) -> int | None:
    """The ranks that `trainer.n_gpus_per_node` and `nnodes` ask for; None where they don't."""
    per_node = config.run.n_gpus_per_node
    return None if per_node is None else per_node * config.run.nnodes


def gpu_pools(config: RunConfig) -> RLConfig:
    """The run's settings with a GPU for each rank of the policy, where Ray has any.

    Called when the placement is chosen and Ray is there. Raises PlacementError where
    `run.device=cuda` finds none. Pools that were given stay, and so does `auto`.
    """
    from engine.trainers.auto_placement import cluster_has_gpus
    from engine.trainers.rl_setup import default_pools
    from engine.trainers.rollout_sources import sampler_count
    from engine.trainers.workload import run_roles

    rl, device, ranks = config.rl, config.run.device, ranks_of(config)
    trainer = rl.trainer
    if trainer.placement == "local":
        _check_cuda_here(device)
        return rl
    if trainer.pools or trainer.placement != "ray" or device == "cpu" or ranks is None:
        return rl
    if not cluster_has_gpus(rl):
        if device == "cuda":
            raise PlacementError("run.device=cuda, and Ray has no GPU; set trainer.device=cpu")
        say(f"rl: Ray has no GPU, so {ranks} ranks compute on CPUs")
        return rl
    if sampler_count(trainer):
        raise ConfigError(
            f"run.n_gpus_per_node with trainer.mode={trainer.mode}: say which GPUs decode, with "
            "trainer.placement=auto or trainer.pools"
        )
    policy, *others = default_pools(run_roles(rl)[1])
    pools = [PoolConfig(roles=policy, cpus=1.0, gpus=1.0)]
    pools += [PoolConfig(roles=roles, cpus=0.0) for roles in others]
    placed = trainer.model_copy(update={"pools": tuple(pools)})
    return rl.model_copy(update={"trainer": placed})


def _check_cuda_here(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise PlacementError(
            "run.device=cuda, and PyTorch sees no GPU here; set trainer.device=cpu"
        )


def _filled(role: str, parallel: ParallelConfig, ranks: int) -> ParallelConfig:
    """The layout on `ranks` ranks."""
    layout = Layout.of(parallel)
    if layout.world_size == ranks:
        return parallel
    rest, left_over = divmod(ranks, layout.world_size)
    free = "fsdp" if layout.fsdp == 1 else "dp"
    if left_over or layout.dp > 1:
        sizes = ", ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
        raise ConfigError(
            f"{role}.parallel ({sizes}) does not make the {ranks} ranks of run.n_gpus_per_node × "
            "run.nnodes; change one of them"
        )
    return parallel.model_copy(update={free: rest})
