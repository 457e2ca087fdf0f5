"""Shaping of rewards and DAPO's dynamic sampling."""

import math

import pytest
import torch

from engine.algorithms import shaping
from engine.algorithms.shaping import first_groups, groups_with_signal
from engine.errors import ConfigError, DataError

NAN = math.nan


def test_scores_go_on_the_last_token_of_the_policy() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    got = shaping.on_last_token(torch.tensor([5, 7, 9]), mask)
    assert got.tolist() == [[0, 5, 0], [0, 0, 7], [0, 0, 0]]
    assert got.dtype == torch.float32


def test_overlong_penalty_by_hand() -> None:
    lengths = torch.tensor([0, 80, 85, 90, 100, 110])
    got = shaping.overlong_penalty(lengths, 100, 20)
    assert got.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1.5])
    assert shaping.overlong_penalty(lengths, 100, 20, 2.0)[3].item() == pytest.approx(-1)
    with pytest.raises(ConfigError, match=r"overlong_buffer\.len=0"):
        shaping.overlong_penalty(lengths, 100, 0)
    with pytest.raises(ConfigError, match="between 1 and max_response_length=100"):
        shaping.overlong_penalty(lengths, 100, 101)
    with pytest.raises(ConfigError, match="penalty_factor=-1"):
        shaping.overlong_penalty(lengths, 100, 20, -1)


def test_truncated_rows_leave_the_mask() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    got = shaping.without_truncated(mask, torch.tensor([False, True, True]))
    assert got.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert got.dtype == mask.dtype


def test_kl_in_the_reward() -> None:
    scores, kl = torch.tensor([[0.0, 1.0, NAN]]), torch.tensor([[2.0, -4.0, NAN]])
    got = shaping.kl_in_reward(scores, kl.requires_grad_(), torch.tensor([[1, 1, 0]]), 0.25)
    assert got.tolist() == [[-0.5, 2.0, 0.0]]
    assert not got.requires_grad


def test_weights_of_components() -> None:
    components = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, 5.0]])
    assert shaping.weigh_components(components, [1.0, 0.5, 0.0]).tolist() == [2.0, 5.0]
    with pytest.raises(DataError, match="for 2 weights"):
        shaping.weigh_components(components, [1.0, 0.5])


def test_clip() -> None:
    rewards = torch.tensor([-3.0, 0.5, 3.0])
    assert shaping.clip_rewards(rewards, -1, 1).tolist() == [-1, 0.5, 1]
    assert shaping.clip_rewards(rewards, high=1).tolist() == [-3, 0.5, 1]
    assert shaping.clip_rewards(rewards).tolist() == [-3, 0.5, 3]
    with pytest.raises(ConfigError, match="is empty"):
        shaping.clip_rewards(rewards, 2, 1)


GROUPS = torch.tensor([5, 2, 5, 2, 8, 8, 3])


def test_groups_without_spread_are_dropped() -> None:
    metric = torch.tensor([1.0, 0.1, 0.0, 0.1, 0.2, 0.3, 1.0])
    kept = groups_with_signal(metric, GROUPS)
    assert kept.tolist() == [True, False, True, False, True, True, False]


def test_rows_left_out_neither_count_nor_stay() -> None:
    metric = torch.tensor([1.0, 0.0, NAN, 1.0, 0.2, 0.3, 1.0])
    rows = torch.tensor([True, True, False, True, True, False, True])
    kept = groups_with_signal(metric, GROUPS, rows)
    assert kept.tolist() == [False, True, False, True, False, False, False]
    one_group = torch.zeros(3, dtype=torch.long)
    kept = groups_with_signal(torch.tensor([1.0, 0.0, NAN]), one_group, rows[[0, 1, 2]])
    assert kept.tolist() == [True, True, False]


def test_first_groups_in_order_of_appearance() -> None:
    keep = torch.tensor([False, True, False, True, True, True, True])
    assert first_groups(GROUPS, keep, 2).tolist() == [1, 3, 4, 5]
    assert first_groups(GROUPS, keep, 9).tolist() == [1, 3, 4, 5, 6]
    assert first_groups(GROUPS, keep & False, 2).tolist() == []
