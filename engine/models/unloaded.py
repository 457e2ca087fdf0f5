"""Models without storage, and the files that have their values: to be loaded shard by shard.

A model is built on the meta device, as transformers itself builds it, and every parameter is looked
up in the folder's safetensors. Where one can't be, the model is loaded whole, which is said once.
Adapters, which are small, come with their values. Reading is `engine.runtime.load_shards`'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from engine.config import LoRAConfig
from engine.errors import ConfigError, ModelError
from engine.models.classifier_start import is_classifier, load_classifier, score_head
from engine.models.critic import CriticModel, create_critic_model, output_size
from engine.models.load import (
    adapter_base_path,
    load_model,
    load_model_config,
    require_model_folder,
    with_model_lock,
)
from engine.models.lora import add_adapters
from engine.models.packed_base import load_packed
from engine.models.policy import base_path, put_adapters, resolve_lora
from engine.models.precision import DTYPES
from engine.models.quantize import quantize_linears
from engine.storage.expert_weights import stack_experts
from engine.storage.hub import split_revision
from engine.storage.weight_files import WeightFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A language model or critic in evaluation mode whose weights are still in files.

    `module`'s parameters and persistent buffers are on the meta device; other buffers are there.
    """

    module: Any
    files: WeightFiles
    names: Mapping[str, str]  # of those tensors → of the files'
    values: Mapping[str, Tensor] = field(default_factory=dict)  # of adapters; all others are zeros

    def requires_grad_(self, flag: bool) -> Self:
        """As a module's."""
        self.module.requires_grad_(flag)
        return self


def open_model(path: str | Path, dtype: str = "float32") -> PreTrainedModel | UnloadedModel:
    """A causal LM of a folder or hub id, to be loaded by the ranks that keep its shards.

    Loaded whole where it can't be built so. Raises what `load_model` does.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype={dtype!r} is unknown; choose one of {sorted(DTYPES)}")
    require_model_folder(path)
    try:
        return _open(path, DTYPES[dtype])
    except _WholeOnly as why:
        _say(path, str(why))
        return load_model(path, dtype).eval()


@with_model_lock
def open_policy_model(
    path: str | Path, dtype: str, lora: LoRAConfig | None = None, seed: int = 0
) -> PreTrainedModel | UnloadedModel:
    """`load_policy_model`, as `open_model`; a quantised base is on every rank, packed as read."""
    if lora is None or not (lora.rank or lora.from_folder or lora.quantize):
        return open_model(path, dtype)
    lora = resolve_lora(path, lora)
    opened = open_model(base_path(path, lora), dtype)
    if lora.quantize and isinstance(opened, UnloadedModel):
        opened = load_packed(opened.module, opened.files, opened.names, lora.quantize)
    elif lora.quantize:
        assert not isinstance(opened, UnloadedModel)
        quantize_linears(opened, lora.quantize)
    if isinstance(opened, UnloadedModel):
        return _with_adapters(opened, lambda model: put_adapters(model, path, lora, seed))
    put_adapters(opened, path, lora, seed)
    return opened.eval()


@with_model_lock
def open_critic_model(
    path: str | Path,
    dtype: str,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    setting: str = "critic.lora",
) -> CriticModel | UnloadedModel:
    """`create_critic_model` of the model at `path`, as `open_model`.

    A folder of a classifier of one label, such as a reward model, gives the head, too.
    """
    policy = _open_classifier(path, dtype) if is_classifier(path) else open_model(path, dtype)
    if not isinstance(policy, UnloadedModel):
        return create_critic_model(policy, lora, seed, setting).eval()
    module, backbone = policy.module, policy.module.base_model
    source = {id(t): policy.names[name] for name, t in _tensors(module).items()}
    names = {f"backbone.{name}": source[id(t)] for name, t in _tensors(backbone).items()}
    if (head := score_head(module)) is not None:
        names["head.weight"] = source[id(head)]
    with torch.device("meta"):
        critic = CriticModel(backbone, output_size(module.config.get_text_config()))
    critic.to(next(backbone.parameters()).dtype).requires_grad_(True).eval()
    opened = UnloadedModel(critic, policy.files, names)
    if lora is None or not lora.rank:
        return opened
    adapt = lora
    return _with_adapters(opened, lambda model: add_adapters(model.backbone, adapt, seed, setting))


def _with_adapters(opened: UnloadedModel, put: Callable[[Any], None]) -> UnloadedModel:
    """The model with the adapters that `put` puts into it; its own weights stay in the files.

    peft makes adapters on the device of what they adapt, so that is on the CPU meanwhile: single
    zeros, of the shapes of matrices.
    """
    module = opened.module
    _replace_parameters(module, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    put(module)
    values = {n: p.detach() for n, p in module.named_parameters() if ".lora_" in n}
    _replace_parameters(module, lambda p: p.to("meta"))
    plain = {name: name.replace(".base_layer.", ".") for name in _tensors(module)}
    names = {name: opened.names[old] for name, old in plain.items() if old in opened.names}
    return UnloadedModel(module.eval(), opened.files, names, values)


def _replace_parameters(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Let `make` replace each parameter of `module`; what is tied stays so."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one, so that its id stays its
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                new = nn.Parameter(make(old.detach()), requires_grad=old.requires_grad)
                made[id(old)] = old, new
            owner._parameters[name] = made[id(old)][1]


def _open_classifier(path: str | Path, dtype: str) -> PreTrainedModel | UnloadedModel:
    """`open_model` of a classifier."""
    require_model_folder(path, "critic.model_path")
    try:
        return _open(path, DTYPES[dtype], AutoModelForSequenceClassification)
    except _WholeOnly as why:
        _say(path, str(why))
        return load_classifier(path, dtype).eval()


class _WholeOnly(Exception):
    """Why a model can't be loaded shard by shard."""


