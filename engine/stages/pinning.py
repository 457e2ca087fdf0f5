"""Pins what settings refer to by name, so that it is part of cache keys and manifests.

A hub model gets the commit that it is loaded at; code, files and folders get a digest. What modules
import from elsewhere is not in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from engine.config import (
    AgentConfig,
    AlgorithmConfig,
    EvaluateConfig,
    MultiTurnConfig,
    PairsConfig,
    PipelineConfig,
    RewardConfig,
    RLConfig,
)
from engine.storage.digests import hash_file, modules_digest, tree_digest
from engine.storage.filesystem import pin_revision

C = TypeVar("C", bound=PipelineConfig)


def pin_named_content(config: C) -> C:
    """Return the settings with `named_content`, the rewards of pairs and evaluation, and the
    teacher's and critic's commits.

    Raises ModelError for a model on the hub whose commit can't be resolved.
    """
    rl = config.rl
    rl = rl.model_copy(update={"algorithm": _pinned_teachers(rl.algorithm)})
    if rl.critic.model_path:
        path = pin_revision(rl.critic.model_path, "rl.critic.model_path")
        rl = rl.model_copy(update={"critic": rl.critic.model_copy(update={"model_path": path})})
    rl = rl.model_copy(update={"named_content": named_content(rl)})
    if rl.rollout.multi_turn.enable:
        agent = pinned_agent(rl.rollout.agent, rl.rollout.multi_turn)
        rl = rl.model_copy(update={"rollout": rl.rollout.model_copy(update={"agent": agent})})
    pairs, evaluate = _pinned_pairs(config), pinned_evaluation(config)
    return config.model_copy(update={"rl": rl, "pairs": pairs, "evaluate": evaluate})


def pin_model_commit(config: C) -> C:
    """Return the settings with `model.path`, where it is a hub id, with its commit.

    Raises ModelError where neither the hub nor its local cache says which.
    """
    model = config.model.model_copy(update={"path": pin_revision(config.model.path)})
    return config.model_copy(update={"model": model})


def _pinned_pairs(config: PipelineConfig) -> PairsConfig:
    """Return what makes pairs, with the digest of its reward's modules."""
    pairs = config.ranking()
    code = modules_digest([*pairs.plugins, *_modules(_reward_names(pairs.scorer))])
    return pairs.model_copy(update={"named_content": code})


def _pinned_teachers(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    if algorithm.teacher:
        pinned = pin_revision(algorithm.teacher, "rl.algorithm.teacher")
        return algorithm.model_copy(update={"teacher": pinned})
    names = list(algorithm.teacher_models)  # of the teachers with a model, in their order
    teachers = tuple(
        teacher.model_copy(update={"model": pin_revision(teacher.model, f"rl.{names.pop(0)}")})
        if teacher.model
        else teacher
        for teacher in algorithm.distillation.teachers
    )
    distillation = algorithm.distillation.model_copy(update={"teachers": teachers})
    return algorithm.model_copy(update={"distillation": distillation})


def pinned_evaluation(config: PipelineConfig) -> EvaluateConfig:
    """Return how models are evaluated, with digests of the reward's modules and of own tasks."""
    evaluate = config.evaluation()
    code = modules_digest([*evaluate.plugins, *_modules(_reward_names(evaluate.scorer))])
    harness = evaluate.lm_eval
    if harness.include_path and Path(harness.include_path).is_dir():
        content = tree_digest(Path(harness.include_path))
        harness = harness.model_copy(update={"named_content": content})
    pinned: dict[str, object] = {"named_content": code, "lm_eval": harness}
    if evaluate.multi_turn is not None and evaluate.multi_turn.enable:
        pinned["agent"] = pinned_agent(evaluate.environments, evaluate.multi_turn)
    return evaluate.model_copy(update=pinned)


def pinned_agent(agent: AgentConfig, multi_turn: MultiTurnConfig) -> AgentConfig:
    """Return the settings of episodes, with the digest of environment, tools and parser.

    Options count with the modules of `package.module:name` and the content of files that they name,
    `id` of the environment verifiers with its package.
    """
    from engine.agents.environments import verifiers_module

    environment = agent.environment
    named = [environment.name, multi_turn.format, *_texts(environment.options)]
    files = [hash_file(name) for name in named if _is_file(name)]
    modules = _modules(named)
    if environment.name == "verifiers":
        modules.append(verifiers_module(str(environment.options.get("id", ""))))
    digests = "\0".join(filter(None, [modules_digest(modules), *files]))
    content = hashlib.sha256(digests.encode()).hexdigest() if digests else ""
    return agent.model_copy(update={"named_content": content})


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in an option's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for part in value.values() for text in _texts(part))
    elif isinstance(value, Sequence):
        yield from (text for part in value for text in _texts(part))


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # no name of a file: too long, or with a null character
        return False


def _reward_names(reward: RewardConfig) -> list[str]:
    return [spec.name for spec in reward.specs().values()]


def _modules(names: Iterable[str]) -> list[str]:
    """Return the modules of those names that are paths like `package.module:name`."""
    return [name.partition(":")[0] for name in names if ":" in name]


def named_content(rl: RLConfig) -> str:
    """Return the digest of plugins and modules that settings name, and of models' folders."""
    algorithm, loss = rl.algorithm, rl.actor.policy_loss.loss_mode
    names = [algorithm.dataflow, algorithm.adv_estimator, rl.rollout.engine, loss]
    names += [algorithm.preference.loss, *_reward_names(rl.reward)]
    code = modules_digest([*rl.plugins, *_modules(names)])
    paths = [*algorithm.teacher_models.values(), rl.critic.model_path]
    folders = [Path(path) for path in paths if path]
    weights = "\0".join(tree_digest(folder) for folder in folders if folder.is_dir())
    digests = f"{code}\0{weights}"
    return hashlib.sha256(digests.encode()).hexdigest() if code or weights else ""


def model_digest(path: str) -> str:
    """Return the digest of a model's folder and of an adapter's base; a pinned id as it is."""
    from engine.models.loading import adapter_base_path

    if not Path(path).is_dir():
        return path
    digest, base = tree_digest(Path(path)), adapter_base_path(path)
    if base is None:
        return digest
    base_digest = model_digest(pin_revision(base, f"the base of model.path={path!r}"))
    return hashlib.sha256(f"{digest}\0{base_digest}".encode()).hexdigest()
