"""Training and loading tokenizers; putting messages into tokens is in `templates`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.errors import ConfigError, ModelError
from engine.storage.filesystem import loading_error, require_model_name, split_revision

if TYPE_CHECKING:
    from transformers import AutoTokenizer

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT)

# A word with the space before it, one digit, a calculator mark, the answer's mark with its space,
# one operator. Digits alone are what lets a small model line up columns.
_PIECES = Regex(r"#### ?|<<|>>| ?\p{L}+|\p{N}|[-+*/=]| ?[^\s\p{L}\p{N}]|\s")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- else -%}{{- '<|user|>' -}}{%- endif -%}"
    "{{- message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`, with at most `vocab_size` tokens and single digits.

    The same texts give the same files. A system message is rendered as a user turn. Raises
    ConfigError where `vocab_size` is too small for the 256 bytes and the special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            f"data.vocab_size={vocab_size} is too small: the bytes and special tokens alone take "
            f"{smallest}; raise it"
        )
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(_PIECES, behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id; raise ModelError where there is none."""
    if not may_have_tokenizer(path):
        raise ModelError(
            f"folder {path} has no tokenizer (no tokenizer.json or tokenizer.model); save one "
            "there with tokenizer.save_pretrained, or give another folder"
        )
    require_model_name(path, "the tokenizer's folder")
    try:
        name, revision = split_revision(path)
        tokenizer = _loader(Path(path)).from_pretrained(
            name, revision=revision or "main", trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds for unreadable files
        raise ModelError(
            f"the tokenizer of {path} can't be loaded: {loading_error(error)}; give a folder saved "
            "by save_pretrained, or a hub id that is reachable"
        ) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def may_have_tokenizer(path: str | Path) -> bool:
    """Return whether a folder has files of a tokenizer; True for a hub id."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in names)


def tokenizer_alone(folder: str | Path, target: Path) -> Path | None:
    """Copy a model's tokenizer to `target` where AutoTokenizer needs that to read it; else None.

    For programs that load tokenizers themselves, such as vLLM: without the model's config.json
    beside it, a tokenizer.json alone is taken as it is.
    """
    folder = Path(folder)
    if not _is_generic(folder):
        return None
    target.mkdir(parents=True)
    for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*"):
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
    return target


def _loader(folder: Path) -> type[AutoTokenizer | PreTrainedTokenizerFast]:
    # Beside a Qwen2 config.json, AutoTokenizer would take Qwen2's own splitting of words instead.
    # It also loads what models are made of, 3 CPU seconds and 230 MB in a process that has none.
    if _is_generic(folder):
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_generic(folder: Path) -> bool:
    try:
        saved = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except FileNotFoundError:
        return False
    generic = saved in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return generic and (folder / "tokenizer.json").is_file()
