"""`RLTrainer` in its published forms: models in memory, a `DataPipeline`, a `DeviceMesh`.

Each becomes the arguments of `engine.trainers.rl.RLTrainer`, which does the work.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.cli.settings import RunConfig
from engine.compat.hf_trainer import Trainer, read_settings
from engine.compat.in_memory import (
    hand_back,
    policy_module,
    reward_settings,
    write_actor,
    write_critic,
)
from engine.config import ParallelConfig, PoolConfig, RLConfig
from engine.data.loader import PromptLoader, make_rl_data_loader
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.trainers import rl
from engine.trainers.auto_placement import run_roles

_RANGE = re.compile(r"(cuda|gpu|cpu)(?::(\d+)(?:-(\d+))?)?", re.IGNORECASE)
_NAMES = {"policy": "actor", "ref": "reference", "value": "critic", "reward_model": "reward"}
_WITH_ACTOR = ("actor", "rollout", "reference", "critic")  # where no part names them


@dataclass(frozen=True)
class DeviceMesh:
    """Devices of a cluster, such as `cuda:3` or `cuda:0-3`, and the roles on parts of them.

    Roles that no part names are the actor's neighbours. Ray picks the very devices; how many there
    are, and which roles share them, is as here.

    Examples:
        >>> parts = {"actor": ["cuda:0-3"], "critic": ["cuda:4-7"]}
        >>> mesh = DeviceMesh(devices=["cuda:0-7"], sub_meshes=parts)
    """

    devices: Sequence[str] = ()
    sub_meshes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        devices = set(_expanded(self.devices))
        parts = {role: set(_expanded(part)) for role, part in self.sub_meshes.items()}
        for role, part in parts.items():
            if devices and (outside := sorted(part - devices)):
                raise ConfigError(
                    f"DeviceMesh: sub_meshes[{role!r}] has {outside[0]}, which is not in devices"
                )
        for (role, part), (other, others) in combinations(parts.items(), 2):
            if part != others and (shared := sorted(part & others)):
                raise ConfigError(
                    f"DeviceMesh: {shared[0]} is in sub_meshes {role!r} and {other!r}, which differ"
                )

    def ranks(self, role: str = "actor") -> int:
        """Return the number of devices of a role; of all, where no part names it."""
        return len(self._parts().get(role) or _expanded(self.devices)) or 1

    def pools(self, roles: frozenset[str]) -> tuple[PoolConfig, ...]:
        """Return the pools of a run with these roles; ConfigError for a role that it hasn't."""
        parts = self._parts()
        if unknown := sorted(parts.keys() - roles):
            raise ConfigError(
                f"DeviceMesh: sub_meshes names {unknown[0]!r}; leave it out of {sorted(roles)}"
            )
        actor = parts.get("actor", tuple(_expanded(self.devices)))
        together: dict[tuple[str, ...], list[str]] = {}
        for role in sorted(roles, key=lambda name: (name != "actor", name)):
            part = parts.get(role, actor if role in _WITH_ACTOR else ())
            together.setdefault(part or (role,), []).append(role)
        return tuple(
            PoolConfig(
                roles=tuple(names),
                cpus=1.0 if "actor" in names else 0.0,
                gpus=1.0 if part[0].startswith("cuda") else 0.0,
            )
            for part, names in together.items()
        )

    def _parts(self) -> dict[str, tuple[str, ...]]:
        return {_NAMES.get(role, role): tuple(_expanded(p)) for role, p in self.sub_meshes.items()}


def _expanded(devices: Sequence[str] | str) -> list[str]:
    """Return one name a device, e.g. "cuda:0"; raises ConfigError for another form."""
    names: list[str] = []
    for text in [devices] if isinstance(devices, str) else devices:
        match = _RANGE.fullmatch(str(text).strip())
        if match is None:
            raise ConfigError(f"DeviceMesh: {text!r} is no device; write cuda:0, cuda:0-3 or cpu")
        kind = "cpu" if match[1].lower() == "cpu" else "cuda"
        first = int(match[2] or 0)
        names += [f"{kind}:{n}" for n in range(first, int(match[3] or first) + 1)]
    return names


