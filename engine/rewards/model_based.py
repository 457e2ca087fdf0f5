"""Rewards from models in this process, each loaded once and kept there.

`reward_model` is a model with a scoring head, `likelihood` a language model by its log-prob of a
completion, `process_reward_model` one that scores the steps of a completion. They run on the GPU
that the reward role has (`trainer.pools`), without one on the CPU.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from engine.errors import ModelError, RewardError
from engine.rewards.reward_function import register_reward

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    `max_length` tokens (0: what it takes). Raises RewardError for a folder that is no such model,
    and DataError for a conversation that its template refuses.
    """
    loaded = load_scoring_model("SequenceClassification", model, dtype, device)
    rows = [loaded.tokens(m, c) for m, c in _conversations(prompts, completions, columns)]
    score = functools.partial(loaded.classify, max_length=max_length, label=label)
    return _in_batches(rows, batch_size, len, score)


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
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions: β · log π(completion | messages), less `reference`'s where one is given.

    So ranks a policy that was trained on preferences, with a reference by DPO (its implicit reward,
    arXiv 2305.18290, eq. 5). The log-prob is the sum, or with `per_token` the mean, over the
    completion's tokens and its end token. Raises RewardError for no causal language model or chat
    template, and for a conversation that is longer than it reads.
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
    **columns: Sequence[object],
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

    def tokens(self, messages: Messages, completion: str) -> list[int]:
        """The tokens of the conversation that ends in the completion, as in training."""
        from engine.data.templates import encode_conversation

        answer = {"role": "assistant", "content": completion}
        return encode_conversation(self.tokenizer, [*map(dict, messages), answer])

    def classify(self, rows: Sequence[list[int]], max_length: int, label: int) -> list[float]:
        """The one logit of each row, or of several labels the probability of `label`."""
        import torch

        limit = max_length or self.longest
        ids, mask = self.padded([self._end_of(row, limit) for row in rows])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, label]
        return [float(score) for score in scores.cpu()]

    def _end_of(self, row: list[int], limit: int) -> list[int]:
        """A row's last tokens, where the completion is, after a start token of the tokenizer's."""
        if len(row) <= limit:
            return row
        plain = not self.tokenizer.chat_template
        start = row[:1] if plain and row[0] in self.tokenizer.all_special_ids else []
        return [*start, *row[len(row) - limit + len(start) :]]

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

    from engine.data.tokenizer import load_tokenizer

    if not folder:
        raise RewardError("this reward needs reward.options.model, a folder or hub id")
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = getattr(torch, dtype or ("bfloat16" if on.type == "cuda" else "float32"))
    try:
        model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(
            folder, dtype=precision, trust_remote_code=False
        )
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError, ModelError) as error:
        raise RewardError(
            f"reward.options.model={folder!r} can't be loaded as AutoModelFor{head} "
            f"({' '.join(str(error).split())[:300]})"
        ) from None
    if head == "TokenClassification" and model.config.num_labels != 1:
        raise RewardError(
            f"reward.options.model={folder!r} has {model.config.num_labels} labels a token, and a "
            "process reward model has one; train it with reward_model.head=token"
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return ScoringModel(model.to(on).eval(), tokenizer)


def _prompt_and_answer(
    loaded: ScoringModel, messages: Messages, completion: str
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and of the completion to its end token, as in training."""
    from engine.data.templates import encode_turn

    if not loaded.tokenizer.chat_template:
        raise RewardError("reward 'likelihood' needs a model with a chat template; give it one")
    answer = {"role": "assistant", "content": completion}
    turn = encode_turn(loaded.tokenizer, [*map(dict, messages)], answer)
    sizes = len(turn.prompt_ids), len(turn.response_ids)
    if sum(sizes) > loaded.longest or not all(sizes):
        raise RewardError(
            f"a conversation of {sizes[0]} and {sizes[1]} tokens has no log-prob: the model reads "
            f"{loaded.longest}; lower data.max_response_length"
        )
    return turn.prompt_ids, turn.response_ids


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
    from engine.data.templates import encode_steps

    if not steps:
        return [], []
    tokens, ends = encode_steps(loaded.tokenizer, [*map(dict, messages)], steps, separator)
    if len(tokens) > loaded.longest:
        raise RewardError(
            f"a conversation of {len(tokens)} tokens is longer than the {loaded.longest} that the "
            "process reward model reads; lower data.max_response_length"
        )
    return tokens, ends


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
