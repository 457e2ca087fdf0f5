"""`RLTrainer` in its published forms: models in memory, a `DataPipeline`, a `DeviceMesh`.

Each becomes the arguments of `engine.trainers.rl.RLTrainer`, which does the work.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from engine.cli.settings import RunConfig
from engine.compat.hf_trainer import read_settings
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
from engine.trainers.run_spec import run_roles

_RANGE = re.compile(r"(cuda|gpu|cpu)(?::(\d+)(?:-(\d+))?)?", re.IGNORECASE)
_NAMES = {"policy": "actor", "ref": "reference", "value": "critic", "reward_model": "reward"}
_WITH_ACTOR = ("actor", "rollout", "reference", "critic")  # where no part names them


@dataclass(frozen=True)
class DeviceMesh:
    """Devices of a cluster, and the roles on parts of them.

    Devices are `cuda:3`, or ranges such as `cuda:0-3`. Roles that no part names are the actor's
    neighbours, as they are without a mesh. Ray picks the very devices; how many there are, and
    which roles share them, is as here.

    Examples:
        >>> parts = {"actor": ["cuda:0-3"], "critic": ["cuda:4-7"]}
        >>> mesh = DeviceMesh(devices=["cuda:0-7"], sub_meshes=parts)
    """

    devices: Sequence[str] = ()
    sub_meshes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        devices, taken = set(_expanded(self.devices)), dict[str, str]()
        for role, part in self.sub_meshes.items():
            for device in _expanded(part):
                if devices and device not in devices:
                    raise ConfigError(
                        f"DeviceMesh: sub_meshes[{role!r}] has {device}, which is not in devices; "
                        "add it there, or leave it out"
                    )
                other = taken.setdefault(device, role)
                if other != role and set(_expanded(self.sub_meshes[other])) != set(_expanded(part)):
                    raise ConfigError(
                        f"DeviceMesh: {device} is in sub_meshes[{other!r}] and in "
                        f"sub_meshes[{role!r}], which differ; give them the same devices, or others"
                    )

    def ranks(self, role: str = "actor") -> int:
        """Return the number of devices of a role; of all, where no part names it."""
        part = self._parts().get(role, ())
        return len(part or _expanded(self.devices)) or 1

    def pools(self, roles: frozenset[str]) -> tuple[PoolConfig, ...]:
        """Return the pools of a run with these roles; ConfigError for a role that it hasn't."""
        parts = self._parts()
        if unknown := sorted(parts.keys() - roles):
            raise ConfigError(
                f"DeviceMesh: sub_meshes names {unknown[0]!r}, and this run has {sorted(roles)}; "
                "leave it out"
            )
        actor = parts.get("actor", tuple(_expanded(self.devices)))
        together: dict[tuple[str, ...], list[str]] = {}
        for role in sorted(roles, key=lambda name: (name != "actor", name)):
            part = parts.get(role, actor if role in _WITH_ACTOR else ())
            together.setdefault(tuple(part) or (role,), []).append(role)
        return tuple(
            PoolConfig(
                roles=tuple(names),
                cpus=1.0 if "actor" in names else 0.0,
                gpus=1.0 if part[0].startswith("cuda") else 0.0,
            )
            for part, names in together.items()
        )

    def _parts(self) -> dict[str, tuple[str, ...]]:
        return {
            _NAMES.get(role, role): tuple(_expanded(part)) for role, part in self.sub_meshes.items()
        }


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
            raise ConfigError(
                f"DataPipeline has {len(self.actors)} actors; give one, the policy that learns"
            )
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
            if config is not None:
                options["config"] = config
            super().__init__(*native, **options)
            return
        if pipeline is not None:
            actor_model = pipeline.actors[0]
            critic_model = pipeline.critics[0] if pipeline.critics else None
            tokenizer, reward_model = tokenizer or pipeline.tokenizer, [*pipeline.reward_models]
            reward_fn, algo = reward_fn or pipeline.reward_fn, algo or pipeline.algorithm
            data_loader = data_loader or pipeline.data_loader
            config = {**pipeline.rollout_config, **pipeline.train_config, **_dictionary(config)}
        if (actor_model is None) == (actor_engine is None):
            raise ConfigError("RLTrainer needs one of actor_model, actor_engine and pipeline")
        actor = actor_model if actor_engine is None else actor_engine
        run = read_settings(_dictionary(config), algo).config
        path, dtype, tokenizer = self._start(actor, tokenizer, run.model.dtype)
        values = run.rl.model_dump()
        if (critic := self._critic(critic_model, tokenizer)) is not None:
            values["critic"]["model_path"] = critic
        _put_reward(values, reward_fn, reward_model, tokenizer)
        if device_mesh is not None:
            _put_mesh(values, device_mesh)
        loader = _loader(data_loader, run)
        values["trainer"]["train_batch_size"] = loader.batch_size
        prompts = [row["prompt"] for row in loader.rows()]
        longest = max(map(len, encode_prompts(tokenizer, prompts, "data_loader")))
        length = run.data.max_response_length
        super().__init__(
            path,
            RLConfig.model_validate(values),
            loader,
            max_response_length=length,
            max_model_len=longest + length,
            seed=run.seed,
            dtype=dtype,
            lora=run.model.lora,
            **options,
        )

    @classmethod
    def from_hf_config(cls, model: str, config_path: str | Path | None = None, **more: Any) -> Any:
        """`Trainer.from_hf_config`, under this name too."""
        from engine.compat.hf_trainer import Trainer

        return Trainer.from_hf_config(model, config_path, **more)

    def fit(self, *args: Any, **kwargs: Any) -> rl.Metrics:
        """Train as `engine.trainers.rl.RLTrainer.fit`; a model in memory then has the result."""
        metrics = super().fit(*args, **kwargs)
        if self._actor is not None:
            assert self._folder is not None
            trained = Path(self._folder.name) / "trained"
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

    def __enter__(self) -> Self:
        return self

    def _start(self, actor: object, tokenizer: Any, dtype: str) -> tuple[str, str, Any]:
        """Return the folder that workers load, its dtype, and the tokenizer."""
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(actor, str | Path):
            return str(actor), dtype, tokenizer or load_tokenizer(actor)
        tokenizer = tokenizer or getattr(actor, "tokenizer", None)
        self._actor = policy_module(actor)
        self._folder = tempfile.TemporaryDirectory(prefix="hybridflyte-")
        folder = Path(self._folder.name) / "start"
        return str(folder), write_actor(self._actor, tokenizer, folder), tokenizer

    def _critic(self, critic: object, tokenizer: PreTrainedTokenizerBase) -> str | None:
        if critic is None:
            return None
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="hybridflyte-")
        return write_critic(critic, self._actor, tokenizer, Path(self._folder.name) / "critic")


def _dictionary(config: Mapping[str, object] | RLConfig | None) -> Mapping[str, object]:
    if isinstance(config, RLConfig):
        raise ConfigError("config is an RLConfig; give a dictionary of settings beside a model")
    return config or {}


def _put_reward(
    values: dict[str, Any], function: object, models: object, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Put reward functions and models into the values of an RLConfig."""
    several = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else None
    listed = several if several is not None else ([] if models is None else [models])
    section, anywhere = reward_settings(function, listed, tokenizer)
    values["reward"] |= section
    if not anywhere:
        if values["trainer"]["placement"] not in ("", "local"):
            raise ConfigError(
                f"trainer.placement={values['trainer']['placement']} with a reward that lives in "
                "this process; put it into a module of its own, as a function of prompts and "
                "completions"
            )
        values["trainer"]["placement"] = "local"


def _put_mesh(values: dict[str, Any], mesh: DeviceMesh) -> None:
    """Put the placement and the sizes of a mesh into the values of an RLConfig; sizes that were
    given stay."""
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
        "make_rl_data_loader(path), or the path"
    )