@dataclass(frozen=True)
class DataPipeline:
    """The models and settings of a run: one actor, at most one critic, rewards that are added.

    Models are transformers' (or a `HybridActor`), or paths. Without a reward it is that of the
    settings. `rollout_config` and `train_config` have the keys of `RLTrainer`'s `config`. Prompts
    are a loader, or the path of a file.
    """

    actors: Sequence[object]
    reward_models: Sequence[object] = ()
    critics: Sequence[object] = ()
    algorithm: str = "ppo"
    rollout_config: Mapping[str, object] = field(default_factory=dict)
    train_config: Mapping[str, object] = field(default_factory=dict)
    data_loader: object = None
    tokenizer: object = None
    reward_fn: object = None

    def __post_init__(self) -> None:
        if len(self.actors) != 1:
            raise ConfigError(f"DataPipeline has {len(self.actors)} actors; give one, the policy")
        if len(self.critics) > 1:
            raise ConfigError(f"DataPipeline has {len(self.critics)} critics; give one, or none")


class RLTrainer(rl.RLTrainer):
    """Improves a policy by reinforcement learning; see `engine.trainers.rl.RLTrainer`.

    Examples:
        >>> RLTrainer(actor_model=m, critic_model=create_critic_model(m), tokenizer=tokenizer,
        ...           algo="ppo", data_loader=make_rl_data_loader("data.jsonl"), reward_fn=f,
        ...           config={"lr": 1e-6}).fit(num_steps=1000, checkpoint_dir="ckpt")

    A model in memory is written to a temporary folder, which the run's workers load; after `fit` it
    has what was learned. With a path as the first argument it is the trainer below as it is.
    """

    def __init__(
        self,
        *native: Any,
        pipeline: DataPipeline | None = None,
        actor_model: object = None,
        actor_engine: object = None,
        critic_model: object = None,
        tokenizer: Any = None,
        algo: str | None = None,
        data_loader: object = None,
        reward_fn: object = None,
        reward_model: object = None,
        device_mesh: DeviceMesh | None = None,
        config: Mapping[str, object] | RLConfig | None = None,
        **options: Any,
    ) -> None:
        """`actor_engine` is another name of `actor_model`; `algo` is `ppo`, `grpo`, … or the name
        of an estimator. `config` has the keys of `main_ppo`, or short ones such as `lr`.

        Raises ConfigError before any worker starts, as `engine.trainers.rl.RLTrainer`.
        """
        self._actor: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if native or "model_path" in options:
            super().__init__(*native, **options, **({} if config is None else {"config": config}))
            return
        if isinstance(config, RLConfig):
            raise ConfigError("config is an RLConfig; give a dictionary of settings beside a model")
        settings = config or {}
        if pipeline is not None:
            actor_model = pipeline.actors[0]
            critic_model = pipeline.critics[0] if pipeline.critics else None
            tokenizer, reward_model = tokenizer or pipeline.tokenizer, [*pipeline.reward_models]
            reward_fn, algo = reward_fn or pipeline.reward_fn, algo or pipeline.algorithm
            data_loader = data_loader or pipeline.data_loader
            settings = {**pipeline.rollout_config, **pipeline.train_config, **settings}
        if (actor_model is None) == (actor_engine is None):
            raise ConfigError("RLTrainer needs one of actor_model, actor_engine and pipeline")
        actor = actor_model if actor_engine is None else actor_engine
        run = read_settings(settings, algo).config
        path, dtype, tokenizer = self._start(actor, tokenizer, run.model.dtype)
        values = run.rl.model_dump()
        if critic_model is not None:
            folder = self._new_folder("critic")
            if (critic := write_critic(critic_model, self._actor, tokenizer, folder)) is not None:
                values["critic"]["model_path"] = critic
        _put_reward(values, reward_fn, reward_model, tokenizer)
        if device_mesh is not None:
            _put_mesh(values, device_mesh)
        loader = _loader(data_loader, run)
        values["trainer"]["train_batch_size"] = loader.batch_size
        prompts = [row["prompt"] for row in loader.rows()]
        longest = max(map(len, encode_prompts(tokenizer, prompts, "data_loader")))
        super().__init__(
            path,
            RLConfig.model_validate(values),
            loader,
            max_response_length=run.data.max_response_length,
            max_model_len=longest + run.data.max_response_length,
            seed=run.seed,
            dtype=dtype,
            lora=run.model.lora,
            **options,
        )

    @classmethod
    def from_hf_config(cls, model: str, config_path: str | Path | None = None, **more: Any) -> Any:
        """`Trainer.from_hf_config`, under this name too."""
        return Trainer.from_hf_config(model, config_path, **more)

    def fit(self, *args: Any, **kwargs: Any) -> rl.Metrics:
        """Train as `engine.trainers.rl.RLTrainer.fit`; a model in memory then has the result."""
        metrics = super().fit(*args, **kwargs)
        if self._actor is not None:
            trained = self._new_folder("trained")
            self.save(trained)
            hand_back(trained, self._actor)
        return metrics

    def run(self, checkpoint_dir: str | Path | None = None) -> rl.Metrics:
        """Train for the configured number of steps, stop the workers, return the last metrics."""
        with self:
            return self.fit(checkpoint_dir=checkpoint_dir)

    train = run

    def close(self) -> None:
        """Stop the workers, and remove what was written for them."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self, actor: object, tokenizer: Any, dtype: str) -> tuple[str, str, Any]:
        """Return the folder that workers load, its dtype, and the tokenizer."""
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(actor, str | Path):
            return str(actor), dtype, tokenizer or load_tokenizer(actor)
        tokenizer = tokenizer or getattr(actor, "tokenizer", None)
        self._actor, folder = policy_module(actor), self._new_folder("start")
        return str(folder), write_actor(self._actor, tokenizer, folder), tokenizer

    def _new_folder(self, name: str) -> Path:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="hybridflyte-")
        return Path(self._folder.name) / name


def _put_reward(
    values: dict[str, Any], function: object, models: object, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Put reward functions and models into the values of an RLConfig."""
    if models is None or isinstance(models, str) or not isinstance(models, Sequence):
        models = [] if models is None else [models]
    section, anywhere = reward_settings(function, models, tokenizer)
    values["reward"] |= section
    if not anywhere:
        if values["trainer"]["placement"] not in ("", "local"):
            raise ConfigError(
                f"trainer.placement={values['trainer']['placement']} with a reward that lives in "
                "this process; put it into a module, as a function of prompts and completions"
            )
        values["trainer"]["placement"] = "local"


def _put_mesh(values: dict[str, Any], mesh: DeviceMesh) -> None:
    """Put a mesh's placement and sizes into the values of an RLConfig; sizes that it has stay."""
    config = RLConfig.model_validate(values)
    if config.actor.parallel == ParallelConfig() and mesh.ranks() > 1:
        values["actor"]["parallel"]["fsdp"] = mesh.ranks()
    pools = mesh.pools(run_roles(config)[1])
    apart = any("critic" in pool.roles and "actor" not in pool.roles for pool in pools)
    if apart and config.critic.parallel is None:
        values["critic"]["parallel"] = {"fsdp": mesh.ranks("critic")}
    values["trainer"] |= {"placement": "ray", "pools": [pool.model_dump() for pool in pools]}


def _loader(data: object, run: RunConfig) -> PromptLoader:
    if isinstance(data, PromptLoader):
        return data
    if isinstance(data, str | Path):
        size = run.rl.trainer.train_batch_size
        return make_rl_data_loader(data, batch_size=size, seed=run.seed)
    raise ConfigError(
        f"RLTrainer has {'no prompts' if data is None else repr(data)}; give data_loader="
        "make_rl_data_loader(path)"
    )
