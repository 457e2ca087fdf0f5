"""`RLTrainer` in its published forms: models in memory, a pipeline, a dictionary of settings.

Each becomes the arguments of `engine.trainers.rl.RLTrainer`, which does the work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from engine.cli.settings import RunConfig
from engine.compat.device_mesh import DeviceMesh
from engine.compat.models import hand_back, policy_module, write_actor, write_critic
from engine.compat.pipeline import DataPipeline
from engine.compat.rewards import reward_settings
from engine.compat.settings import read_settings
from engine.config import ParallelConfig, RLConfig
from engine.data.loader import PromptLoader, make_rl_data_loader
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.trainers import rl
from engine.trainers.workload import run_roles


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
            own: dict[str, Any] = options if config is None else {**options, "config": config}
            super().__init__(*native, **own)
            return
        if pipeline is not None:
            given = pipeline.arguments()
            actor_model, critic_model = given["actor_model"], given["critic_model"]
            tokenizer, reward_model = tokenizer or given["tokenizer"], given["reward_model"]
            reward_fn = reward_fn or given["reward_fn"]
            algo, data_loader = algo or given["algo"], data_loader or given["data_loader"]
            config = {**given["config"], **_dictionary(config)}
        if (actor_model is None) == (actor_engine is None):
            raise ConfigError("RLTrainer needs one of actor_model, actor_engine and pipeline")
        actor = actor_model if actor_engine is None else actor_engine
        resolved = read_settings(_dictionary(config), algo)
        run = resolved.config
        path, dtype, tokenizer = self._start(actor, tokenizer, run.model.dtype)
        settings = _with_critic(run.rl, self._critic(critic_model, tokenizer))
        settings = _with_reward(settings, reward_fn, reward_model, tokenizer)
        settings = _with_mesh(settings, device_mesh)
        loader = _loader(data_loader, run)
        settings = settings.model_copy(
            update={
                "trainer": settings.trainer.model_copy(
                    update={"train_batch_size": loader.batch_size}
                )
            }
        )
        settings = RLConfig.model_validate(settings.model_dump())
        length = run.data.max_response_length
        super().__init__(
            path,
            settings,
            loader,
            max_response_length=length,
            max_model_len=_longest(loader, tokenizer) + length,
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
        """As `engine.trainers.rl.RLTrainer.fit`; a model in memory then has what was learned."""
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
        """The folder that workers load, its dtype, and the tokenizer."""
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


def _with_critic(config: RLConfig, path: str | None) -> RLConfig:
    if path is None:
        return config
    return config.model_copy(
        update={"critic": config.critic.model_copy(update={"model_path": path})}
    )


def _with_reward(
    config: RLConfig, function: object, models: object, tokenizer: PreTrainedTokenizerBase
) -> RLConfig:
    several = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else None
    listed = several if several is not None else ([] if models is None else [models])
    section, anywhere = reward_settings(function, listed, tokenizer)
    if not section:
        return config
    reward = {**config.reward.model_dump(exclude_unset=True), **section}
    values = config.model_dump() | {"reward": {**config.reward.model_dump(), **reward}}
    if not anywhere:
        if config.trainer.placement not in ("", "local"):
            raise ConfigError(
                f"trainer.placement={config.trainer.placement} with a reward that lives in this "
                "process; put it into a module of its own, as a function of prompts and completions"
            )
        values["trainer"] |= {"placement": "local"}
    return RLConfig.model_validate(values)


def _with_mesh(config: RLConfig, mesh: DeviceMesh | None) -> RLConfig:
    """The placement and the sizes that a mesh says; sizes that were given stay."""
    if mesh is None:
        return config
    actor, ranks = config.actor.parallel, mesh.ranks()
    if actor == ParallelConfig() and ranks > 1:
        actor = actor.model_copy(update={"fsdp": ranks})
    pools = mesh.pools(run_roles(config)[1])
    critic = config.critic.parallel
    apart = any("critic" in pool.roles and "actor" not in pool.roles for pool in pools)
    if apart and critic is None:
        critic = ParallelConfig(fsdp=mesh.ranks("critic"))
    return config.model_copy(
        update={
            "actor": config.actor.model_copy(update={"parallel": actor}),
            "critic": config.critic.model_copy(update={"parallel": critic}),
            "trainer": config.trainer.model_copy(update={"placement": "ray", "pools": pools}),
        }
    )


def _loader(given: object, run: RunConfig) -> PromptLoader:
    if isinstance(given, PromptLoader):
        return given
    if isinstance(given, str | Path):
        size = run.rl.trainer.train_batch_size
        return make_rl_data_loader(given, batch_size=size, seed=run.seed)
    raise ConfigError(
        f"RLTrainer has {'no prompts' if given is None else repr(given)}; give data_loader="
        "make_rl_data_loader(path), or the path"
    )


def _longest(loader: PromptLoader, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    prompts = [row["prompt"] for row in loader.rows()]
    return max(map(len, encode_prompts(tokenizer, prompts, "data_loader")))
