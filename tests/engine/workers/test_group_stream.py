"""Partial groups continue in another stream, token for token, from their checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engine import tiny_model

from engine.batch import Batch
from engine.config import RolloutConfig
from engine.errors import RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import (
    PARTIAL_GROUP,
    PartialCompletion,
    PartialGroup,
    take_partial_groups,
    with_partial_groups,
)
from engine.workers.role import WorkerContext
from engine.workers.rollout_worker import GroupStream, StreamRolloutWorker

N, LONGEST = 3, 9
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [5, 9]]
TOKENS = ("responses", "response_mask", "token_versions", "truncated")

tokens = st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0, width=32), st.integers(0, 3)))
begun_groups = st.lists(st.tuples(tokens, st.sampled_from(["", "stop", "length"])), max_size=4)


def stream(n: int = N, slots: int = 16) -> GroupStream:
    engine = NativeEngine(tiny_model("qwen2").double(), max_model_len=40)
    params = SamplingParams(n=n, max_new_tokens=LONGEST, seed=3, stop_token_ids=(1, 2))
    config = RolloutConfig(n=n, max_num_seqs=slots)
    return GroupStream(engine, params, config, max_model_len=40, pad_token_id=0)


def prompts(keys: list[int]) -> Batch:
    columns = {"prompt_ids": [PROMPTS[key] for key in keys], "answer": [str(k) for k in keys]}
    return Batch({"group_ids": torch.tensor(keys)}, columns)


def finish(subject: GroupStream, found: dict[int, Batch]) -> dict[int, Batch]:
    while subject.busy:
        found |= {int(group["group_ids"][0]): group for group in subject.step()}
    return found


def assert_same(found: dict[int, Batch], wanted: dict[int, Batch]) -> None:
    assert found.keys() == wanted.keys()
    for key, group in wanted.items():
        assert all(torch.equal(found[key][name], group[name]) for name in TOKENS)
        torch.testing.assert_close(found[key]["rollout_log_probs"], group["rollout_log_probs"])
        assert list(found[key].columns["answer"]) == [str(key)] * N
        assert PARTIAL_GROUP not in found[key].columns


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, Batch]:
    subject = stream()
    subject.submit(prompts([0, 1, 2, 3]))
    return finish(subject, {})


def stream_worker(folder: Path) -> StreamRolloutWorker:
    config = RolloutConfig(n=N, max_num_seqs=16)
    options: dict[str, Any] = {"model_path": str(folder), "config": config, "seed": 3}
    lengths = {"max_response_length": LONGEST, "max_model_len": 40}
    return StreamRolloutWorker(WorkerContext("sampler"), **options, **lengths)


@pytest.mark.parametrize("polls", [0, 1, 4])
def test_a_stream_goes_on_after_what_was_sampled_apart(tiny_folder: Path, polls: int) -> None:
    """Token for token; and apart comes what a worker without a stream samples."""
    alone, subject = stream_worker(tiny_folder), stream_worker(tiny_folder)
    asked = prompts([3, 0])
    try:
        expected = alone.generate_greedy(asked)
        alone.poll(prompts([0, 1, 2, 3]), 0.0)
        wanted = {int(g["group_ids"][0]): g for g in alone.poll(None, 60.0).groups}

        found: dict[int, Batch] = {}
        apart: list[Batch] = []
        answer = subject.poll(prompts([0, 1, 2, 3]), 0.0)
        for _ in range(polls):
            groups = subject.stream.step()
            found |= {int(group["group_ids"][0]): group for group in groups}
        subject.begin_apart(asked, "greedy")
        answer = subject.poll(None, 0.0)
        assert answer.busy
        while answer.busy:
            answer = subject.poll(None, 0.001)
            found |= {int(group["group_ids"][0]): group for group in answer.groups}
            apart += answer.apart
        assert_same(found, wanted)
        by_key = {int(group["group_ids"][0]): group for group in apart}
        got = Batch.concat([by_key[key] for key in (3, 0)])
        for name in ("responses", "response_mask", "policy_version"):
            assert torch.equal(got[name], expected[name]), name
    finally:
        alone.close()
        subject.close()


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.integers(0, LONGEST + 4), slots=st.sampled_from([N, 2 * N, 16]))
def test_what_was_begun_goes_on_in_another_process_and_here(
    uninterrupted: dict[int, Batch], steps: int, slots: int
) -> None:
    first = stream(slots=slots)
    first.submit(prompts([0, 1, 2, 3]))
    found: dict[int, Batch] = {}
    for _ in range(steps):
        found |= {int(group["group_ids"][0]): group for group in first.step()}
    partial = first.partial_groups()
    assert partial.keys() | found.keys() == {0, 1, 2, 3}
    assert not partial.keys() & found.keys()
    second = stream()
    keys = sorted(partial)
    if keys:
        second.submit(
            with_partial_groups(
                prompts(keys), [PartialGroup.from_tree(partial[key].tree()) for key in keys]
            )
        )
    assert_same(finish(second, dict(found)), uninterrupted)
    assert_same(finish(first, found), uninterrupted)


def test_groups_that_were_whole_come_out_as_they_are(uninterrupted: dict[int, Batch]) -> None:
    """Finished, and not scored yet when the checkpoint was written."""
    whole = [PartialGroup.from_finished(uninterrupted[key]) for key in (0, 1)]
    assert all(all(one.finish_reasons) for one in whole)
    subject = stream()
    subject.submit(with_partial_groups(prompts([0, 1]), whole))
    assert subject.busy == 2
    found = finish(subject, {})
    assert_same(found, {key: uninterrupted[key] for key in (0, 1)})


def test_experts_of_finished_completions_are_kept(uninterrupted: dict[int, Batch]) -> None:
    read = uninterrupted[0]["attention_mask"].bool()
    read &= read.flip(1).cumsum(1).flip(1) > 1  # but for the last token
    experts = torch.randint(1, 9, (*read.shape, 4), dtype=torch.int16) * read[..., None]
    group = uninterrupted[0] | {"routed_experts": experts}
    partial = PartialGroup.from_tree(PartialGroup.from_finished(group).tree())
    subject = stream()
    subject.submit(with_partial_groups(prompts([0]), [partial]))
    assert torch.equal(finish(subject, {})[0]["routed_experts"], experts)

    without = (replace(partial.completions[0], routed_experts=None), *partial.completions[1:])
    subject.submit(
        with_partial_groups(prompts([0]), [PartialGroup(without, partial.finish_reasons)])
    )
    with pytest.raises(RolloutError, match="1 of 3 completions were saved without the experts"):
        subject.step()


def test_begun_and_new_prompts_come_together(uninterrupted: dict[int, Batch]) -> None:
    first = stream()
    first.submit(prompts([0, 1]))
    first.step()
    partial = first.partial_groups()
    second = stream()
    second.submit(with_partial_groups(prompts([0, 1, 2, 3]), [partial[0], None, None, None]))
    assert_same(finish(second, {}), uninterrupted)


def test_another_number_of_completions_is_refused() -> None:
    first = stream()
    first.submit(prompts([0]))
    first.step()
    with pytest.raises(RolloutError, match=r"saved with 3 completions and rollout\.n is 2"):
        stream(n=2).submit(with_partial_groups(prompts([0]), [first.partial_groups()[0]]))


@given(begun_groups)
def test_a_checkpoint_keeps_it_exactly(groups: list[Any]) -> None:
    parts = tuple(
        PartialCompletion(index, *([list(c) for c in zip(*rows, strict=True)] or [[], [], []]))
        for index, (rows, _) in enumerate(groups)
    )
    partial = PartialGroup(parts, tuple(end for _, end in groups))
    assert PartialGroup.from_tree(partial.tree()) == partial
    versions = [version for rows, _ in groups for _, _, version in rows]
    assert partial.oldest_version == (min(versions) if versions else None)


def test_prompts_without_the_column_have_begun_nothing() -> None:
    drawn = prompts([0, 1])
    same, partial = take_partial_groups(drawn)
    assert same is drawn
    assert partial == [None, None]


def test_it_is_full_while_a_whole_group_waits() -> None:
    subject = stream(slots=N)
    subject.submit(prompts([0]))
    subject.step()
    assert not subject.full
    subject.submit(prompts([1]))
    assert subject.full
    while subject.busy:
        subject.step()
    assert not subject.full
