"""`RLTrainer` in its published forms: models in memory, a `DataPipeline`, a `DeviceMesh`.

Each becomes the arguments of `engine.trainers.rl.RLTrainer`, which does the work.
"""

import hashlib
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from engine.cli.reward_file import each_row
from engine.cli.settings import RunConfig
from engine.compat.hf_trainer import Trainer, read_settings
from engine.config import ParallelConfig, PoolConfig, RLConfig
from engine.data.chat_template import Message
from engine.data.loader import PromptLoader, make_rl_data_loader
from engine.data.templates import encode_conversation, encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, RewardError
from engine.models import CriticModel, load_model, save_model, save_tensors
from engine.models.value_head import classifier_of, classifier_tensors
from engine.rewards.reward_function import register_reward
from engine.runtime import HybridActor
from engine.runtime.policy_runtime import open_tokenizer
from engine.trainers import rl
from engine.trainers.run_spec import run_roles

_RANGE = re.compile(r"(cuda|gpu|cpu)(?::(\d+)(?:-(\d+))?)?", re.IGNORECASE)
_NAMES = {"policy": "actor", "ref": "reference", "value": "critic", "reward_model": "reward"}
_WITH_ACTOR = ("actor", "rollout", "reference", "critic")  # where no part names them


@dataclass(frozen=True)
class DeviceMesh:
    """Devices of a cluster, such as `cuda:3` or `cuda:0-3`, and the roles on parts of them.

    Roles that no part names are the actor's neighbours. Ray picks the very devices.

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

    Models are transformers' (or a `HybridActor`), or paths; prompts a loader, or the path of a
    file. `rollout_config` and `train_config` have the keys of `RLTrainer`'s `config`.
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
        of an estimator. `config` has the keys of `main_ppo`, or short ones such as `lr`."""
        self._actor: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if native or "model_path" in options:
            if config is not None:
                options["config"] = config
            super().__init__(*native, **options)
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
            if (critic := _write_critic(critic_model, self._actor, tokenizer, folder)) is not None:
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
            learned = load_model(trained, _dtype(self._actor))
            self._actor.load_state_dict(learned.state_dict())
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
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(actor, str | Path):
            return str(actor), dtype, tokenizer or open_tokenizer(actor)
        tokenizer = tokenizer or getattr(actor, "tokenizer", None)
        if isinstance(actor, HybridActor):
            if actor._sharded is not None:
                raise ConfigError("a HybridActor is on several ranks; set actor.parallel in config")
            actor = actor.policy
        self._actor, folder = actor, self._new_folder("start")
        return str(folder), _write_actor(self._actor, tokenizer, folder), tokenizer

    def _new_folder(self, name: str) -> Path:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="hybridflyte-")
        return Path(self._folder.name) / name


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


# Models in memory as the folders that a run's workers load; rewards as settings.


