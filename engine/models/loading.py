"""Model folders: made from a configuration or loaded, in a configured dtype, and saved.

A start model whose `config.json` has other values (verl's `override_config`) is a folder of links
to the model's files and a `config.json` of its own, so that all who read the model (ranks, rollout
engines, the reference) read the same.
"""

import copy
import difflib
import json
import logging
import pickle
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)
from transformers.initialization import no_init_weights

from engine.config import LoRAConfig, ModelConfig
from engine.config.training import OptimConfig
from engine.errors import ConfigError, ModelError, StorageError
from engine.models.lora import has_adapters, merged_copy, save_adapter
from engine.storage import filesystem
from engine.storage.weight_files import file_tensors, write_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIZES = (  # of a model from scratch, as in transformers' configuration
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "initializer_range"),
)
MIN_HIDDEN_SIZE = 96  # the narrowest whose learning was compared, see docs/precision.md


def computes_in_bfloat16(*, gpu: bool) -> bool:
    """Decide whether this CPU, or a GPU (of another machine: yes), has bfloat16 in hardware."""
    if gpu:
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def resolve_dtype(
    dtype: str, hidden_size: int, *, gpu: bool | None = None, compute_dtype: str = ""
) -> str:
    """Return the dtype that `model.dtype` stands for; a dtype itself stays.

    `auto` is bfloat16 for a model of `MIN_HIDDEN_SIZE` or wider where `computes_in_bfloat16`,
    unless `compute_dtype` is float32; else float32. `gpu`: where the model will be; None: as this
    process. Raises ConfigError for an unknown dtype, and reduced weights with another
    compute_dtype.
    """
    if dtype == "auto":
        gpu = torch.cuda.is_available() if gpu is None else gpu
        faster = compute_dtype != "float32" and computes_in_bfloat16(gpu=gpu)
        return "bfloat16" if faster and hidden_size >= MIN_HIDDEN_SIZE else "float32"
    check_dtype(dtype, "auto or ")
    if dtype != "float32" and compute_dtype not in ("", dtype):
        raise ConfigError(
            f"actor.parallel.compute_dtype={compute_dtype} with model.dtype={dtype}: weights are "
            f"computed with as they are stored; leave compute_dtype out, or set model.dtype=float32"
        )
    return dtype


def check_dtype(dtype: str, others: str = "") -> None:
    """Raise ConfigError for a `model.dtype` that is none of DTYPES."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"model.dtype={dtype!r} is unknown; choose {others}one of {sorted(DTYPES)}"
        )


_model_lock = threading.RLock()


@contextmanager
def model_lock() -> Iterator[None]:
    """Let other threads wait while a model is made, as transformers changes global state then."""
    with _model_lock:
        yield


def new_model_config(config: ModelConfig, vocab_size: int, **tokens: int | None) -> Qwen2Config:
    """Return the configuration of a small, tied Qwen2; `tokens` are its special tokens' ids."""
    values: dict[str, Any] = {name: getattr(config, name) for name in _SIZES} | tokens
    return Qwen2Config(vocab_size=vocab_size, tie_word_embeddings=True, **values)


@model_lock()
def build_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Make a small, tied Qwen2 of the tokenizer's vocabulary, drawn in float32 from `seed`."""
    shape = new_model_config(
        config,
        len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape, dtype=torch.float32, trust_remote_code=False
        )
    dtype = DTYPES[resolve_dtype(config.dtype, config.hidden_size)]
    for parameter in model.parameters():  # buffers, such as rotary tables, stay as they are
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


@model_lock()
def load_model(path: str | Path, dtype: str = "float32") -> PreTrainedModel:
    """Load any Hugging Face causal LM from a folder or hub id (`owner/name`, or with `@revision`).

    An adapter's folder (peft's format) gives its base with the adapter merged into it. Raises
    ModelError for a folder that lacks a part or can't be read, ConfigError for a `dtype` not in
    DTYPES.
    """
    check_dtype(dtype)
    require_model_folder(path)
    if (base := adapter_base_path(path)) is not None:
        return _load_merged(Path(path), load_model(base, dtype))
    where = f"model.path={str(path)!r}"
    return load_pretrained(AutoModelForCausalLM, path, dtype, where, "causal language model")


