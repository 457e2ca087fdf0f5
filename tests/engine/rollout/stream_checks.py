"""Weights by version, and what a stream's completions must be under them, for its tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

import torch
from rollout_models import build, train
from torch import Tensor, nn

from engine.rollout.native import NativeEngine
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.stream import RolloutStream, StreamedCompletion

STOP = tuple(range(20, 26))
VERSIONS = 5
Found = dict[tuple[Hashable, int], Completion]
PARAMS = SamplingParams(n=3, max_new_tokens=24, seed=3, stop_token_ids=STOP)


@cache
@torch.enable_grad()
def weights_of(family: str) -> list[nn.Module]:
    """The model after 0 … VERSIONS-1 updates, each far enough to show in the log-probs."""
    model, versions = build(family), []
    for version in range(VERSIONS):
        twin = build(family)
        twin.load_state_dict(model.state_dict())
        versions.append(twin.eval())
        train(model, steps=1 + version)
    return versions


def write(model: nn.Module, source: nn.Module) -> None:
    """Write `source`'s numbers into `model`'s storage, as an optimizer step does."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)


def update(stream: RolloutStream, model: nn.Module, family: str, version: int) -> None:
    """Bring `model`, in place, and `stream` to `version`."""
    write(model, weights_of(family)[version])
    stream.update_weights(None, version)


def gather(found: Found, finished: Sequence[StreamedCompletion]) -> None:
    for done in finished:
        name = done.key, done.completion_index
        assert name not in found, f"{name} came twice"
        found[name] = done.completion


def drain(stream: RolloutStream, found: Found | None = None) -> Found:
    """Step until nothing is left, with a bound on the steps."""
    found = {} if found is None else found
    for _ in range(2000):
        if not stream.in_flight and not stream.waiting:
            return found
        gather(found, stream.step())
    raise AssertionError("the stream does not end")


@torch.no_grad()
def log_probs_by_version(
    family: str, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> list[Tensor]:
    """Each token's log-prob by transformers' forward pass of the weights it says it came from."""
    width = max(len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        whole = [*prompt, *completion.token_ids]
        ids[row, : len(whole)], mask[row, : len(whole)] = torch.tensor(whole), 1
    used = sorted({v for c in completions for v in c.token_versions})
    logits = {v: weights_of(family)[v](input_ids=ids, attention_mask=mask).logits for v in used}
    scored = {v: found.log_softmax(-1) for v, found in logits.items()}
    answers = []
    for row, (prompt, c) in enumerate(zip(prompts, completions, strict=True)):
        places = range(len(prompt) - 1, len(prompt) - 1 + len(c.token_ids))
        triples = zip(c.token_versions, places, c.token_ids, strict=True)
        answers.append(torch.stack([scored[v][row, at, token] for v, at, token in triples]))
    return answers


def worst_error(family: str, prompts: dict[Hashable, list[int]], found: Found) -> float:
    """Greatest distance of a recorded log-prob from that of its version's forward pass."""
    completions = list(found.values())
    expected = log_probs_by_version(family, [prompts[key] for key, _ in found], completions)
    return max(
        float((torch.tensor(c.log_probs) - e).abs().max())
        for c, e in zip(completions, expected, strict=True)
    )


def with_n(n: int, **changes: int) -> SamplingParams:
    return SamplingParams(
        n=n, **{"max_new_tokens": 24, "seed": 3, "stop_token_ids": STOP} | changes
    )


def generated(engine: NativeEngine, prompts: list[list[int]], params: SamplingParams) -> Found:
    completions = engine.generate(prompts, params)
    return {(i // params.n, i % params.n): c for i, c in enumerate(completions)}


def texts(found: Found) -> dict[tuple[Hashable, int], tuple[list[int], str]]:
    return {name: (c.token_ids, c.finish_reason) for name, c in found.items()}
