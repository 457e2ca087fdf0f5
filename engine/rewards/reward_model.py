"""A reward model: any sequence-classification folder of Hugging Face, scoring whole conversations.

It is loaded once a process and stays there. It runs on the GPU that the reward role has
(`trainer.pools`), without one on the CPU.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.errors import RewardError
from engine.rewards.registry import register_reward

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

_lock = threading.Lock()  # one batch at a time: single rows come from several threads


def passing(pass_from: float = 0.0) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("reward_model", right_from=passing)
def reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    batch_size: int = 8,
    max_length: int = 0,
    dtype: Literal["", "float32", "bfloat16"] = "",
    device: str = "",
    label: int = -1,
    pass_from: float = 0.0,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions: the model's one logit, or the probability of `label` of several.

    It reads the row's messages and the completion by its own chat template (without one, prompt and
    completion on lines of their own), the last `max_length` tokens (0: what the model takes).
    `dtype` and `device` are as the machine has them where they are empty. Raises RewardError
    for a folder that is no such model.
    """
    if not model or batch_size < 1:
        raise RewardError(
            "reward 'reward_model' needs reward.options.model, a folder or hub id, and a "
            "batch_size of at least 1"
        )
    loaded = _load(model, dtype, device)
    messages = columns.get("messages") or [[{"role": "user", "content": one}] for one in prompts]
    texts = [loaded.text(m, c) for m, c in zip(messages, completions, strict=True)]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # batches of like lengths
    scores = [0.0] * len(texts)
    with _lock:
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            for i, score in zip(
                some, loaded.score([texts[i] for i in some], max_length, label), strict=True
            ):
                scores[i] = score
    return scores


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A model on its device, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def text(self, messages: Sequence[Mapping[str, object]], completion: str) -> str:
        """The conversation that ends in the completion; control tokens in it are broken up."""
        turns = self._plain([*messages, {"role": "assistant", "content": completion}])
        if not self.tokenizer.chat_template:
            return "\n".join(turn["content"] for turn in turns[-2:])
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False))

    def opening(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The conversation to which a completion is to come, by the model's chat template."""
        return str(
            self.tokenizer.apply_chat_template(
                self._plain(messages), tokenize=False, add_generation_prompt=True
            )
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of a part of a conversation that the template has written."""
        return [int(one) for one in self.tokenizer.encode(text, add_special_tokens=False)]

    def tokens(self, messages: Sequence[Mapping[str, object]], completion: str) -> list[int]:
        """The conversation's tokens; padding ones at its end are left out."""
        special = not self.tokenizer.chat_template  # which has them already
        ids = self.tokenizer.encode(self.text(messages, completion), add_special_tokens=special)
        while ids and ids[-1] == self.tokenizer.pad_token_id:
            ids.pop()
        return [int(one) for one in ids]

    def _plain(self, turns: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
        return [{**turn, "content": self._harmless(str(turn["content"]))} for turn in turns]

    def _harmless(self, text: str) -> str:
        """The text with a blank in each control token that it spells, which makes it plain text."""
        for token in {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}:
            if len(token) > 1:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def score(self, texts: list[str], max_length: int, label: int) -> list[float]:
        import torch

        limit = max_length or getattr(self.model.config, "max_position_embeddings", 0) or 1 << 20
        templated = bool(self.tokenizer.chat_template)  # which has the special tokens already
        batch = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=limit,
            add_special_tokens=not templated,
            return_tensors="pt",
        ).to(self.model.device)
        with torch.inference_mode():
            logits = self.model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits.float()
        one = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, label]
        return [float(value) for value in one.cpu()]


@functools.cache
def _load(folder: str, dtype: str, device: str) -> ScoringModel:
    from transformers import AutoModelForSequenceClassification

    return load_scoring_model(
        AutoModelForSequenceClassification, "sequence classification", folder, dtype, device
    )


def load_scoring_model(
    kind: type[_BaseAutoModelClass], what: str, folder: str, dtype: str, device: str
) -> ScoringModel:
    """A model of transformers' class `kind`; RewardError for a folder that is none."""
    import torch

    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = getattr(torch, dtype or ("bfloat16" if on.type == "cuda" else "float32"))
    try:
        model = kind.from_pretrained(folder, dtype=precision, trust_remote_code=False)
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward.options.model={folder!r} can't be loaded for {what} "
            f"({' '.join(str(error).split())[:300]})"
        ) from None
    tokenizer.truncation_side = "left"  # the completion, at the end, must be seen
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return ScoringModel(model.to(on).eval(), tokenizer)


def _tokenizer_class(folder: str) -> type[AutoTokenizer | PreTrainedTokenizerBase]:
    """What reads the folder's tokenizer as it was in training: a tokenizer.json of no model's own
    class as it is. Beside Qwen2's config.json AutoTokenizer would split words as Qwen2 does."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    files = Path(folder)
    try:
        saved = json.loads((files / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except OSError:  # a hub id, or a folder without
        return AutoTokenizer
    generic = saved in ("TokenizersBackend", "PreTrainedTokenizerFast")
    alone = generic and (files / "tokenizer.json").is_file()
    return PreTrainedTokenizerFast if alone else AutoTokenizer