def load_pretrained(
    kind: Any, path: str | Path, dtype: str, where: str, what: str
) -> PreTrainedModel:
    """Load a model by an automatic class of transformers; raise ModelError as `load_model` does."""
    name, revision = filesystem.split_revision(path)
    try:
        model, report = kind.from_pretrained(
            name,
            revision=revision or "main",
            dtype=DTYPES[dtype],
            output_loading_info=True,
            trust_remote_code=False,
        )
    except pickle.UnpicklingError as error:
        raise _unsafe_pickle(where) from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{where} can't be loaded as a {what}: {filesystem.loading_error(error)}"
        ) from error
    # transformers would fill them with random numbers and continue
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{where} lacks {len(missing)} of the model's weights, first {missing[0]!r}; give the "
            f"folder of a whole {what}"
        )
    if revision is not None:  # for adapters, which say what they belong to
        model.name_or_path = str(path)
    return model


def adapter_base_path(path: str | Path) -> str | None:
    """Return an adapter's base, with its revision; None for others, ModelError if it isn't said."""
    config = Path(path) / "adapter_config.json"
    if not config.is_file():
        return None
    try:
        values = json.loads(config.read_text())
        base, revision = values["base_model_name_or_path"], values.get("revision")
    except (ValueError, KeyError, TypeError, AttributeError):
        base = revision = None
    if not base or base == str(path):
        raise ModelError(
            f"{config} names no base_model_name_or_path; write there which model the adapter is for"
        )
    return f"{base}@{revision}" if revision and filesystem.is_hub_id(str(base)) else str(base)


def _load_merged(folder: Path, base: PreTrainedModel) -> PreTrainedModel:
    """Merge the adapter in `folder` into the weights of `base`."""
    from peft import PeftConfig, PeftModel

    try:
        config = PeftConfig.from_pretrained(str(folder))
        adapted = PeftModel(base, config)
        missing = adapted.load_adapter(str(folder), "default").missing_keys
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except pickle.UnpicklingError as error:
        raise _unsafe_pickle(f"the adapter in {folder}") from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"the adapter in {folder} can't be merged into {base.name_or_path}: "
            f"{filesystem.loading_error(error)}"
        ) from error
    if missing:
        raise ModelError(
            f"the adapter in {folder} lacks {len(missing)} of its weights, first {missing[0]!r}; "
            "copy the whole folder"
        )
    merged.name_or_path = merged.config._name_or_path = str(folder)
    return merged.requires_grad_(True)


def require_model_folder(path: str | Path, setting: str = "model.path") -> None:
    """Raise ModelError unless `path` is a folder of a whole model, or of an adapter for one.

    A hub id (`owner/name`) is let through: whether the hub has it is found out by loading it.
    """
    folder = Path(path)
    filesystem.require_model_name(path, setting)
    if not folder.exists():
        return
    if (base := adapter_base_path(folder)) is not None:
        if not any(folder.glob("adapter_model.*")):
            raise ModelError(
                f"{setting}={str(path)!r} has no adapter_model.safetensors; copy the whole folder"
            )
        require_model_folder(base, f"the base of {setting}={str(path)!r}")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{setting}={str(path)!r} has no config.json; give a folder written by save_pretrained"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{setting}={str(path)!r} has no weights (model.safetensors); save the model there "
            "with model.save_pretrained(folder)"
        )
    _require_whole_index(folder, setting)


