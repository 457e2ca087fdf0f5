"""Rewards from models in this process.

A reward model with a scoring head, a language model by its likelihood of a completion, and a
process reward model that scores steps.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.errors import RewardError
from engine.rewards.reward_function import register_reward

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


# A reward model: any sequence-classification folder of Hugging Face, scoring whole conversations.
#
# It is loaded once a process and stays there. It runs on the GPU that the reward role has
# (`trainer.pools`), without one on the CPU.

_lock = threading.Lock()  # one batch at a time: single rows come from several threads


def _reward_model_threshold(pass_from: float = 0.0) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("reward_model", right_from=_reward_model_threshold)
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
    loaded = _load_classifier(model, dtype, device)
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
def _load_classifier(folder: str, dtype: str, device: str) -> ScoringModel:
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


# A language model as a reward model: how likely it finds a completion.
#
# A policy that was trained on preferences ranks completions by its log-probs: without a reference
# as
# `preference.loss=likelihood` and `simpo` train it, over a reference's as DPO does (its implicit
# reward, arXiv 2305.18290, eq. 5).


def _likelihood_threshold(pass_from: float = 0.0) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("likelihood", right_from=_likelihood_threshold)
def likelihood(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    reference: str = "",
    beta: float = 1.0,
    per_token: bool = False,
    batch_size: int = 8,
    dtype: Literal["", "float32", "bfloat16"] = "",
    device: str = "",
    pass_from: float = 0.0,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions: β · log π(completion | messages), less `reference`'s where one is given.

    The log-prob is the sum over the completion's tokens and its end token, or with `per_token`
    their mean. Raises RewardError for a folder that is no causal language model, or has no chat
    template, and for a conversation that is longer than it reads.
    """
    if not model or batch_size < 1:
        raise RewardError(
            "reward 'likelihood' needs reward.options.model, a folder or hub id, and a batch_size "
            "of at least 1"
        )
    messages = columns.get("messages") or [[{"role": "user", "content": one}] for one in prompts]
    scores = [0.0] * len(completions)
    for folder, sign in ((model, 1.0), (reference, -1.0)):
        if not folder:
            continue
        loaded = _load_language_model(folder, dtype, device)
        rows = [_tokens(loaded, m, c) for m, c in zip(messages, completions, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: sum(map(len, rows[i])))  # of like lengths
        with _lock:
            for start in range(0, len(order), batch_size):
                some = order[start : start + batch_size]
                found = _log_probs(loaded, [rows[i] for i in some], per_token)
                for i, value in zip(some, found, strict=True):
                    scores[i] += sign * beta * value
    return scores


def _tokens(
    loaded: ScoringModel, messages: Sequence[Mapping[str, object]], completion: str
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and of the completion to its end token, apart as in training."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        raise RewardError("reward 'likelihood' needs a model with a chat template; give it one")
    whole, opened = loaded.text(messages, completion), loaded.opening(messages)
    if not whole.startswith(opened):
        raise RewardError(
            "reward 'likelihood': the model's chat template doesn't write an answer after what it "
            "writes for one to come, so no completion has a log-prob; give it another template"
        )
    prompt, answer = loaded.encode(opened), loaded.encode(whole.removeprefix(opened))
    if tokenizer.eos_token_id in answer:  # a line break may follow it
        answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
    count = len(prompt) + len(answer)
    longest = getattr(loaded.model.config, "max_position_embeddings", 0) or count
    if count > longest or not prompt or not answer:
        raise RewardError(
            f"a conversation of {len(prompt)} and {len(answer)} tokens has no log-prob: the model "
            f"reads {longest}; lower data.max_response_length"
        )
    return prompt, answer


def _log_probs(
    loaded: ScoringModel, rows: Sequence[tuple[list[int], list[int]]], per_token: bool
) -> list[float]:
    """Of each row the completion's log-prob, or its mean over tokens."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), int(loaded.tokenizer.pad_token_id))
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
    ids = ids.to(loaded.model.device)
    found = []
    with torch.inference_mode():  # padding is on the right, where no token before it looks
        logits = loaded.model(input_ids=ids).logits
        for row, (prompt, answer) in enumerate(rows):
            asked = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            targets = ids[row, len(prompt) : len(prompt) + len(answer)]
            reduction = "mean" if per_token else "sum"
            found.append(
                -torch.nn.functional.cross_entropy(
                    logits[row, asked].float(), targets, reduction=reduction
                )
            )
        return [float(value) for value in torch.stack(found).cpu()]


@functools.cache
def _load_language_model(folder: str, dtype: str, device: str) -> ScoringModel:
    from transformers import AutoModelForCausalLM

    return load_scoring_model(
        AutoModelForCausalLM, "causal language modelling", folder, dtype, device
    )


# A process reward model: it says of each step of a completion whether it is right. Any
# token-classification folder of Hugging Face with one label.
#
# A reward is one number a completion: the probabilities of its steps become one. `engine.trainers`
# makes such folders (`reward_model.head=token`).

_REDUCED: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "mean": lambda steps: sum(steps) / len(steps),
    "last": lambda steps: steps[-1],
}


def _process_reward_threshold(pass_from: float = 0.5) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("process_reward_model", right_from=_process_reward_threshold)
def process_reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    reduce: Literal["min", "product", "mean", "last"] = "min",
    separator: str = "",
    batch_size: int = 8,
    dtype: Literal["", "float32", "bfloat16"] = "",
    device: str = "",
    pass_from: float = 0.5,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions from 0 to 1: `reduce` of the probabilities that their steps are right.

    Steps are what `separator` parts (empty: what the model was trained with, or a line break);
    empty ones don't count, and a completion without any scores 0. Raises RewardError for a folder
    that is no such model, and for a conversation that is longer than it reads.
    """
    if not model or batch_size < 1:
        raise RewardError(
            "reward 'process_reward_model' needs reward.options.model, a folder or hub id, and a "
            "batch_size of at least 1"
        )
    loaded = _load_step_model(model, dtype, device)
    parted = separator or str(getattr(loaded.model.config, "step_separator", "\n"))
    messages = columns.get("messages") or [[{"role": "user", "content": one}] for one in prompts]
    rows = [
        _step_tokens(loaded, m, [step for step in c.split(parted) if step.strip()], parted)
        for m, c in zip(messages, completions, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))  # batches of like lengths
    scores = [0.0] * len(rows)
    with _lock:
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            found = _probabilities(loaded, [rows[i] for i in some])
            for i, steps in zip(some, found, strict=True):
                scores[i] = _REDUCED[reduce](steps) if steps else 0.0
    return scores


def _step_tokens(
    loaded: ScoringModel, messages: Sequence[Mapping[str, object]], steps: list[str], separator: str
) -> tuple[list[int], list[int]]:
    """The conversation's tokens, and the place of each step's last one."""
    if not steps:
        return [], []
    whole = loaded.tokens(messages, separator.join(steps))
    ends = []
    for i in range(1, len(steps)):
        part = loaded.tokens(messages, separator.join([*steps[:i], ""]))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(whole, part, strict=False))
        ends.append(sum(1 for _ in same) - 1)
    longest = getattr(loaded.model.config, "max_position_embeddings", 0) or len(whole)
    if len(whole) > longest:
        raise RewardError(
            f"a conversation of {len(whole)} tokens is longer than the {longest} that the process "
            "reward model reads; lower data.max_response_length"
        )
    return whole, [*ends, len(whole) - 1]


def _probabilities(
    loaded: ScoringModel, rows: Sequence[tuple[list[int], list[int]]]
) -> list[list[float]]:
    """Of each row the probabilities that its steps are right."""
    import torch

    width = max(1, max(len(ids) for ids, _ in rows))
    padding = int(loaded.tokenizer.pad_token_id)
    ids = torch.tensor([[*ids, *[padding] * (width - len(ids))] for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    device = loaded.model.device
    with torch.inference_mode():
        out = loaded.model(input_ids=ids.to(device), attention_mask=mask.to(device))
    said = out.logits[..., 0].float().sigmoid().tolist()
    return [[row[end] for end in ends] for row, (_, ends) in zip(said, rows, strict=True)]


@functools.cache
def _load_step_model(folder: str, dtype: str, device: str) -> ScoringModel:
    from transformers import AutoModelForTokenClassification

    loaded = load_scoring_model(
        AutoModelForTokenClassification, "token classification", folder, dtype, device
    )
    labels = loaded.model.config.num_labels
    if labels != 1:
        raise RewardError(
            f"reward.options.model={folder!r} has {labels} labels a token, and a process reward "
            "model has one; train it with reward_model.head=token"
        )
    return loaded
