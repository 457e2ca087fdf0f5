"""Applies a resource profile to the engine's settings: layout, pools, and checks."""

from __future__ import annotations

from typing import TypeVar

from engine.config import OfflineConfig, ParallelConfig, PipelineConfig, PoolConfig, RLConfig
from engine.errors import ConfigError
from tasks.content_pinning import pin_named_content
from tasks.context import echo
from tasks.profiles import ONE_RANK, Profile

C = TypeVar("C", bound=PipelineConfig)
Offline = TypeVar("Offline", bound=OfflineConfig)

# Roles that share the policy's processes, in the order in which they are built.
_POLICY_ROLES = ("actor", "rollout", "reference", "teacher", "critic")


def apply_profile(config: C, profile: Profile) -> C:
    """Return the settings with the profile's layout and GPUs where they leave both open.

    And with `rl.named_content`, which stages are keyed by. Layout: `rl.actor.parallel` and those of
    `sft`, `preference` and `reward_model`, where they are the default of one rank. GPUs:
    `rl.trainer.pools` (where rollout waits for training) and theirs, where they are empty. With
    `rl.trainer.placement=auto` RL's stay open for the engine's planner, which sees the machines at
    each start. Raises ConfigError for settings that the profile's machines can't take.
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
    _check_evaluation(config.evaluate.parallel, profile)
    sft = config.sft if config.sft.skip else _on_gpus(config.sft, profile)
    own = {
        name: _on_gpus(getattr(config, name), profile) for name in ("preference", "reward_model")
    }
    return config.model_copy(update={"rl": rl, "sft": sft, **own})


def check_model_layouts(config: PipelineConfig) -> None:
    """Raise ConfigError for a layout of several ranks that the model can't be split over.

    Layouts that are still to be chosen (`rl.trainer.placement=auto`) are left to the planner.
    """
    from engine.parallel.layout import Layout

    rl, sft, evaluation, lora = config.rl, config.sft, config.evaluate.parallel, config.model.lora
    critic = rl.critic.parallel or rl.actor.parallel
    warm_start = not sft.skip and Layout.of(sft.parallel).world_size > 1
    ranks = max(Layout.of(one).world_size for one in (rl.actor.parallel, critic))
    trained = rl.trainer.placement != "auto" and ranks > 1
    evaluated = evaluation is not None and evaluation.tp > 1
    if not (warm_start or trained or evaluated):
        return
    from engine.evaluation.layout import check_evaluation_layout
    from engine.models import text_config
    from engine.trainers.layouts import check_layouts
    from engine.trainers.offline_ranks import check_offline_layout

    model = text_config(config.model.path)
    if warm_start:
        check_offline_layout(sft, lora, model)
    if trained:
        check_layouts(rl, lora, model)
    check_evaluation_layout(config.evaluate, model)


def _check_evaluation(parallel: ParallelConfig | None, profile: Profile) -> None:
    """Evaluation is on one machine, all of whose GPUs it takes where no layout is given."""
    from engine.parallel.layout import Layout

    ranks = 1 if parallel is None else Layout.of(parallel).world_size
    if ranks > profile.gpus:
        raise ConfigError(
            f"evaluate.parallel is a layout of {ranks} ranks, but a machine of "
            f"profile={profile.name}, which evaluates, has {profile.gpus} GPUs; choose a smaller "
            "layout, or leave it out for all of them"
        )


def _on_gpus(config: Offline, profile: Profile) -> Offline:
    """On ranks where the profile's machines have several GPUs; else as it is."""
    section = config.section
    if not profile.several_gpus:
        _check_size(f"{section}.parallel", config.parallel, profile)
        return config
    if config.placement == "local":
        raise ConfigError(
            f"{section}.placement=local with profile={profile.name}: the profile's GPUs are on Ray "
            f"workers; leave {section}.placement out, or set profile=laptop"
        )
    parallel = profile.layout if config.parallel == ONE_RANK else config.parallel
    _check_size(f"{section}.parallel", parallel, profile)
    pool = PoolConfig(roles=(section,), cpus=_cpus(profile), gpus=1.0)
    placed = {"parallel": parallel, "placement": "ray", "pools": config.pools or (pool,)}
    return config.model_copy(update=placed)


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
    _check_size("rl.actor.parallel", rl.actor.parallel, profile)
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
    policy = tuple(role for role in _POLICY_ROLES if role in roles)
    others = tuple(sorted(roles - set(policy)))  # the reward, at least
    return (
        PoolConfig(roles=policy, cpus=_cpus(profile), gpus=1.0),
        PoolConfig(roles=others, cpus=1.0),
    )


def _cpus(profile: Profile) -> int:
    """Of a rank on one GPU; others of the machine's are for roles without one."""
    return max(1, profile.cpus // profile.gpus - 1)


def _check_size(setting: str, parallel: ParallelConfig, profile: Profile) -> None:
    from engine.parallel.layout import Layout

    ranks = Layout.of(parallel).world_size
    if ranks > profile.most_gpus:
        raise ConfigError(
            f"{setting} is a layout of {ranks} ranks, but profile={profile.name} has at most "
            f"{profile.most_gpus} GPUs; choose a smaller layout, or another profile"
        )
