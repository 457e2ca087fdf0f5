"""Rewards from models in this process, each loaded once and kept there.

`reward_model` is a model with a scoring head, `likelihood` a language model by its log-prob of a
completion, `process_reward_model` one that scores the steps of a completion. They run on the GPU
that the reward role has (`trainer.pools`), without one on the CPU.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from engine.errors import RewardError
from engine.rewards.reward_function import register_reward

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
R = TypeVar("R")
Messages: TypeAlias = Sequence[Mapping[str, object]]
Dtype: TypeAlias = Literal["", "float32", "bfloat16"]

_lock = threading.Lock()  # one batch at a time: single rows come from several threads


@register_reward("reward_model", right_from="pass_from")
def reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    batch_size: int = 8,
    max_length: int = 0,
    dtype: Dtype = "",
    device: str = "",
    label: int = -1,
    pass_from: float = 0.0,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions: the model's one logit, or the probability of `label` of several.

    `model` is a sequence-classification folder. It reads the row's messages and the completion by
    its own chat template (without one, prompt and completion on lines of their own), the last
    `max_length` tokens (0: what it takes). Raises RewardError for a folder that is no such model.
    """
    loaded = load_scoring_model("SequenceClassification", model, dtype, device)
    texts = [loaded.text(m, c) for m, c in _conversations(prompts, completions, columns)]
    score = functools.partial(loaded.classify, max_length=max_length, label=label)
    return _in_batches(texts, batch_size, len, score)


