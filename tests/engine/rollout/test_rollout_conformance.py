"""What every rollout engine must do, on each model shape; transformers' forward is the judge."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rollout_models import (
    CONTEXT,
    VOCABULARY,
    Subject,
    build,
    make_prompts,
    reference_logits,
    train,
)
from thorough import and_slow

from engine.errors import ModelError, RolloutError
from engine.rollout.protocol import Completion, SamplingParams

STOP = tuple(range(20, 28))


def texts(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def check_log_probs(
    subject: Subject, prompts: list[list[int]], completions: list[Completion]
) -> None:
    """Assert that all log-probs are the trainer's, as close as the engine's dtype allows."""
    errors = log_prob_errors(subject, prompts, completions)
    assert float(errors.max()) < subject.tolerance
    assert float(errors.mean()) < subject.mean_tolerance


def log_prob_errors(
    subject: Subject, prompts: list[list[int]], completions: list[Completion]
) -> torch.Tensor:
    rows = [prompts[c.prompt_index] + c.token_ids for c in completions]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens in enumerate(rows):  # what follows a row's end changes nothing before it
        ids[row, : len(tokens)] = torch.tensor(tokens)
    with torch.no_grad():
        training = subject.model.training
        scored = subject.model.eval()(input_ids=ids).logits.float().log_softmax(-1)
        subject.model.train(training)
    scored = scored[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    errors = [
        scored[row, len(tokens) - len(c.token_ids) - 1 : len(tokens) - 1]
        - torch.tensor(c.log_probs)
        for row, (tokens, c) in enumerate(zip(rows, completions, strict=True))
    ]
    return torch.cat(errors).abs()


def test_long_tailed_rollout_with_more_rows_than_slots(subject: Subject) -> None:
    prompts = make_prompts(18)
    params = SamplingParams(n=3, max_new_tokens=30, seed=1, stop_token_ids=STOP)
    progress: list[int] = []
    completions = subject.engine.generate(prompts, params, progress.append)
    assert [c.prompt_index for c in completions] == [i for i in range(18) for _ in range(3)]
    assert progress == sorted(progress)
    assert progress[-1] == 54
    for c in completions:
        assert len(c.token_ids) == len(c.log_probs) <= 30
        assert all(0 <= token < VOCABULARY for token in c.token_ids)
        assert not set(c.token_ids[:-1]) & set(STOP)
        ended = c.token_ids[-1] in STOP
        assert c.finish_reason == ("stop" if ended else "length")
        assert ended or len(c.token_ids) == 30
    lengths = {len(c.token_ids) for c in completions}
    assert len(lengths) > 8, "the mix of lengths is meant to be long-tailed"
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert len({tuple(t) for t in texts(completions)}) > 45, "rows must not share their noise"
    check_log_probs(subject, prompts, completions)


def test_log_probs_follow_optimizer_steps(subject: Subject) -> None:
    prompts = make_prompts(6, seed=2)
    params = SamplingParams(n=2, max_new_tokens=12, seed=3)
    version = subject.engine.policy_version
    before = subject.engine.generate(prompts, params)
    for update in range(1, 4):
        train(subject.model, steps=3)
        subject.engine.update_weights(subject.model, version + update)
        after = subject.engine.generate(prompts, params)
        assert subject.engine.policy_version == version + update
        assert {c.policy_version for c in after} == {version + update}
        check_log_probs(subject, prompts, after)
    moved = float(log_prob_errors(subject, prompts, before).mean())
    assert moved > 3 * subject.mean_tolerance, "the steps must move the log-probs to show anything"


def test_greedy_agrees_with_an_argmax_loop(subject: Subject) -> None:
    prompts = make_prompts(5, seed=4)
    params = SamplingParams(n=2, max_new_tokens=10, temperature=0, stop_token_ids=STOP)
    completions = subject.engine.generate(prompts, params)
    for index, prompt in enumerate(prompts):
        expected: list[int] = []
        while len(expected) < 10 and not (expected and expected[-1] in STOP):
            logits = reference_logits(subject.model, prompt, [*expected, 0])[-1]
            expected.append(int(logits.argmax()))
        first, second = texts(completions[2 * index : 2 * index + 2])
        assert first == second
        if subject.exact:
            assert first == expected
        else:  # rounding decides between two tokens that are nearly equally likely
            logits = reference_logits(subject.model, prompt, first)
            chosen = logits.gather(1, torch.tensor(first)[:, None])[:, 0]
            assert float((logits.max(-1).values - chosen).max()) < 2 * subject.tolerance
    check_log_probs(subject, prompts, completions)


def test_same_seed_same_tokens_whatever_shares_the_batch(subject: Subject) -> None:
    prompts = make_prompts(7, seed=5)
    params = SamplingParams(n=2, max_new_tokens=8, seed=11)
    first = subject.engine.generate(prompts, params)
    assert texts(subject.engine.generate(prompts, params)) == texts(first)
    assert texts(subject.engine.generate(prompts[:2], params)) == texts(first[:4])
    more = subject.engine.generate(prompts + make_prompts(9, seed=6), params)
    assert texts(more[:14]) == texts(first)
    other = subject.engine.generate(prompts, dataclasses.replace(params, seed=12))
    assert sum(a == b for a, b in zip(texts(other), texts(first), strict=True)) < 4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    and_slow([(1.3, 9, 0.8)], [(0.6, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.7)]),
)
def test_samples_follow_the_truncated_distribution(
    subject: Subject, temperature: float, top_k: int, top_p: float
) -> None:
    prompt, count = [9, 33, 41, 5], 1200
    params = SamplingParams(
        n=count, max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=8
    )
    expected = torch.softmax(reference_logits(subject.model, prompt, [0])[0] / temperature, -1)
    ranked, order = expected.sort(descending=True)
    if top_k:
        ranked[top_k:] = 0
        ranked = ranked / ranked.sum()
    keep = int((ranked.cumsum(0) < top_p).sum()) + 1
    places = torch.arange(len(ranked))

    def kept(mask: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(ranked).scatter_(0, order, ranked * mask / (ranked * mask).sum())

    expected = kept(places < keep)
    drawn = subject.engine.generate([prompt], params)
    tokens = torch.tensor([c.token_ids[0] for c in drawn])
    seen = tokens.bincount(minlength=len(expected)) / count
    possible = [expected]
    if not subject.exact:  # rounding may leave the last token kept out, or take the next one
        last, following = places == keep - 1, places == keep
        sure = (places < keep) & ~last
        possible += [kept(mask) for mask in (sure, sure | following, sure | last | following)]
    else:
        assert (expected[tokens] > 0).all(), "a token outside the kept set was drawn"
        errors = torch.tensor([c.log_probs[0] for c in drawn]) - expected[tokens].log()
        assert errors.abs().max() < 1e-4
    # Total variation of `count` draws from V outcomes is about sqrt(V / (2·pi·count)).
    support = int((expected > 0).sum())
    distance = min(float((seen - each).abs().sum()) / 2 for each in possible)
    assert distance < 2.5 * (support / (6.3 * count)) ** 0.5


@pytest.mark.parametrize("most", [8, 10**9])  # the latter: as many as there is room for
def test_a_completion_ends_at_the_context(subject: Subject, most: int) -> None:
    prompt = make_prompts(1, seed=9)[0] * CONTEXT
    short, long = prompt[: CONTEXT - 3], prompt[: CONTEXT - 1]
    params = SamplingParams(max_new_tokens=most, seed=1)
    completions = subject.engine.generate([short, long], params)
    assert [len(c.token_ids) for c in completions] == [3, 1]
    assert {c.finish_reason for c in completions} == {"length"}


def test_no_prompts_no_completions(subject: Subject) -> None:
    assert subject.engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[5], []], SamplingParams(), "prompt 1 is empty"),
        ([[5], [4] * CONTEXT], SamplingParams(), rf"prompt 1 has {CONTEXT} tokens.*{CONTEXT}"),
        ([[5, VOCABULARY]], SamplingParams(), f"prompt 0 has token id {VOCABULARY}"),
        ([[5, -1]], SamplingParams(), "prompt 0 has token id -1"),
        ([[5]], SamplingParams(n=0), "n=0"),
        ([[5]], SamplingParams(max_new_tokens=0), "max_new_tokens=0"),
        ([[5]], SamplingParams(temperature=-1), "temperature=-1"),
        ([[5]], SamplingParams(temperature=float("nan")), "temperature=nan"),
        ([[5]], SamplingParams(top_p=0), "top_p=0"),
        ([[5]], SamplingParams(top_k=-2), "top_k=-2"),
    ],
)
def test_bad_requests_are_refused(
    subject: Subject, prompts: list[list[int]], params: SamplingParams, message: str
) -> None:
    with pytest.raises((ModelError, RolloutError), match=message):
        subject.engine.generate(prompts, params)


def test_nan_weights_are_named_and_recovered_from(subject: Subject) -> None:
    weight = subject.model.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    subject.engine.update_weights(subject.model, subject.engine.policy_version)
    with pytest.raises(RolloutError, match="NaN"):
        subject.engine.generate([[5, 6]], SamplingParams(n=2, max_new_tokens=4))
    with torch.no_grad():
        weight.copy_(kept)
    subject.engine.update_weights(subject.model, subject.engine.policy_version)
    prompts = [[5, 6]]
    after = subject.engine.generate(prompts, SamplingParams(n=2, max_new_tokens=4))
    check_log_probs(subject, prompts, after)


def test_a_failed_update_stops_serving(subject: Subject) -> None:
    version = subject.engine.policy_version
    empty = build("qwen2").to("meta")
    with pytest.raises(RolloutError, match="could not take policy version"):
        subject.engine.update_weights(empty, version + 1)
    with pytest.raises(RolloutError, match="can't serve"):
        subject.engine.generate([[5, 6]], SamplingParams(max_new_tokens=2))
    with pytest.raises(RolloutError, match="never fall"):
        subject.engine.update_weights(subject.model, version - 1)
    subject.engine.update_weights(subject.model, version + 1)
    prompts = [[5, 6]]
    after = subject.engine.generate(prompts, SamplingParams(max_new_tokens=4))
    check_log_probs(subject, prompts, after)
