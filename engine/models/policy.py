"""Loading a policy as the configuration asks for it: plain, with new adapters, or with its own.

How a model folder is read and checked is `load.py`'s, what adapters are `lora.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.errors import ConfigError, ModelError
from engine.models.load import adapter_base_path, load_model, require_model_folder, with_model_lock
from engine.models.lora import ADAPTER, add_adapters, finalize_adapters
from engine.models.quantize import quantize_linears

if TYPE_CHECKING:
    from peft import LoraConfig

# What makes adapters more than plain LoRA, of peft's settings.
_SPECIAL = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
)


@with_model_lock
def load_policy_model(
    path: str | Path, dtype: str, lora: LoRAConfig | None = None, seed: int = 0
) -> PreTrainedModel:
    """Load a policy in evaluation mode, with adapters and a quantised base as `lora` asks.

    `lora.from_folder`: `path` is an adapter's folder; its adapters are trained further on the base
    that it names. Otherwise such a folder is merged first. Raises ConfigError and ModelError.
    """
    lora = resolve_lora(path, lora or LoRAConfig())
    model = load_model(base_path(path, lora), dtype)
    if lora.quantize:
        quantize_linears(model, lora.quantize)
    put_adapters(model, path, lora, seed)
    return model.eval()


def base_path(path: str | Path, lora: LoRAConfig) -> str | Path:
    """The model whose own weights a policy has: that of its adapters, where `path` is theirs."""
    return (adapter_base_path(path) if lora.from_folder else None) or path


def put_adapters(model: PreTrainedModel, path: str | Path, lora: LoRAConfig, seed: int) -> None:
    """Put the adapters that `lora` (of `resolve_lora`) asks for into `model`, in place."""
    if lora.from_folder:
        _restore_adapters(model, Path(path), lora)
    elif lora.rank:
        add_adapters(model, lora, seed)


def resolve_lora(path: str | Path, lora: LoRAConfig) -> LoRAConfig:
    """`lora` with the rank, alpha and target modules that its folder has, for `from_folder`.

    Without it, `lora` as it is. Raises ConfigError for a folder without adapters, with adapters
    that are not plain LoRA, or of another rank than the one asked for.
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
    return lora.model_copy(
        update={
            "rank": int(settings.r),
            "alpha": float(settings.lora_alpha),
            "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets)),
        }
    )


def _folder_settings(path: str | Path) -> LoraConfig:
    """peft's LoraConfig in an adapter's folder, checked."""
    from peft import LoraConfig, PeftConfig

    if not Path(path).is_dir() or adapter_base_path(path) is None:
        raise ConfigError(
            f"model.lora.from_folder: model.path={str(path)!r} has no adapter_config.json; give an "
            "adapter's folder, or set model.lora.rank for new adapters"
        )
    require_model_folder(path)
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
            f"{str(error).splitlines()[0]}; copy the whole folder, or mend its adapter_config.json"
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