@register_reward("likelihood", right_from="pass_from")
def likelihood(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    reference: str = "",
    beta: float = 1.0,
    per_token: bool = False,
    batch_size: int = 8,
    dtype: Dtype = "",
    device: str = "",
    pass_from: float = 0.0,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions: β · log π(completion | messages), less `reference`'s where one is given.

    So ranks a policy that was trained on preferences, with a reference by DPO (its implicit reward,
    arXiv 2305.18290, eq. 5). The log-prob is the sum over the completion's tokens and its end
    token, or with `per_token` their mean. Raises RewardError for a folder that is no causal
    language model, or has no chat template, and for a conversation that is longer than it reads.
    """

    def log_probs(folder: str) -> list[float]:
        loaded = load_scoring_model("CausalLM", folder, dtype, device)
        conversations = _conversations(prompts, completions, columns)
        rows = [_prompt_and_answer(loaded, m, c) for m, c in conversations]
        score = functools.partial(_log_probs, loaded, per_token=per_token)
        return _in_batches(rows, batch_size, lambda row: len(row[0]) + len(row[1]), score)

    scores = [beta * x for x in log_probs(model)]
    if reference:
        scores = [s - beta * x for s, x in zip(scores, log_probs(reference), strict=True)]
    return scores


_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min, "product": math.prod, "mean": statistics.fmean, "last": operator.itemgetter(-1),
}  # fmt: skip


@register_reward("process_reward_model", right_from="pass_from")
def process_reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    model: str = "",
    reduce: Literal["min", "product", "mean", "last"] = "min",
    separator: str = "",
    batch_size: int = 8,
    dtype: Dtype = "",
    device: str = "",
    pass_from: float = 0.5,
    **columns: Sequence[Any],
) -> list[float]:
    """Score B completions from 0 to 1: `reduce` of the probabilities that their steps are right.

    `model` is a token-classification folder with one label, as `reward_model.head=token` trains it.
    `separator` stands between steps (empty: what the model was trained with, or a line break); a
    completion without steps scores 0. Raises RewardError for a folder that is no such model, and
    for a conversation that is longer than it reads.
    """
    loaded = load_scoring_model("TokenClassification", model, dtype, device)
    between = separator or str(getattr(loaded.model.config, "step_separator", "\n"))
    rows = [
        _tokens_and_ends(loaded, m, [step for step in c.split(between) if step.strip()], between)
        for m, c in _conversations(prompts, completions, columns)
    ]
    score = functools.partial(_step_probabilities, loaded)
    probabilities = _in_batches(rows, batch_size, lambda row: len(row[0]), score)
    return [_REDUCTIONS[reduce](steps) if steps else 0.0 for steps in probabilities]


def _conversations(
    prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[tuple[Messages, str]]:
    """Each row's messages, of the prompt's text alone where the data has none, and completion."""
    messages = columns.get("messages") or [[{"role": "user", "content": p}] for p in prompts]
    return list(zip(messages, completions, strict=True))


def _in_batches(
    items: Sequence[T],
    batch_size: int,
    length: Callable[[T], int],
    score: Callable[[list[T]], Sequence[R]],
) -> list[R]:
    """Score items in batches of like lengths; the results in the items' order."""
    if batch_size < 1:
        raise RewardError(f"reward.options.batch_size={batch_size} must be at least 1")
    order = sorted(range(len(items)), key=lambda i: length(items[i]))
    results: dict[int, R] = {}
    with _lock:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            results |= zip(batch, score([items[i] for i in batch]), strict=True)
    return [results[i] for i in range(len(items))]


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A model on its device, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def longest(self) -> int:
        """Tokens that the model reads."""
        return getattr(self.model.config, "max_position_embeddings", 0) or 1 << 20

    def text(self, messages: Messages, completion: str | None = None) -> str:
        """The conversation that ends in the completion, or (None) where one is to come.

        Control tokens in it are broken up.
        """
        answer = [] if completion is None else [{"role": "assistant", "content": completion}]
        turns = self._plain([*messages, *answer])
        if not self.tokenizer.chat_template:
            return "\n".join(str(turn["content"]) for turn in turns[-2:])
        text = self.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=completion is None
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the tokenizer's around it unless its template has them."""
        special = not self.tokenizer.chat_template
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=special)]

    def tokens(self, messages: Messages, completion: str) -> list[int]:
        """The conversation's tokens; padding ones at its end are left out."""
        ids = self.encode(self.text(messages, completion))
        while ids and ids[-1] == self.tokenizer.pad_token_id:
            ids.pop()
        return ids

    def _plain(self, turns: Messages) -> list[dict[str, Any]]:
        """The turns with a blank in each control token that they spell: it is plain text then."""
        tokens = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        plain = []
        for turn in turns:
            text = str(turn["content"])
            for token in tokens:
                if len(token) > 1:
                    text = text.replace(token, f"{token[0]} {token[1:]}")
            plain.append({**turn, "content": text})
        return plain

    def classify(self, texts: list[str], max_length: int, label: int) -> list[float]:
        """The one logit of each text, or of several labels the probability of `label`."""
        import torch

        batch = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=max_length or self.longest,
            add_special_tokens=not self.tokenizer.chat_template,  # which has them already
            return_tensors="pt",
        ).to(self.model.device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            logits = self.model(**inputs).logits.float()
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, label]
        return [float(score) for score in scores.cpu()]

    def padded(self, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows and their attention mask, both `[B, T]`, on the model's device, padded right."""
        import torch

        width = max(map(len, rows))
        padding = int(self.tokenizer.pad_token_id)
        ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return ids.to(self.model.device), mask.to(self.model.device)


@functools.cache
def load_scoring_model(
    head: Literal["SequenceClassification", "CausalLM", "TokenClassification"],
    folder: str,
    dtype: str,
    device: str,
) -> ScoringModel:
    """Load a model of transformers' class `AutoModelFor<head>`; RewardError where it is none."""
    import torch
    import transformers

    if not folder:
        raise RewardError("this reward needs reward.options.model, a folder or hub id")
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = getattr(torch, dtype or ("bfloat16" if on.type == "cuda" else "float32"))
    try:
        model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(
            folder, dtype=precision, trust_remote_code=False
        )
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward.options.model={folder!r} can't be loaded as AutoModelFor{head} "
            f"({' '.join(str(error).split())[:300]})"
        ) from None
    if head == "TokenClassification" and model.config.num_labels != 1:
        raise RewardError(
            f"reward.options.model={folder!r} has {model.config.num_labels} labels a token, and a "
            "process reward model has one; train it with reward_model.head=token"
        )
    tokenizer.truncation_side = "left"  # the completion, at the end, must be seen
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return ScoringModel(model.to(on).eval(), tokenizer)


