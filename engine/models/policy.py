"""Policies as configured: loaded whole, or without storage to be loaded shard by shard.

An `UnloadedModel` is built on the meta device, and every parameter is looked up in the folder's
safetensors, which `runtime.apply_layout.load_shards` reads. Where one can't be, the model is loaded
whole, which is logged once. Adapters, which are small, come with their values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from engine.config import LoRAConfig
from engine.errors import ConfigError, ModelError, first_line
from engine.models import loading, value_head
from engine.models.lora import ADAPTER, add_adapters, finalize_adapters
from engine.models.quantize import load_packed, quantize_linears
from engine.storage.filesystem import split_revision
from engine.storage.weight_files import WeightFiles, stack_experts

if TYPE_CHECKING:
    from peft import LoraConfig


_SPECIAL = (  # of peft's settings, what makes adapters more than plain LoRA
    *("use_dora", "modules_to_save", "lora_bias"),
    *("rank_pattern", "alpha_pattern", "target_parameters"),
)


@loading.model_lock()
def load_policy_model(
    path: str | Path, dtype: str, lora: LoRAConfig | None = None, seed: int = 0
) -> PreTrainedModel:
    """Load a policy in evaluation mode, with adapters and a quantised base as `lora` asks.

    An adapter's folder is merged first, unless `lora.from_folder` trains its adapters on. Raises
    ConfigError and ModelError.
    """
    lora = resolve_lora(path, lora or LoRAConfig())
    model = loading.load_model(base_path(path, lora), dtype)
    if lora.quantize:
        quantize_linears(model, lora.quantize)
    _put_adapters(model, path, lora, seed)
    return model.eval()


def base_path(path: str | Path, lora: LoRAConfig) -> str | Path:
    """Return the model whose weights a policy has: its adapters' base, where `path` is theirs."""
    return (loading.adapter_base_path(path) if lora.from_folder else None) or path


def _put_adapters(model: PreTrainedModel, path: str | Path, lora: LoRAConfig, seed: int) -> None:
    """Put the adapters that `lora` (of `resolve_lora`) asks for into `model`, in place."""
    if lora.from_folder:
        _restore_adapters(model, Path(path), lora)
    elif lora.rank:
        add_adapters(model, lora, seed)


def resolve_lora(path: str | Path, lora: LoRAConfig) -> LoRAConfig:
    """Return `lora` with the rank, alpha and target modules of its folder, for `from_folder`.

    Raises ConfigError for a folder without adapters, with adapters that are not plain LoRA, or of
    another rank than the one asked for.
    """
    if not lora.from_folder:
        return lora
    settings = _folder_settings(path)
    if lora.rank not in (0, settings.r):
        raise ConfigError(
            f"model.lora.rank={lora.rank}, but the adapters in {path} have rank {settings.r}; "
            "leave rank out with model.lora.from_folder, or start new ones without that"
        )
    targets = settings.target_modules or ()
    names = targets if isinstance(targets, str) else tuple(sorted(targets))
    values = {"rank": int(settings.r), "alpha": float(settings.lora_alpha)}
    return lora.model_copy(update=values | {"target_modules": names})


def _folder_settings(path: str | Path) -> LoraConfig:
    """Read and check peft's LoraConfig in an adapter's folder."""
    from peft import LoraConfig, PeftConfig

    if not Path(path).is_dir() or loading.adapter_base_path(path) is None:
        raise ConfigError(
            f"model.lora.from_folder: model.path={str(path)!r} has no adapter_config.json; give an "
            "adapter's folder, or set model.lora.rank for new adapters"
        )
    loading.require_model_folder(path)
    try:
        settings = PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}/adapter_config.json can't be read: {error}") from error
    special = [name for name in _SPECIAL if getattr(settings, name, None)]
    if getattr(settings, "target_modules", None) is None:
        special.append("no target_modules")
    if not isinstance(settings, LoraConfig) or settings.bias != "none" or special:
        raise ConfigError(
            f"the adapters in {path} are not plain LoRA ({special or settings.peft_type}); "
            "leave model.lora.from_folder out to start from them merged"
        )
    return settings


