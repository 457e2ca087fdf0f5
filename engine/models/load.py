"""Getting a policy: a small Qwen2-shaped model from a configuration, or a Hugging Face model.

Checks that belong to a model alone, or to a model and its tokenizer, live here too: they run
before any compute is spent. Training and decoding don't.
"""

from __future__ import annotations

import functools
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from engine.config import ModelConfig
from engine.errors import ConfigError, ModelError
from engine.models.precision import DTYPES, resolve_dtype
from engine.storage.hub import is_hub_id, loading_error, require_model_name, split_revision

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_making = threading.RLock()

P = ParamSpec("P")
T = TypeVar("T")


def with_model_lock(make: Callable[P, T]) -> Callable[P, T]:
    """Have other threads wait while one makes a model.

    Meanwhile transformers has set the whole process's default dtype and initialisers, and seeds
    borrow its random generator.
    """

    @functools.wraps(make)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _making:
            return make(*args, **kwargs)

    return alone


@with_model_lock
def build_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Make a small Qwen2-shaped model with random weights drawn from `seed`.

    The vocabulary is the tokenizer's; input and output embeddings are tied. Weights are drawn in
    float32, whatever `config.dtype` is.
    """
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
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


@with_model_lock
def load_model(path: str | Path, dtype: str = "float32") -> PreTrainedModel:
    """Load any Hugging Face causal LM from a folder or hub id (`owner/name`, or with `@revision`).

    An adapter's folder (peft's format) gives its base with the adapter merged into it. Raises
    ModelError when the folder lacks a configuration or weights, can't be read, or has weights for
    only a part of the model; ConfigError for a `dtype` that is none of DTYPES.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype={dtype!r} is unknown; choose one of {sorted(DTYPES)}")
    require_model_folder(path)
    if (base := adapter_base_path(path)) is not None:
        return _load_merged(Path(path), load_model(base, dtype))
    name, revision = split_revision(path)
    where = f"model.path={str(path)!r}"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
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
            f"{where} can't be loaded as a causal language model: {loading_error(error)}"
        ) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would fill them with random numbers and continue
        raise ModelError(
            f"{where} lacks {len(missing)} of the model's weights, first {missing[0]!r}; give "
            "the folder of a whole causal language model"
        )
    if revision is not None:  # for adapters, which say what they belong to
        model.name_or_path = str(path)
    return model


def adapter_base_path(path: str | Path) -> str | None:
    """The model that an adapter's folder belongs to, by path or hub id (with the revision that it
    names, if any); None for other folders.

    Raises ModelError when the folder doesn't say.
    """
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
    return f"{base}@{revision}" if revision and is_hub_id(str(base)) else str(base)


def _load_merged(folder: Path, base: PreTrainedModel) -> PreTrainedModel:
    """`base` with the adapter in `folder` merged into its weights."""
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
            f"{loading_error(error)}"
        ) from error
    if missing:
        raise ModelError(
            f"the adapter in {folder} lacks {len(missing)} of its weights, first {missing[0]!r}; "
            "copy the whole folder"
        )
    merged.name_or_path = merged.config._name_or_path = str(folder)
    return merged.requires_grad_(True)


def require_model_folder(path: str | Path, setting: str = "model.path") -> None:
    """Raise ModelError unless `path` is a model folder with configuration and weights.

    Or an adapter's folder, with weights and a base that is one.
    A value that is not a local folder and looks like a hub id (`owner/name`) is let through:
    whether the hub has it is found out by loading it.
    """
    folder = Path(path)
    require_model_name(path, setting)
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
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
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
        wanted = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in wanted if not (folder / name).is_file())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(
            f"{setting}={str(folder)!r} has a {index.name} that can't be read "
            f"({type(error).__name__}: {loading_error(error)}); copy the whole folder again"
        ) from error
    if missing:
        raise ModelError(
            f"{setting}={str(folder)!r} lacks the weight files {missing}; copy them too"
        )


def check_vocabulary(vocab_size: int, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise ModelError when the tokenizer can emit ids that the embedding does not have."""
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model in {where} has an embedding "
            f"of {vocab_size}; use the tokenizer that belongs to the model, or resize the embedding"
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


def vocabulary_and_context(path: str | Path) -> tuple[int, int]:
    """Return the embedding's size and the context (tokens) of a model, without its weights.

    Raises ModelError when its configuration can't be read.
    """
    config = text_config(path)
    return int(config.vocab_size), int(getattr(config, "max_position_embeddings", 1 << 30))


def text_config(path: str | Path) -> PretrainedConfig:
    """The transformers configuration of a model's text part, or of an adapter's base.

    Raises ModelError when it can't be read.
    """
    if (base := adapter_base_path(path)) is not None:
        return text_config(base)
    return load_model_config(path).get_text_config()


def saved_dtype(path: str | Path) -> str:
    """The dtype that a model's configuration says its weights have; float32 where it says none.

    Raises ModelError as `text_config`.
    """
    name = str(text_config(path).dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def load_model_config(path: str | Path) -> PretrainedConfig:
    """The transformers configuration of a model's folder or hub id; ModelError as `text_config`."""
    require_model_name(path)
    name, revision = split_revision(path)
    try:
        return AutoConfig.from_pretrained(
            name, revision=revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path={str(path)!r} has no configuration that can be read: "
            f"{loading_error(error)}"
        ) from error


def _unsafe_pickle(where: str) -> ModelError:
    """What to say of a `.bin` file that torch refuses; its own words name the way to run it."""
    return ModelError(
        f"{where} has weights in a .bin file (a pickle) that is damaged or holds more than "
        "tensors, which could run code on this machine; give the model's .safetensors"
    )