def _tokenizer_class(folder: str) -> type[AutoTokenizer | PreTrainedTokenizerBase]:
    """The class that reads the folder's tokenizer as it was in training."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = Path(folder) / "tokenizer_config.json"
    if not config.is_file() or not (Path(folder) / "tokenizer.json").is_file():  # a hub id, say
        return AutoTokenizer
    saved = json.loads(config.read_text()).get("tokenizer_class")
    # Beside Qwen2's config.json, AutoTokenizer would split words as Qwen2 does.
    generic = saved in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return PreTrainedTokenizerFast if generic else AutoTokenizer


def _prompt_and_answer(
    loaded: ScoringModel, messages: Messages, completion: str
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and of the completion to its end token, apart as in training."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        raise RewardError("reward 'likelihood' needs a model with a chat template; give it one")
    conversation, opening = loaded.text(messages, completion), loaded.text(messages)
    if not conversation.startswith(opening):
        raise RewardError(
            "reward 'likelihood': the model's chat template doesn't write an answer after what it "
            "writes for one to come, so no completion has a log-prob; give it another template"
        )
    prompt, answer = loaded.encode(opening), loaded.encode(conversation.removeprefix(opening))
    # It ends with its last control token, which a line break may follow. The template may write
    # others before the text ("<|channel|>final<|message|>"), which has none itself.
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    end = max((at for at, token in enumerate(answer) if token in control), default=len(answer))
    answer = answer[: end + 1]
    if len(prompt) + len(answer) > loaded.longest or not prompt or not answer:
        raise RewardError(
            f"a conversation of {len(prompt)} and {len(answer)} tokens has no log-prob: the model "
            f"reads {loaded.longest}; lower data.max_response_length"
        )
    return prompt, answer


def _log_probs(
    loaded: ScoringModel, rows: Sequence[tuple[list[int], list[int]]], per_token: bool
) -> list[float]:
    """The log-prob of each row's completion, or its mean over tokens."""
    import torch

    ids, _ = loaded.padded([prompt + answer for prompt, answer in rows])
    log_probs = []
    with torch.inference_mode():  # padding is on the right, where no token before it looks
        logits = loaded.model(input_ids=ids).logits
        for row, (prompt, answer) in enumerate(rows):
            start, stop = len(prompt), len(prompt) + len(answer)
            loss = torch.nn.functional.cross_entropy(
                logits[row, start - 1 : stop - 1].float(),
                ids[row, start:stop],
                reduction="mean" if per_token else "sum",
            )
            log_probs.append(-loss)
        return [float(value) for value in torch.stack(log_probs).cpu()]


def _tokens_and_ends(
    loaded: ScoringModel, messages: Messages, steps: list[str], separator: str
) -> tuple[list[int], list[int]]:
    """The conversation's tokens, and the index of each step's last one."""
    if not steps:
        return [], []
    tokens = loaded.tokens(messages, separator.join(steps))
    if len(tokens) > loaded.longest:
        raise RewardError(
            f"a conversation of {len(tokens)} tokens is longer than the {loaded.longest} that the "
            "process reward model reads; lower data.max_response_length"
        )
    ends = []
    for i in range(1, len(steps)):
        part = loaded.tokens(messages, separator.join([*steps[:i], ""]))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, part, strict=False))
        ends.append(sum(1 for _ in same) - 1)
    return tokens, [*ends, len(tokens) - 1]


def _step_probabilities(
    loaded: ScoringModel, rows: Sequence[tuple[list[int], list[int]]]
) -> list[list[float]]:
    """The probabilities that each row's steps are right."""
    import torch

    if not any(ids for ids, _ in rows):
        return [[] for _ in rows]
    ids, mask = loaded.padded([ids for ids, _ in rows])
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids, attention_mask=mask).logits
    probabilities = logits[..., 0].float().sigmoid().tolist()
    return [[row[end] for end in ends] for row, (_, ends) in zip(probabilities, rows, strict=True)]