def _restore_adapters(model: PreTrainedModel, folder: Path, lora: LoRAConfig) -> None:
    """Put the adapters in `folder` into `model`, in place, and freeze all else."""
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    settings = _folder_settings(folder)
    settings.inference_mode, settings.lora_dropout = False, lora.dropout
    try:
        model.add_adapter(settings, ADAPTER)
        saved = load_peft_weights(str(folder), device="cpu")
        weights = {name.removeprefix("base_model.model."): t for name, t in saved.items()}
        report: Any = set_peft_model_state_dict(model, weights, ADAPTER)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"the adapters in {folder} don't fit their base {model.name_or_path}: "
            f"{first_line(error)}; copy the whole folder, or mend its adapter_config.json"
        ) from error
    missing = sorted(name for name in report.missing_keys if ".lora_" in name)
    strangers = sorted(report.unexpected_keys)
    if missing or strangers:
        raise ModelError(
            f"the adapters in {folder} lack {len(missing)} weights and have {len(strangers)} that "
            f"their base has no place for, first {(missing + strangers)[0]!r}; copy the whole "
            "folder"
        )
    finalize_adapters(model, settings)


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
        """Have all parameters trained, or none, as `nn.Module.requires_grad_`."""
        self.module.requires_grad_(flag)
        return self


def open_model(path: str | Path, dtype: str = "float32") -> PreTrainedModel | UnloadedModel:
    """Open a causal LM for ranks that load its shards; whole, as `load_model`, where it must be."""
    loading.check_dtype(dtype)
    loading.require_model_folder(path)
    return _open(path, dtype, AutoModelForCausalLM) or loading.load_model(path, dtype).eval()


@loading.model_lock()
def open_policy_model(
    path: str | Path, dtype: str, lora: LoRAConfig | None = None, seed: int = 0
) -> PreTrainedModel | UnloadedModel:
    """Open what `load_policy_model` loads; a quantised base is on every rank, packed as read."""
    if lora is None or not (lora.rank or lora.from_folder or lora.quantize):
        return open_model(path, dtype)
    lora = resolve_lora(path, lora)
    opened = open_model(base_path(path, lora), dtype)
    if isinstance(opened, UnloadedModel) and not lora.quantize:
        return _with_adapters(opened, lambda model: _put_adapters(model, path, lora, seed))
    if isinstance(opened, UnloadedModel):
        opened = load_packed(opened.module, opened.files, opened.names, lora.quantize)
    elif lora.quantize:
        quantize_linears(opened, lora.quantize)
    _put_adapters(opened, path, lora, seed)
    return opened.eval()


@loading.model_lock()
def open_critic_model(
    path: str | Path,
    dtype: str,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    setting: str = "critic.lora",
) -> value_head.CriticModel | UnloadedModel:
    """Open what `create_critic_model` makes of the model at `path`, as `open_model` does.

    A folder of a classifier of one label, such as a reward model, gives the head, too.
    """
    policy: PreTrainedModel | UnloadedModel
    if value_head.is_classifier(path):
        loading.require_model_folder(path, "critic.model_path")
        opened_classifier = _open(path, dtype, AutoModelForSequenceClassification)
        policy = opened_classifier or value_head.load_classifier(path, dtype).eval()
    else:
        policy = open_model(path, dtype)
    if not isinstance(policy, UnloadedModel):
        return value_head.create_critic_model(policy, lora, seed, setting).eval()
    module, backbone = policy.module, policy.module.base_model
    source = {id(t): policy.names[name] for name, t in _tensors(module).items()}
    names = {f"backbone.{name}": source[id(t)] for name, t in _tensors(backbone).items()}
    if (head := value_head.score_head(module)) is not None:
        names["head.weight"] = source[id(head)]
    width = value_head.output_size(module.config.get_text_config())
    with torch.device("meta"):
        critic = value_head.CriticModel(backbone, width)
    critic.to(next(backbone.parameters()).dtype).requires_grad_(True).eval()
    opened = UnloadedModel(critic, policy.files, names)
    if lora is None or not lora.rank:
        return opened
    return _with_adapters(opened, lambda model: add_adapters(model.backbone, lora, seed, setting))


