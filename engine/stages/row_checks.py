"""Rows as a tokenizer and a model's context take them, in the stage `dataset` and in a dry run.

What columns mean, and that splits are disjoint, is for `engine.data.prepare` to check.
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.config import DataConfig
from engine.console import say
from engine.data import templates
from engine.data.cells import row_numbers
from engine.data.chat_template import with_template_variables
from engine.data.control_tokens import rows_spelling_control_tokens
from engine.data.prepare import read_splits
from engine.data.sources import Splits
from engine.data.tokenizer import train_tokenizer
from engine.errors import DataError
from engine.models import check_context
from engine.runtime.policy_runtime import open_tokenizer


def check_rows(data: DataConfig, model_path: str, context: int, seed: int) -> tuple[Splits, int]:
    """Read and check the rows as `preprocess` does; return the longest prompt's tokens, too.

    Raises DataError for bad rows, and ModelError for a context that is too short for them.
    """
    splits = read_splits(data, seed, say)
    tokenizer = choose_tokenizer(splits, data, model_path)
    splits, _ = apply_control_tokens(splits, tokenizer, data.control_tokens)
    splits, tokens = fit_to_context(splits, tokenizer, data, context)
    return splits, max(map(max, tokens.values()))


def choose_tokenizer(splits: Splits, data: DataConfig, model_path: str) -> PreTrainedTokenizerBase:
    """Return the start model's tokenizer, checked against its vocabulary, or one trained here."""
    if model_path:
        tokenizer = open_tokenizer(model_path)
    else:
        rows = splits.sft_train
        prompts = [message["content"] for prompt in rows["prompt"] for message in prompt]
        tokenizer = train_tokenizer([*prompts, *rows["response"]], data.vocab_size)
    return with_template_variables(tokenizer, data.apply_chat_template_kwargs)


def apply_control_tokens(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, policy: str
) -> tuple[Splits, int]:
    """Keep, leave out or refuse rows that spell control tokens; return how many there were, too."""
    total, tables = 0, dict[str, Any]()
    for name, frame in splits.tables().items():
        rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
        spelling = rows_spelling_control_tokens(rows, tokenizer, policy, name)
        total += len(spelling)
        if policy == "drop" and len(spelling) == len(frame):
            raise DataError(
                f"data.control_tokens=drop leaves no row of {name}: all {len(frame)} spell control "
                "tokens of the model; correct them, or set it to escape"
            )
        if spelling:
            done = "left out" if policy == "drop" else "kept as plain text"
            say(f"dataset: {name}: {len(spelling)} rows spell control tokens of the model; {done}")
        if spelling and policy == "drop":
            frame = frame.reset_index(drop=True).drop(index=spelling).reset_index(drop=True)
        tables[name] = frame
    return splits.with_tables(tables), total


def fit_to_context(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, data: DataConfig, context: int
) -> tuple[Splits, dict[str, list[int]]]:
    """Drop rows whose prompts are too long, and check the context; return prompts' lengths, too."""
    limit = data.max_prompt_length or context
    tables, tokens = {}, dict[str, list[int]]()
    for name, frame in splits.tables().items():
        encoded = templates.encode_short_prompts(tokenizer, frame["prompt"], limit, name)
        long = [row for row, ids in enumerate(encoded) if ids is None]
        if long and not data.max_prompt_length:
            raise DataError(
                f"{name}: {len(long)} prompts are longer than the model's context of {context} "
                f"tokens ({row_numbers(long)}); set data.max_prompt_length to leave them out"
            )
        if len(long) == len(frame):
            raise DataError(
                f"data.max_prompt_length={limit} leaves no row of {name}: all its prompts are "
                "longer; raise it"
            )
        if long:
            note = f"{name}: {len(long)} prompts over {limit} tokens left out"
            splits = replace(splits, notes=(*splits.notes, note))
            say(f"dataset: {note}")
        tables[name] = frame[[ids is not None for ids in encoded]].reset_index(drop=True)
        tokens[name] = [len(ids) for ids in encoded if ids is not None]
    check_context(max(map(max, tokens.values())), data.max_response_length, context)
    return splits.with_tables(tables), tokens