def _require_whole_index(folder: Path, setting: str) -> None:
    """Raise ModelError when a sharded model's index can't be read, or names a file it lacks."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in names if not (folder / name).is_file())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(
            f"{setting}={str(folder)!r} has a {index.name} that can't be read "
            f"({type(error).__name__}: {filesystem.loading_error(error)}); copy the whole folder "
            "again"
        ) from error
    if missing:
        raise ModelError(f"{setting}={str(folder)!r} lacks the weight files {missing}; copy them")


def check_vocabulary(vocab_size: int, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise ModelError when the tokenizer can emit ids that the embedding does not have.

    A special token beyond it counts where the chat template or an attribute such as `eos_token` has
    it: Gemma 3's tokenizer has one for images that its text models lack.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    template = str(tokenizer.chat_template or "")
    for text, i in tokenizer.get_vocab().items():
        if i >= vocab_size and (i not in special or i in named or text in template):
            raise ModelError(
                f"the tokenizer has the token {text!r} with id {i}, but the model in {where} has "
                f"an embedding of {vocab_size}; use the tokenizer that belongs to the model, or "
                "resize the embedding"
            )


def check_context(prompt_tokens: int, response_tokens: int, context: int) -> None:
    """Raise ModelError when the longest prompt and completion don't fit the model's context."""
    if prompt_tokens + response_tokens > context:
        raise ModelError(
            f"the longest prompt has {prompt_tokens} tokens and data.max_response_length="
            f"{response_tokens}, together more than the model's context of {context}; lower "
            "data.max_response_length, set data.max_prompt_length to drop long prompts, or raise "
            "model.max_position_embeddings of a model from scratch"
        )


@model_lock()
def parameter_count(config: PretrainedConfig) -> int:
    """Return a model's number of parameters; 0 for one that transformers can't build."""
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError:
        return 0
    return sum(weight.numel() for weight in model.parameters())


def high_learning_rate(path: str | Path, optim: OptimConfig, lora: LoRAConfig) -> str:
    """Return a warning if `optim.lr` suits a small new model, and `path` is a large one; else "".

    The defaults are for models from scratch. A model of 50M parameters and more is pretrained.
    """
    adapters = lora.rank > 0 or lora.from_folder
    if optim.optimizer == "SGD" or optim.lr <= (1e-3 if adapters else 1e-4):
        return ""
    count = parameter_count(text_config(path))
    if count < 50e6:
        return ""
    usual = "1e-5 to 2e-4 for adapters" if adapters else "1e-6 to 1e-5"
    return (
        f"optim.lr={optim.lr:g} suits small models from scratch, and may ruin the "
        f"{count / 1e6:,.0f}M pretrained parameters of {path}; set it to {usual}"
    )


def vocabulary_and_context(path: str | Path) -> tuple[int, int]:
    """Return a model's embedding size and context (tokens); ModelError for a bad configuration."""
    config = text_config(path)
    return int(config.vocab_size), int(getattr(config, "max_position_embeddings", 1 << 30))


def text_config(path: str | Path) -> PretrainedConfig:
    """Return the configuration of a model's text part, or of an adapter's base; or ModelError."""
    if (base := adapter_base_path(path)) is not None:
        return text_config(base)
    return load_model_config(path).get_text_config()