def _with_adapters(opened: UnloadedModel, put: Callable[[Any], None]) -> UnloadedModel:
    """Put adapters into the model by `put`; the model's own weights stay in the files."""
    module = opened.module
    # peft makes adapters on the device of what they adapt: meanwhile single zeros on the CPU.
    _replace_parameters(module, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    put(module)
    values = {n: p.detach() for n, p in module.named_parameters() if ".lora_" in n}
    _replace_parameters(module, lambda p: p.to("meta"))
    plain = {name: name.replace(".base_layer.", ".") for name in _tensors(module)}
    names = {name: opened.names[old] for name, old in plain.items() if old in opened.names}
    return UnloadedModel(module.eval(), opened.files, names, values)


def _replace_parameters(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Let `make` replace each parameter of `module`; what is tied stays so."""
    made = {
        old: nn.Parameter(make(old.detach()), requires_grad=old.requires_grad)
        for old in module.parameters()
    }
    for owner in module.modules():
        for name, old in owner._parameters.items():
            owner._parameters[name] = None if old is None else made[old]


class _WholeOnly(Exception):
    """Why a model can't be loaded shard by shard."""


def _open(path: str | Path, dtype: str, kind: Any) -> UnloadedModel | None:
    """Build a model by an automatic class of transformers; None where it must be loaded whole."""
    try:
        return _build(path, loading.DTYPES[dtype], kind)
    except _WholeOnly as why:
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
            log.warning("each rank loads all of %s before it keeps its part: %s", path, why)
        return None


@loading.model_lock()
def _build(path: str | Path, dtype: torch.dtype, kind: Any) -> UnloadedModel:
    if loading.adapter_base_path(path) is not None:
        raise _WholeOnly("it is an adapter, which is merged into its base")
    name, pinned = split_revision(path)
    revision = pinned or "main"
    model = _on_meta(path, name, dtype, kind)
    files = _files(name, revision)
    if model._get_dtype_plan(dtype) or any(p.dtype != dtype for p in model.parameters()):
        raise _WholeOnly(f"some of its weights stay in another dtype than {dtype}")
    stack_experts(files, model.config.model_type, _tensors(model))
    names = _find(model, files)
    _fill_buffers(model)
    if model.can_generate():
        unset = dict.fromkeys(("cache_dir", "proxies", "token"))
        unset |= {"force_download": False, "local_files_only": False, "trust_remote_code": False}
        options = {**unset, "revision": revision, "subfolder": ""}
        model.adjust_generation_fn(None, True, False, name, **options)
    if pinned is not None:  # for adapters, which say what they belong to
        model.name_or_path = str(path)
    return UnloadedModel(model.eval(), files, names)


def _on_meta(path: str | Path, name: str, dtype: torch.dtype, kind: Any) -> Any:
    """Make the model, by one of transformers' automatic classes, without any storage."""
    try:
        config = loading.load_model_config(path)
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
    """Open the safetensors of a folder, or of a hub id, which are downloaded."""
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        single = cached_file(name, "model.safetensors", **options)
        if single is not None:
            return WeightFiles([single])
        index = cached_file(name, "model.safetensors.index.json", **options)
        if index is None:
            raise _WholeOnly("its weights are not in safetensors")
        return WeightFiles(get_checkpoint_shard_files(name, index, revision=revision)[0])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _WholeOnly(f"its files can't be opened ({error})") from error


def _find(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """Map each name of a parameter or persistent buffer to its name in the files."""
    prefix = f"{model.base_model_prefix}."
    alike: dict[int, list[str]] = {}  # names of one tensor, such as a tied head's
    tensors = _tensors(model)
    for name, tensor in tensors.items():
        alike.setdefault(id(tensor), []).append(name)
    located: dict[str, str] = {}
    for names in alike.values():
        spelled = [spelling for name in names for spelling in (name, name.removeprefix(prefix))]
        present = sorted({spelling for spelling in spelled if spelling in files.shapes})
        if len(present) != 1 or files.shapes[present[0]] != tuple(tensors[names[0]].shape):
            raise _WholeOnly(f"{names[0]!r} is not there as one tensor of its shape")
        located |= dict.fromkeys(names, present[0])
    return located


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by each of their names."""
    return model.state_dict(keep_vars=True)


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file has, such as rotary tables, as transformers does."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():  # it has no storage: values would be drawn for nothing
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()
