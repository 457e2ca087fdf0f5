"""Pins what settings refer to by name, so that it is part of cache keys and manifests.

A hub model gets the commit that it is loaded at; code, files and folders get a digest. What modules
import from elsewhere is not in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from engine.config import (
    AgentConfig,
    EvaluateConfig,
    MultiTurnConfig,
    PipelineConfig,
    RewardConfig,
    RLConfig,
)
from engine.config.pipeline import ScoredRolloutConfig
from engine.storage.digests import hash_file, modules_digest, tree_digest
from engine.storage.filesystem import pin_revision

S = TypeVar("S", bound=BaseModel)
C = TypeVar("C", bound=PipelineConfig)


def changed(section: S, path: str, value: object) -> S:
    """Return a copy of settings with this value at a dotted path; it is not validated."""
    name, _, rest = path.partition(".")
    inner = changed(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def pin_named_content(config: C) -> C:
    """Return the settings with what they name pinned, in `rl`, `pairs` and `evaluate`.

    Raises ModelError for a model on the hub whose commit can't be resolved.
    """
    rl = config.rl
    for setting in ("algorithm.teacher", "critic.model_path"):
        rl = changed(rl, setting, pin_revision(attrgetter(setting)(rl), f"rl.{setting}"))
    several = "algorithm.distillation.teachers"
    teachers = tuple(
        changed(teacher, "model", pin_revision(teacher.model, f"rl.{several}[{i}].model"))
        for i, teacher in enumerate(rl.algorithm.distillation.teachers)
    )
    rl = changed(rl, several, teachers)
    rl = changed(rl, "named_content", named_content(rl))
    if rl.rollout.multi_turn.enable:
        agent = pinned_agent(rl.rollout.agent, rl.rollout.multi_turn)
        rl = changed(rl, "rollout.agent", agent)
    pairs = config.ranking()
    pairs = changed(pairs, "named_content", _scoring_digest(pairs))
    evaluate = pinned_evaluation(config)
    return config.model_copy(update={"rl": rl, "pairs": pairs, "evaluate": evaluate})


def pin_model_commit(config: C) -> C:
    """Return the settings with `model.path`, where it is a hub id, with its commit.

    Raises ModelError where neither the hub nor its local cache says which.
    """
    return changed(config, "model.path", pin_revision(config.model.path))


def pinned_evaluation(config: PipelineConfig) -> EvaluateConfig:
    """Return how models are evaluated, with digests of the reward's modules and of own tasks."""
    evaluate = config.evaluation()
    evaluate = changed(evaluate, "named_content", _scoring_digest(evaluate))
    folder = evaluate.lm_eval.include_path
    if folder and Path(folder).is_dir():
        content = tree_digest(Path(folder))
        evaluate = changed(evaluate, "lm_eval.named_content", content)
    if evaluate.multi_turn is not None and evaluate.multi_turn.enable:
        agent = pinned_agent(evaluate.environments, evaluate.multi_turn)
        evaluate = changed(evaluate, "agent", agent)
    return evaluate


def _scoring_digest(config: ScoredRolloutConfig) -> str:
    """Return the digest of the modules that the reward names."""
    return modules_digest([*config.plugins, *_reward_modules(config.scorer)])


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
    return changed(agent, "named_content", content)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in an option's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # no name of a file: too long, or with a null character
        return False


def _modules(names: Iterable[str]) -> list[str]:
    """Return the modules of those names that are paths like `package.module:name`."""
    return [name.partition(":")[0] for name in names if ":" in name]


def _reward_modules(reward: RewardConfig) -> list[str]:
    return _modules(spec.name for spec in reward.specs().values())


def named_content(rl: RLConfig) -> str:
    """Return the digest of plugins and modules that settings name, and of models' folders."""
    algorithm, loss = rl.algorithm, rl.actor.policy_loss.loss_mode
    names = [algorithm.dataflow, algorithm.adv_estimator, rl.rollout.engine, loss]
    names.append(algorithm.preference.loss)
    code = modules_digest([*rl.plugins, *_modules(names), *_reward_modules(rl.reward)])
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
