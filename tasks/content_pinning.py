"""Pins what settings refer to by name, so that it is part of cache keys and manifests.

A hub model gets the commit that it is loaded at; code, files and folders get a digest.
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

C = TypeVar("C", bound=PipelineConfig)


def pin_named_content(config: C) -> C:
    """Return the settings with `named_content`, the rewards of pairs and evaluation, and the
    teacher's and critic's commits.

    Raises ModelError for a model on the hub whose commit can't be resolved.
    """
    from engine.storage.hub import pin_revision

    rl = config.rl
    rl = rl.model_copy(update={"algorithm": _pinned_teachers(rl.algorithm)})
    if rl.critic.model_path:
        started = pin_revision(rl.critic.model_path, "rl.critic.model_path")
        rl = rl.model_copy(update={"critic": rl.critic.model_copy(update={"model_path": started})})
    rl = rl.model_copy(update={"named_content": named_content(rl)})
    if rl.rollout.multi_turn.enable:
        agent = pinned_agent(rl.rollout.agent, rl.rollout.multi_turn)
        rl = rl.model_copy(update={"rollout": rl.rollout.model_copy(update={"agent": agent})})
    pairs, evaluate = pinned_ranking(config), pinned_evaluation(config)
    return config.model_copy(update={"rl": rl, "pairs": pairs, "evaluate": evaluate})


def pinned_ranking(config: PipelineConfig) -> PairsConfig:
    """What makes pairs, with the digest of its reward's modules."""
    from engine.storage.code_version import modules_digest

    pairs = config.ranking()
    code = modules_digest([*pairs.plugins, *_modules(reward_names(pairs.scorer))])
    return pairs.model_copy(update={"named_content": code})


def _pinned_teachers(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    from engine.storage.hub import pin_revision

    if algorithm.teacher:
        pinned = pin_revision(algorithm.teacher, "rl.algorithm.teacher")
        return algorithm.model_copy(update={"teacher": pinned})
    names = list(algorithm.teacher_models)  # of the teachers with a model, in their order
    teachers = tuple(
        one.model_copy(update={"model": pin_revision(one.model, f"rl.{names.pop(0)}")})
        if one.model
        else one
        for one in algorithm.distillation.teachers
    )
    several = algorithm.distillation.model_copy(update={"teachers": teachers})
    return algorithm.model_copy(update={"distillation": several})


def pinned_evaluation(config: PipelineConfig) -> EvaluateConfig:
    """How models are evaluated: the digest of the reward's modules, and of own tasks' files."""
    from engine.storage.code_version import modules_digest
    from engine.storage.hashing import tree_digest

    evaluate = config.evaluation()
    code = modules_digest([*evaluate.plugins, *_modules(reward_names(evaluate.scorer))])
    harness = evaluate.lm_eval
    if Path(harness.include_path).is_dir() and harness.include_path:
        content = tree_digest(Path(harness.include_path))
        harness = harness.model_copy(update={"named_content": content})
    pinned: dict[str, object] = {"named_content": code, "lm_eval": harness}
    if evaluate.multi_turn is not None and evaluate.multi_turn.enable:
        pinned["agent"] = pinned_agent(evaluate.environments, evaluate.multi_turn)
    return evaluate.model_copy(update=pinned)


def pinned_agent(agent: AgentConfig, multi_turn: MultiTurnConfig) -> AgentConfig:
    """What episodes are played with, with the digest of what environment, tools and parser name.

    Options count with the modules of `package.module:name` and the content of files that they name,
    `id` of the environment verifiers with its package.
    """
    from engine.agents.environments.verifiers import verifiers_module
    from engine.storage.code_version import modules_digest
    from engine.storage.hashing import hash_file

    environment = agent.environment
    named = [environment.name, multi_turn.format, *_texts(environment.options)]
    files = [hash_file(name) for name in named if _is_file(name)]
    modules = _modules(named)
    if environment.name == "verifiers":
        modules.append(verifiers_module(str(environment.options.get("id", ""))))
    found = "\0".join(filter(None, [modules_digest(modules), *files]))
    content = hashlib.sha256(found.encode()).hexdigest() if found else ""
    return agent.model_copy(update={"named_content": content})


def _texts(value: object) -> Iterator[str]:
    """All texts in an option's value."""
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


def reward_names(reward: RewardConfig) -> list[str]:
    """The names of all its functions."""
    return [spec.name for spec in reward.specs().values()]


def _modules(names: Iterable[str]) -> list[str]:
    """The modules of those names that are paths like `package.module:name`."""
    return [name.partition(":")[0] for name in names if ":" in name]


def pin_model_commit(config: C) -> C:
    """Return the settings with `model.path`, where it is a hub id, with its commit.

    Raises ModelError where neither the hub nor its local cache says which.
    """
    from engine.storage.hub import pin_revision

    model = config.model.model_copy(update={"path": pin_revision(config.model.path)})
    return config.model_copy(update={"model": model})


def named_content(rl: RLConfig) -> str:
    """Digest of plugins and modules that settings name, and of other models' folders; or empty.

    What those modules import from elsewhere is not in it.
    """
    from engine.storage.code_version import modules_digest
    from engine.storage.hashing import tree_digest

    algorithm, loss = rl.algorithm, rl.actor.policy_loss.loss_mode
    names = [algorithm.dataflow, algorithm.adv_estimator, rl.rollout.engine, loss]
    names += [algorithm.preference.loss, *reward_names(rl.reward)]
    code = modules_digest([*rl.plugins, *_modules(names)])
    paths = [*algorithm.teacher_models.values(), rl.critic.model_path]
    folders = [Path(path) for path in paths if path]
    weights = "\0".join(tree_digest(folder) for folder in folders if folder.is_dir())
    found = f"{code}\0{weights}"
    return hashlib.sha256(found.encode()).hexdigest() if code or weights else ""


def model_digest(path: str) -> str:
    """Digest of a model's folder, with that of the base of an adapter's; a pinned id as it is."""
    from engine.models.load import adapter_base_path
    from engine.storage.hashing import tree_digest
    from engine.storage.hub import pin_revision

    if not Path(path).is_dir():
        return path
    own, base = tree_digest(Path(path)), adapter_base_path(path)
    if base is None:
        return own
    under = model_digest(pin_revision(base, f"the base of model.path={path!r}"))
    return hashlib.sha256(f"{own}\0{under}".encode()).hexdigest()
