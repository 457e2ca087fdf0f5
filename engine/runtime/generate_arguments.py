"""Converts transformers' `generate` arguments to a rollout request, and completions to its output.

Defaults, their precedence and the shapes are those of transformers. An argument that a rollout
engine doesn't support raises ConfigError: ignoring it would change the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from engine.errors import ConfigError, DataError
from engine.rollout.protocol import Completion, SamplingParams

_SUPPORTED = {
    "max_length",
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "num_return_sequences",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
}
_WITHOUT_EFFECT = {  # on the tokens of sampling and greedy decoding
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "renormalize_logits",
    "disable_compile",
    "compile_config",
    "prefill_chunk_size",
    "low_memory",
    "decoder_start_token_id",
    "transformers_version",
}
_WITHOUT_EFFECT_IF_GREEDY = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}


@dataclass(frozen=True, slots=True)
class GenerateCall:
    input_ids: Tensor  # [B, P] long, as passed
    prompts: list[list[int]]  # B prompts without their padding
    params: SamplingParams
    pad_token_id: int | None

    def sequences(self, completions: Sequence[Completion]) -> Tensor:
        """Prompts and completions `[B·n, P + R]`, padded on the right to the longest completion."""
        width = self.input_ids.shape[1]
        longest = max((len(c.token_ids) for c in completions), default=0)
        fill = 0 if self.pad_token_id is None else self.pad_token_id
        rows = torch.full((len(completions), width + longest), fill, dtype=torch.long)
        rows[:, :width] = self.input_ids.cpu().repeat_interleave(self.params.n, dim=0)
        for row, completion in zip(rows, completions, strict=True):
            tokens = torch.tensor(completion.token_ids, dtype=torch.long)
            row[width : width + len(tokens)] = tokens
        return rows.to(self.input_ids.device)


def read_call(
    policy: PreTrainedModel,
    max_model_len: int,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    arguments: dict[str, Any],
) -> GenerateCall:
    """Check a call of `generate(inputs, generation_config, **arguments)` on `policy`.

    Raises ConfigError for an argument that is unknown, isn't supported or is out of range, and
    DataError for inputs that are not left-padded prompts.
    """
    arguments = dict(arguments)
    input_ids, mask = arguments.pop("input_ids", inputs), arguments.pop("attention_mask", None)
    if input_ids is not inputs and inputs is not None:
        raise ConfigError("generate got both inputs and input_ids; pass one of them")
    configs = (generation_config, policy.generation_config)
    lengths = [getattr(config, "max_length", None) for config in configs]
    default_length = not any([*lengths, arguments.get("max_length")])
    config = _resolve(policy, generation_config, arguments)
    input_ids = _check_ids(input_ids, config, policy.device)
    eos = [] if config.eos_token_id is None else config.eos_token_id
    ends: list[int] = torch.as_tensor(eos).flatten().tolist()
    stops = tuple(token for token in ends if token >= 0)
    pad = config.pad_token_id
    if pad is None and ends:
        pad = ends[0]
    mask = _mask(input_ids, mask, pad, stops)
    prompts = [ids[keep].tolist() for ids, keep in zip(input_ids.cpu(), mask.cpu(), strict=True)]
    new_tokens = _new_tokens(config, input_ids.shape[1], default_length, policy)
    longest = max(map(len, prompts), default=0)
    if longest + new_tokens > max_model_len:
        raise ConfigError(
            f"max_new_tokens={new_tokens} after a prompt of {longest} tokens exceeds the "
            f"{max_model_len} tokens of the model's context; lower it or shorten the prompt"
        )
    return GenerateCall(input_ids, prompts, _params(config, new_tokens, stops), pad)


def _resolve(
    policy: PreTrainedModel, generation_config: GenerationConfig | None, arguments: dict[str, Any]
) -> GenerationConfig:
    """transformers' merge of arguments, `given`, the model's own configuration and defaults."""
    try:
        prepare: Any = policy._prepare_generation_config
        config, rest = prepare(generation_config, **arguments)
    except ValueError as error:
        raise ConfigError(f"generate: {error}") from None
    for name, value in rest.items():
        if value is not None and value is not False:
            _refuse(name, value)
    greedy = not config.do_sample
    neutral = GenerationConfig._get_default_generation_params()
    fine = _SUPPORTED | _WITHOUT_EFFECT | (_WITHOUT_EFFECT_IF_GREEDY if greedy else set())
    for name in (name for name in vars(GenerationConfig()) if name[0] != "_" and name not in fine):
        value = getattr(config, name, None)
        if value is not None and value is not False and value != neutral.get(name):
            _refuse(name, value)
    if greedy and config.num_return_sequences != 1:
        _refuse("num_return_sequences", config.num_return_sequences, "add do_sample=True")
    if config.do_sample and not config.temperature > 0:
        _refuse("temperature", config.temperature, "use do_sample=False for greedy decoding")
    return config


def _refuse(name: str, value: object, way_out: str = "") -> None:
    shown = value if isinstance(value, str | int | float | list | tuple) else type(value).__name__
    if not way_out and (near := get_close_matches(name, _SUPPORTED, n=1)):
        way_out = f"did you mean {near[0]}?"
    way_out = way_out or "leave it out, or call actor.policy.generate, transformers' own loop"
    raise ConfigError(f"generate can't take {name}={shown!r}: {way_out}")


def _check_ids(ids: Tensor | None, config: GenerationConfig, device: torch.device) -> Tensor:
    """Token ids `[B, P]`; without any, one row with the BOS token as transformers makes it."""
    if ids is None:
        if config.bos_token_id is None:
            raise DataError(
                "generate got no input_ids and the model has no BOS token; pass input_ids"
            )
        return torch.tensor([[config.bos_token_id]], device=device)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        what = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise DataError(f"input_ids is {what}; generate takes token ids [batch, prompt length]")
    return ids


def _mask(ids: Tensor, mask: Tensor | None, pad: int | None, stops: Sequence[int]) -> Tensor:
    """Mask of prompt tokens, bool `[B, P]`; without `mask`, all but padding that isn't EOS."""
    if mask is None:
        if pad is None or pad in stops:
            return torch.ones_like(ids, dtype=torch.bool)
        mask = ids != pad
    if mask.shape != ids.shape:
        raise DataError(
            f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(ids.shape)}; make them "
            "the same shape"
        )
    mask = mask.to(ids.device) != 0
    ends = (~mask[:, -1]).nonzero()[:, 0].tolist() if ids.shape[1] else []
    if ends:
        raise DataError(
            f"row {ends[0]} of input_ids ends in padding, after which nothing can be generated; "
            "pad on the left (tokenizer.padding_side='left')"
        )
    return mask


def _new_tokens(
    config: GenerationConfig, width: int, default_length: bool, policy: PreTrainedModel
) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if default_length:  # transformers' default length counts new tokens and stays in the context
        context = getattr(policy.config, "max_position_embeddings", None)
        total = config.max_length + width
        new_tokens = (total if context is None else min(total, context)) - width
    else:
        new_tokens = config.max_length - width
    if new_tokens < 1:
        raise ConfigError(
            f"input_ids of {width} columns leave no room in max_length={config.max_length}; pass "
            "max_new_tokens, or a longer max_length"
        )
    return int(new_tokens)


def _params(config: GenerationConfig, new_tokens: int, stops: tuple[int, ...]) -> SamplingParams:
    if not config.do_sample:
        return SamplingParams(max_new_tokens=new_tokens, temperature=0.0, stop_token_ids=stops)
    return SamplingParams(
        n=config.num_return_sequences,
        max_new_tokens=new_tokens,
        temperature=float(config.temperature),
        top_k=int(config.top_k or 0),
        top_p=float(1.0 if config.top_p is None else config.top_p),
        seed=int(torch.randint(2**31 - 1, ())),  # so torch.manual_seed repeats a call
        stop_token_ids=stops,
    )