@with_model_lock
def _open(path: str | Path, dtype: torch.dtype, kind: Any = AutoModelForCausalLM) -> UnloadedModel:
    if adapter_base_path(path) is not None:
        raise _WholeOnly("it is an adapter, which is merged into its base")
    name, given = split_revision(path)
    revision = given or "main"
    model = _on_meta(path, name, dtype, kind)
    files = _files(name, revision)
    if model._get_dtype_plan(dtype) or any(p.dtype != dtype for p in model.parameters()):
        raise _WholeOnly(f"some of its weights stay in another dtype than {dtype}")
    stack_experts(files, model.config.model_type, _tensors(model))
    names = _find(model, files)
    _fill_buffers(model)
    if model.can_generate():
        model.adjust_generation_fn(
            *(None, True, False, name),
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=False,
            token=None,
            revision=revision,
            subfolder="",
            trust_remote_code=False,
        )
    if given is not None:  # for adapters, which say what they belong to
        model.name_or_path = str(path)
    return UnloadedModel(model.eval(), files, names)


def _on_meta(path: str | Path, name: str, dtype: torch.dtype, kind: Any) -> Any:
    """The model, by one of transformers' automatic classes, without any storage."""
    try:
        config = load_model_config(path)
        if getattr(config, "quantization_config", None):
            raise _WholeOnly("its weights are quantised")
        if config.get_text_config() is not config:
            raise _WholeOnly(f"it is a part of a {config.model_type} model")
        config.name_or_path = name
        with torch.device("meta"):
            return kind.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ModelError, OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise _WholeOnly(f"it can't be built without storage ({error})") from error


def _files(name: str, revision: str) -> WeightFiles:
    """The safetensors of a folder, or of a hub id, which are downloaded."""
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        found = cached_file(name, "model.safetensors", **options)
        if found is not None:
            return WeightFiles([found])
        index = cached_file(name, "model.safetensors.index.json", **options)
        if index is None:
            raise _WholeOnly("its weights are not in safetensors")
        return WeightFiles(get_checkpoint_shard_files(name, index, revision=revision)[0])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _WholeOnly(f"its files can't be opened ({error})") from error


def _find(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """Where the files have each parameter and persistent buffer, under each of its names."""
    prefix = f"{model.base_model_prefix}."
    alike: dict[int, list[str]] = {}  # names of one tensor, such as a tied head's
    tensors = _tensors(model)
    for name, tensor in tensors.items():
        alike.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    for names in alike.values():
        spelled = [spelling for name in names for spelling in (name, name.removeprefix(prefix))]
        there = sorted({spelling for spelling in spelled if spelling in files.shapes})
        if len(there) != 1 or files.shapes[there[0]] != tuple(tensors[names[0]].shape):
            raise _WholeOnly(f"{names[0]!r} is not there as one tensor of its shape")
        found |= dict.fromkeys(names, there[0])
    return found


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by each of their names."""
    found: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return found


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file has, such as rotary tables, as transformers does."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():  # it has no storage: values would be drawn for nothing
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


def _say(path: str | Path, why: str) -> None:
    """Where ranks share a model, let the first say that each loads all of it."""
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        log.warning("each rank loads all of %s before it keeps its part: %s", path, why)
