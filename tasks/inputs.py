"""The pipeline's input as Flyte sees it, and the content that its names are pinned to."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import rich_click as click
import yaml
from flytekit.interaction.click_types import JsonParamType
from pydantic import ValidationError

from engine.config import (
    AgentConfig,
    AlgorithmConfig,
    EvaluateConfig,
    MultiTurnConfig,
    PairsConfig,
    PipelineConfig,
    RewardConfig,
    RLConfig,
    config_path,
    explain,
)
from engine.errors import ConfigError

# The pipeline's input as Flyte and its command line see it.
#
# `--config` is JSON text, the path of a YAML or JSON file, or `preset:NAME`. Whatever is wrong
# with
# it reaches the terminal as one sentence.

HINT = "give the path of a YAML or JSON file, preset:NAME, or JSON text"


class RLHFConfig(PipelineConfig):
    """`PipelineConfig` whose faults reach the terminal as one sentence."""

    @classmethod
    def model_validate_json(cls, *arguments: Any, **options: Any) -> Self:
        """Parse JSON; a wrong setting is a usage error that names it."""
        try:
            return super().model_validate_json(*arguments, **options)
        except ValidationError as error:
            raise click.UsageError(f"config: {explain(error)}") from None


def read_settings(text: str) -> Any:
    """Return what `--config` holds, as JSON values; UsageError says what can't be read in it."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise click.UsageError(f"config is not valid JSON ({error}); {HINT}") from None
    try:
        values = yaml.safe_load(config_path(text).read_text())
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except FileNotFoundError:
        raise click.UsageError(f"config file {text} does not exist; {HINT}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise click.UsageError(f"config file {text} can't be read ({reason}); {HINT}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise click.UsageError(
            f"config file {text}{where}: not valid YAML ({problem}); correct it"
        ) from None
    # Flyte hands it on as JSON, which has no dates; as text they fail with their field's name.
    return json.loads(json.dumps({} if values is None else values, default=str))


class ConfigParam(JsonParamType):
    """flytekit's reader of JSON inputs, which for a configuration says what is wrong with it."""

    @property
    def is_config(self) -> bool:
        """Whether the input is a configuration, and no other JSON object."""
        return isinstance(self._python_type, type) and issubclass(self._python_type, PipelineConfig)

    def _parse(self, value: Any, param: click.Parameter | None) -> Any:
        if isinstance(value, str) and self.is_config:
            return read_settings(value)
        return super()._parse(value, param)


def use_config_param() -> None:
    """Let `pyflyte run` read configurations by `ConfigParam`, and help say what one is.

    Of a malformed YAML file flytekit prints a traceback, and a missing file is "no valid JSON" to
    it; its help shows a configuration's whole JSON schema and all defaults. It has no setting for
    either. Where its command line isn't loaded, as in a pod, there is nothing to patch.
    """
    from flytekit.interaction import click_types

    click_types.JsonParamType = ConfigParam
    run: Any = sys.modules.get("flytekit.clis.sdk_in_container.run")
    if run is None or hasattr(run.to_click_option, "without_schema"):
        return
    make = run.to_click_option

    def to_click_option(*arguments: Any, **named: Any) -> click.Option:
        option: click.Option = make(*arguments, **named)
        if isinstance(option.type, ConfigParam) and option.type.is_config:
            option.help = (option.help or "").partition(": {")[0]
            option.show_default = "those of `python -m engine.config`"
        return option

    to_click_option.without_schema = True  # type: ignore[attr-defined]
    run.to_click_option = to_click_option


use_config_param()


# Pins what settings refer to by name, so that it is part of cache keys and manifests.
#
# A hub model gets the commit that it is loaded at; code, files and folders get a digest.

C = TypeVar("C", bound=PipelineConfig)


def pin_named_content(config: C) -> C:
    """Return the settings with `named_content`, the rewards of pairs and evaluation, and the
    teacher's and critic's commits.

    Raises ModelError for a model on the hub whose commit can't be resolved.
    """
    from engine.storage.filesystem import pin_revision

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
    from engine.storage.digests import modules_digest

    pairs = config.ranking()
    code = modules_digest([*pairs.plugins, *_modules(reward_names(pairs.scorer))])
    return pairs.model_copy(update={"named_content": code})


def _pinned_teachers(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    from engine.storage.filesystem import pin_revision

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
    from engine.storage.digests import modules_digest, tree_digest

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
    from engine.agents.environments import verifiers_module
    from engine.storage.digests import hash_file, modules_digest

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
    from engine.storage.filesystem import pin_revision

    model = config.model.model_copy(update={"path": pin_revision(config.model.path)})
    return config.model_copy(update={"model": model})


def named_content(rl: RLConfig) -> str:
    """Digest of plugins and modules that settings name, and of other models' folders; or empty.

    What those modules import from elsewhere is not in it.
    """
    from engine.storage.digests import modules_digest, tree_digest

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
    from engine.models.loading import adapter_base_path
    from engine.storage.digests import tree_digest
    from engine.storage.filesystem import pin_revision

    if not Path(path).is_dir():
        return path
    own, base = tree_digest(Path(path)), adapter_base_path(path)
    if base is None:
        return own
    under = model_digest(pin_revision(base, f"the base of model.path={path!r}"))
    return hashlib.sha256(f"{own}\0{under}".encode()).hexdigest()