def saved_dtype(path: str | Path) -> str:
    """Return the dtype of a model's weights, by default float32; ModelError as `text_config`."""
    name = str(text_config(path).dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def load_model_config(path: str | Path) -> PretrainedConfig:
    """Load the configuration of a model's folder or hub id; raise ModelError as `text_config`."""
    filesystem.require_model_name(path)
    name, revision = filesystem.split_revision(path)
    try:
        return AutoConfig.from_pretrained(
            name, revision=revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path={str(path)!r} has no configuration that can be read: "
            f"{filesystem.loading_error(error)}"
        ) from error


def _unsafe_pickle(where: str) -> ModelError:
    """Make the error for a `.bin` file that torch refuses; torch's own says how to run it."""
    return ModelError(
        f"{where} has weights in a .bin file (a pickle) that is damaged or holds more than "
        "tensors, which could run code on this machine; give the model's .safetensors"
    )


log = logging.getLogger(__name__)

_ROPE = ("rope_scaling", "rope_theta", "rope_parameters")  # transformers reads each of them
_NUMBER = re.compile(r"-?\d+(\.\d*)?[eE][-+]?\d+")


def check_overrides(path: str, changes: Mapping[str, Any]) -> dict[str, object]:
    """Check the changes; return them as keys of the configuration of `path`.

    Raises ConfigError for a key that it has not, or a value that gives weights other names or
    shapes; ModelError where the configuration can't be read.
    """
    inner = changes.get("model_config") or {}  # where verl's Megatron settings have them
    changes = {k: v for k, v in changes.items() if k != "model_config"} | dict(inner)
    for key, value in changes.items():
        if isinstance(value, str) and _NUMBER.fullmatch(value):  # YAML reads 1e6 as a text
            changes[key] = float(value)
    for key in {"attn_implementation", "_attn_implementation"} & changes.keys():
        log.warning("model.override_config.%s has no effect here: the model's own kernels run", key)
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
    before, after = _shapes(config, {}), _shapes(config, changes)
    if before != after:
        name = min(name for name, _ in before.items() ^ after.items())
        raise ConfigError(
            f"model.override_config={dict(changes)} changes the layout of the weights, first "
            f"{name}, which are those in {path}; leave out what sizes the model"
        )
    return changes


def link_model(path: str, changes: Mapping[str, object], folder: Path) -> None:
    """Fill `folder` with links to the files of the model in `path`, and the changed config.json."""
    source = filesystem.hub_folder(path) if filesystem.is_hub_id(path) else Path(path)
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.name != "config.json" and file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    written = json.loads((source / "config.json").read_text()) | dict(changes)
    (folder / "config.json").write_text(json.dumps(written, indent=2))


def _rope_of_this_version(config: PretrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Move `rope_theta` and `rope_scaling` to where transformers 5 reads them."""
    rope = {key: changes.pop(key) for key in _ROPE if key in changes}
    if not rope:
        return changes
    scaling = {**(rope.get("rope_scaling") or {}), **(rope.get("rope_parameters") or {})}
    if "rope_theta" in rope:
        scaling["rope_theta"] = rope["rope_theta"]
    return changes | {"rope_parameters": dict(config.rope_parameters or {}) | scaling}


@model_lock()
def _shapes(config: PretrainedConfig, changes: Mapping[str, object]) -> dict[str, torch.Size]:
    """Return the shape of each parameter of a model with other values by name, without storage."""
    values = config.to_dict() | dict(changes)
    try:
        changed = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(changed, trust_remote_code=False)
    except Exception as error:  # of the model's own code, with values that don't fit each other
        raise ConfigError(
            f"model.override_config={dict(changes)} gives no model: "
            f"{filesystem.loading_error(error)}; correct its values"
        ) from error
    return {name: parameter.shape for name, parameter in model.named_parameters()}


ADAPTER_FOLDER = "adapter"  # below a model that was trained with adapters


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write safetensors, configuration and tokenizer of a transformers model to `folder`.

    A model with adapters is written as the plain model that they make of it, and they alone, in
    peft's format, to `folder/adapter`. Raises StorageError. The caller publishes the folder by
    renaming it.
    """
    folder = Path(folder)
    policy: Any = model
    with _writing(folder):
        if has_adapters(policy):
            merged_copy(policy).save_pretrained(folder)
            save_adapter(policy, folder / ADAPTER_FOLDER)
            tokenizer.save_pretrained(folder / ADAPTER_FOLDER)
        else:
            policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def save_tensors(
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    adapters: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save as `save_model` a model whose tensors come one by one: few are in memory at a time.

    `adapters`, by parameter name, were merged into them; `model` gives class and configuration.
    """
    folder = Path(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(file_tensors(model.config.model_type, tensors), folder)
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if adapters:
            save_adapter(model, folder / ADAPTER_FOLDER, adapters)
            tokenizer.save_pretrained(folder / ADAPTER_FOLDER)
        tokenizer.save_pretrained(folder)
    return folder


def save_policy(model: nn.Module, folder: str | Path, options: dict[str, object]) -> None:
    """Write what `model.save_pretrained(folder, **options)` does; StorageError if that fails."""
    policy: Any = model
    try:
        with _writing(Path(folder)):
            policy.save_pretrained(folder, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StorageError(f"the model could not be written to {folder}: {error}") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with `folder` into a StorageError."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"the model can't be written to {folder}: it is a file; name a folder")
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the model could not be written to {folder}: {error}; free space or choose another "
            "place with HYBRIDFLYTE_HOME"
        ) from error
