"""Applies a resource profile to the engine's settings: layout, pools, and checks."""

from __future__ import annotations

from typing import TypeVar

from engine.config import ParallelConfig, PipelineConfig, PoolConfig, RLConfig
from engine.errors import ConfigError
from tasks.content_pinning import pin_named_content
from tasks.context import echo
from tasks.profiles import ONE_RANK, Profile

C = TypeVar("C", bound=PipelineConfig)

# Roles that share the policy's processes, in the order in which they are built.
_POLICY_ROLES = ("actor", "rollout", "reference", "teacher", "critic")


def apply_profile(config: C, profile: Profile) -> C:
    """Return the settings with the profile's layout and GPUs where they leave both open.

    And with `rl.named_content`, which stages are keyed by. Layout: `rl.actor.parallel`, where it
    is the default of one rank. GPUs: `rl.trainer.pools`, where it is empty and rollout waits for
    training. With `rl.trainer.placement=auto` both stay open for the engine's planner, which sees
    the machines at each start. Raises ConfigError for settings that the profile's machines can't
    take.
    """
    config = pin_named_content(config)
    if not profile.gpus:
        return config
    if config.rl.trainer.placement == "local":
        raise ConfigError(
            f"rl.trainer.placement=local with profile={profile.name}: the profile's GPUs are on "
            "Ray workers; set rl.trainer.placement=ray, or profile=laptop"
        )
    auto = config.rl.trainer.placement == "auto"
    rl = (_with_precision if auto else _with_layout)(config.rl, profile)
    return config.model_copy(update={"rl": rl})


def _with_precision(rl: RLConfig, profile: Profile) -> RLConfig:
    """The profile's compute dtype alone; the planner chooses the layout.

    The planner treats any layout that differs from the default as the user's choice.
    """
    echo("plan: rl.trainer.placement=auto: layout and pools are chosen at each start of rl")
    if rl.actor.parallel.compute_dtype:
        return rl
    precision = {"compute_dtype": profile.layout.compute_dtype}
    parallel = rl.actor.parallel.model_copy(update=precision)
    actor = rl.actor.model_copy(update={"parallel": parallel})
    return rl.model_copy(update={"actor": actor})


def _with_layout(rl: RLConfig, profile: Profile) -> RLConfig:
    if rl.trainer.mode != "sync":
        echo(
            f"plan: rl.trainer.mode={rl.trainer.mode}: layout and pools stay as configured, as "
            "rollout processes need GPUs of their own (rl.trainer.pools)"
        )
        return rl
    if rl.actor.parallel == ONE_RANK:
        actor = rl.actor.model_copy(update={"parallel": profile.layout})
        rl = rl.model_copy(update={"actor": actor})
    ranks, most = _ranks(rl.actor.parallel), profile.gpus * profile.replicas.most
    if ranks > most:
        raise ConfigError(
            f"rl.actor.parallel is a layout of {ranks} ranks, but profile={profile.name} has "
            f"at most {most} GPUs; choose a smaller layout, or "
            "another profile"
        )
    if rl.trainer.pools:
        return rl
    trainer = rl.trainer.model_copy(update={"pools": _pools(rl, profile)})
    return rl.model_copy(update={"trainer": trainer})


def _pools(rl: RLConfig, profile: Profile) -> tuple[PoolConfig, ...]:
    """The policy's roles on one GPU a rank, all other roles on a core of their own."""
    from engine.dataflows import choose_dataflow
    from engine.dataflows.required_passes import RequiredPasses
    from engine.plugins import import_plugins

    import_plugins(rl.plugins)
    dataflow = choose_dataflow(rl.algorithm)
    roles = RequiredPasses.of(rl, dataflow).roles(dataflow)
    cpus = max(1, profile.cpus // profile.gpus - 1)
    policy = tuple(role for role in _POLICY_ROLES if role in roles)
    others = tuple(sorted(roles - set(policy)))  # the reward, at least
    return (
        PoolConfig(roles=policy, cpus=cpus, gpus=1.0),
        PoolConfig(roles=others, cpus=1.0),
    )


def _ranks(parallel: ParallelConfig) -> int:
    from engine.parallel.layout import Layout

    return Layout.of(parallel).world_size