def _write_actor(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> str:
    if tokenizer is None:
        raise ConfigError("RLTrainer got a model in memory and no tokenizer; give tokenizer=…")
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ConfigError(
            f"actor_model is a {type(model).__name__}; give a causal LM, a HybridActor, or a path"
        )
    save_model(model, tokenizer, folder)
    return _dtype(model)


def _write_critic(
    critic: object, actor: Any, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> str | None:
    """Write a critic for `critic.model_path`; None for a fresh one, which the run makes itself."""
    if isinstance(critic, str | Path):
        return str(critic)
    if not isinstance(critic, CriticModel):
        raise ConfigError(
            f"critic_model is a {type(critic).__name__}; give create_critic_model(model), or a path"
        )
    if actor is not None and not critic.head.weight.detach().any():
        base, backbone = actor.base_model.state_dict(), critic.backbone.state_dict()
        if base.keys() == backbone.keys() and all(torch.equal(base[k], backbone[k]) for k in base):
            return None
    if bool(critic.head.bias.detach().any()):
        raise ConfigError("critic_model's head has a bias, which a classifier can't hold; set it 0")
    dtype = next(critic.parameters()).dtype
    classifier = classifier_of(critic.config, dtype, int(tokenizer.pad_token_id or 0))
    tensors = classifier_tensors(classifier, critic.state_dict().items())
    save_tensors(classifier, tensors, tokenizer, folder)
    return str(folder)


def _dtype(model: torch.nn.Module) -> str:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"actor_model has weights of {dtype}; convert it to torch.float32")
    return dtype


_PROMPTS = ("prompts", "prompt", "queries", "query", "questions")
_COMPLETIONS = ("completions", "completion", "responses", "response", "outputs", "texts")


def _put_reward(
    values: dict[str, Any], function: object, models: object, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Put reward functions and models, whose values are added, into the values of an RLConfig."""
    if models is None or isinstance(models, str) or not isinstance(models, Sequence):
        models = [] if models is None else [models]
    rewards = [_of_function(function)] if function is not None else []
    rewards += [_of_model(model, tokenizer) for model in models]
    specs: list[dict[str, Any]] = [
        # A function that its module's name leads to is in every process; any other is in this one.
        {"name": _registered(reward, source)} if callable(reward) else reward
        for reward, source in rewards
    ]
    if specs:
        values["reward"] |= specs[0]
    if specs[1:]:
        components = {f"reward_{i}": spec for i, spec in enumerate(specs[1:], start=2)}
        values["reward"]["components"] = components
    if any(callable(reward) for reward, _ in rewards):
        if values["trainer"]["placement"] not in ("", "local"):
            raise ConfigError(
                f"trainer.placement={values['trainer']['placement']} with a reward that lives in "
                "this process; put it into a module, as a function of prompts and completions"
            )
        values["reward"]["isolation"], values["trainer"]["placement"] = "none", "local"


# A reward's section, or a function that only this process has; and what it was made from.
_Reward = tuple[dict[str, Any] | Callable[..., object], object]


def _of_function(function: object) -> _Reward:
    if isinstance(function, str):
        return {"name": function}, function
    if not callable(function):
        raise ConfigError(f"reward_fn={function!r} is no function; give one, or a reward's name")
    parameters = inspect.signature(function).parameters
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    is_reward = {"prompts", "completions"} <= parameters.keys()
    in_module = module not in ("", "__main__") and "." not in name
    if is_reward and in_module and getattr(sys.modules.get(module), name, None) is function:
        return {"name": f"{module}:{name}"}, function
    if {"solution_str", "ground_truth"} <= parameters.keys():  # verl's kind, of one row
        return each_row(function), function
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    prompt = next((p for p in _PROMPTS if p in parameters), "")
    completion = next((p for p in _COMPLETIONS if p in parameters), "")
    if not completion:
        raise ConfigError(
            f"reward_fn{inspect.signature(function)} takes no completions; write it as "
            "def reward(prompts, completions, *, ground_truth, **columns) -> list[float]"
        )

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        arguments = {k: v for k, v in columns.items() if takes_all or k in parameters}
        arguments |= {completion: list(completions)} | ({prompt: list(prompts)} if prompt else {})
        scores = function(**arguments)
        return scores.tolist() if isinstance(scores, Tensor) else scores

    return reward, function


def _of_model(model: object, tokenizer: PreTrainedTokenizerBase) -> _Reward:
    if isinstance(model, str | Path):
        return {"name": "reward_model", "options": {"model": str(model)}}, model
    if not callable(model):
        raise ConfigError(f"a reward model is {model!r}; give a model, or the path of one")

    def score(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        messages = columns.get("messages") or [[{"role": "user", "content": p}] for p in prompts]
        turns = [
            [*prompt, {"role": "assistant", "content": completion}]
            for prompt, completion in zip(messages, completions, strict=True)
        ]
        return model_scores(model, tokenizer, turns)

    return score, model


@torch.no_grad()
def model_scores(
    model: Any, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]
) -> list[float]:
    """Return conversations' scores by a model that takes `input_ids` and `attention_mask` `[B, L]`.

    It returns a tensor `[B]` or `[B, 1]`, or an object or mapping with that as `scores` or
    `logits`. Rows are padded on the right. Raises RewardError for any other output.
    """
    rows = [torch.tensor(encode_conversation(tokenizer, turns)) for turns in conversations]
    ids = pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id or 0))
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    device = next((p.device for p in getattr(model, "parameters", tuple)()), ids.device)
    out = model(input_ids=ids.to(device), attention_mask=mask.to(device))
    for name in ("scores", "logits"):
        scores = out.get(name) if isinstance(out, dict) else getattr(out, name, None)
        out = scores if scores is not None else out
    if not isinstance(out, Tensor) or out.numel() != len(rows):
        what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise RewardError(
            f"a reward model of {type(model).__name__} returned {what} for {len(rows)} "
            "conversations; it must return `scores`, a tensor [batch]"
        )
    return [float(score) for score in out.flatten().float()]


def _registered(function: Callable[..., object], source: object) -> str:
    digest = hashlib.sha256(f"{source!r}{id(source)}".encode()).hexdigest()[:8]
    name = f"{getattr(source, '__name__', type(source).__name__).strip('<>')}_{digest}"
    function.__qualname__ = name
    register_reward(name)(function)
    return name
