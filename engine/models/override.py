"""A start model whose `config.json` has other values, as verl's `override_config` asks for.

It is a folder of links to the model's files and a `config.json` of its own, so that all who read
the model (ranks, rollout engines, the reference) read the same.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from engine.errors import ConfigError, ModelError
from engine.models.load import adapter_base_path, load_model_config, with_model_lock
from engine.storage.hub import is_hub_id, loading_error, split_revision

log = logging.getLogger(__name__)

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_ROPE = ("rope_scaling", "rope_theta", "rope_parameters")  # transformers reads each of them
_NUMBER = re.compile(r"-?\d+(\.\d*)?[eE][-+]?\d+")
_KERNELS = {"attn_implementation", "_attn_implementation"}
_OWN_KERNELS = "the model's own kernels are used"


def check_overrides(path: str, changes: Mapping[str, object]) -> dict[str, object]:
    """The changes as keys of the configuration of `path`.

    Raises ConfigError for a key that it has not, and for a value with which the weights would have
    other names or shapes; ModelError where the configuration can't be read.
    """
    changes = _flat(changes)
    for key in _KERNELS & changes.keys():
        log.warning("model.override_config.%s has no effect here: %s", key, _OWN_KERNELS)
        del changes[key]
    if adapter_base_path(path) is not None:
        raise ConfigError(
            "model.override_config changes the config.json of a whole model, and model.path is an "
            "adapter's folder; change that of its base"
        )
    config = load_model_config(path)
    for key, value in changes.items():
        if "dropout" in key and value:
            raise ConfigError(
                f"model.override_config.{key}={value} is not available here: updates compute "
                "what rollout sampled from, without dropout; leave it out or set 0.0"
            )
        if key not in config.to_dict() and key not in _ROPE:
            near = difflib.get_close_matches(key, config.to_dict(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; see its config.json"
            raise ConfigError(
                f"model.override_config.{key} is no key of a {config.model_type} model's "
                f"configuration{hint}"
            )
    changes = _rope_of_this_version(config, changes)
    before, after = _shapes(config), _shapes(_changed(config, changes))
    if before != after:
        name = min(name for name, _ in before.items() ^ after.items())
        raise ConfigError(
            f"model.override_config={dict(changes)} changes the layout of the weights, first "
            f"{name}, which are those in {path}; leave out what sizes the model"
        )
    return changes


def link_model(path: str, changes: Mapping[str, object], folder: Path) -> None:
    """Fill `folder` with links to the files of the model in `path`, and the changed config.json."""
    source = _local(path)
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.name != "config.json" and file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    written = json.loads((source / "config.json").read_text()) | dict(changes)
    (folder / "config.json").write_text(json.dumps(written, indent=2))


def _flat(changes: Mapping[str, Any]) -> dict[str, object]:
    """The keys, and those below `model_config`, where verl's Megatron configuration has them."""
    inner = changes.get("model_config") or {}
    every = {k: v for k, v in changes.items() if k != "model_config"} | dict(inner)
    return {key: _number(value) for key, value in every.items()}


def _rope_of_this_version(config: PretrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes with `rope_theta` and `rope_scaling` where transformers 5 reads them."""
    given = {key: changes.pop(key) for key in _ROPE if key in changes}
    if not given:
        return changes
    scaling = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    if "rope_theta" in given:
        scaling["rope_theta"] = given["rope_theta"]
    return changes | {"rope_parameters": dict(config.rope_parameters or {}) | scaling}


def _number(value: object) -> object:
    """YAML reads 1e6 as a text."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _changed(config: PretrainedConfig, changes: Mapping[str, object]) -> PretrainedConfig:
    try:
        values = config.to_dict() | dict(changes)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:  # of the configuration's own checks
        raise ConfigError(
            f"model.override_config={dict(changes)} can't be: {loading_error(error)}"
        ) from error


@with_model_lock
def _shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """The shape of each parameter, by name; nothing is stored."""
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of the model's own code, with values that don't fit each other
        raise ConfigError(
            f"model.override_config gives no model: {loading_error(error)}; correct its values"
        ) from error
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _local(path: str) -> Path:
    """The model's folder; that of the hub's cache, which is filled."""
    if not is_hub_id(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    name, revision = split_revision(path)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except Exception as error:  # network, permission, unknown id
        raise ModelError(
            f"model.path={path!r} can't be fetched from the hub: {loading_error(error)}"
        ) from error
